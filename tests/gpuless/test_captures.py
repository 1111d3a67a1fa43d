"""Captures of the real allocator: at errors that are caught, or that end the job, and as ordered; whoever is killed when."""

from __future__ import annotations

import gzip
import json
import pickle
import signal
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from allocscope.model import CaptureNote, CaptureOrder, CaptureReason, wire
from allocscope.proto.v1.capture_pb2 import CaptureNote as WireNote
from tests.e2e.processes import Machine, until
from tests.gpuless.node import Node, node
from tests.gpuless.rig import JobError, Rig
from tests.gpuless.test_probe_truth import mapped, tallied
from tests.gpuless.watched import START, WORKLOADS, Watched, watched


def notes(folder: Path) -> dict[str, CaptureNote]:
    """By capture, the oldest first."""
    paths = sorted(folder.glob("*.note"), key=lambda path: path.stat().st_mtime_ns)
    return {path.stem: wire.note_from_wire(WireNote.FromString(path.read_bytes())) for path in paths}


def snapshots(folder: Path) -> dict[str, dict[str, Any]]:
    return {path.stem: pickle.loads(path.read_bytes()) for path in folder.glob("*.snapshot")}


def take(folder: Path) -> tuple[CaptureNote, dict[str, Any]]:
    """The one capture there is; as the daemon does, it is taken away."""
    [(capture_id, note)] = notes(folder).items()
    [snapshot] = snapshots(folder).values()
    for path in folder.iterdir():
        path.unlink()
    assert note.capture.capture_id == capture_id == snapshot["allocscope"]["capture_id"]
    return note, snapshot


@pytest.fixture(scope="module")
def job(tmp_path_factory) -> Iterator[Watched]:
    """A job that these tests use one after the other; its captures are not counted against one another."""
    folder = tmp_path_factory.mktemp("job")
    with watched(Rig(folder), folder) as job:
        job("train(2)")
        job.look_often()
        job.receiver.wait_for(job.receiver.samples)
        job("from allocscope.probe import captures as c\nfresh = lambda: app._probe._sampler._captures")
        job("c.ORDERED_COST_FACTOR = 0  # so that one test's does not put off another's")
        yield job


@pytest.fixture
def fresh(job: Watched) -> Watched:
    """As at the start of a job, as far as captures go."""
    for path in job.folder.iterdir():
        path.unlink()
    job("k = fresh(); k._notes, k._snapshots, k._next_at_oom_s = c.Allowance(16, 60), c.Allowance(3, 900), -1e9")
    return job


# an error that is caught


def test_an_error_that_is_caught_leaves_all_that_there_is_to_know(fresh):
    text = fresh("run_out(1 << 40)")
    stats = fresh.stats()
    note, snapshot = take(fresh.folder)
    event, capture = note.event, note.capture
    assert event is not None
    assert (capture.reason, capture.problem, capture.device_uuid) == (CaptureReason.OOM, None, fresh.rig.uuid())
    assert event.requested_bytes == 1 << 40
    assert f"of which {(event.device_free_bytes or 0) / 2**30:.2f} GiB is free" in text
    assert f"total capacity of {(event.device_total_bytes or 0) / 2**30:.2f} GiB" in text
    assert note.samples is not None
    [sample] = note.samples.samples()
    assert (sample.num_ooms, sample.reserved_bytes) == (stats["num_ooms"], stats["reserved_bytes.all.current"])
    assert sample.allocated_bytes == stats["allocated_bytes.all.current"]
    assert note.block_map is not None
    assert mapped(note.block_map) == tallied(snapshot["segments"]) == tallied(fresh.segments())
    assert (note.process.job, note.process.torch_version) == ("watched", "2.14.1+cu130")
    assert snapshot["allocscope"]["oom"]["requested_bytes"] == 1 << 40
    assert snapshot["allocscope"]["process"]["devices"][0]["memory_fraction"] == 1.0


def test_the_stream_says_what_the_note_says(fresh):
    fresh("run_out()")
    note, _ = take(fresh.folder)
    assert note.samples is not None
    sample = next(note.samples.samples())
    fresh.receiver.wait_for(lambda: note.event in fresh.receiver.events())
    fresh.receiver.wait_for(lambda: sample in fresh.receiver.samples())
    fresh.receiver.wait_for(lambda: note.block_map in fresh.receiver.block_maps())


def test_the_error_is_torchs_own_and_nothing_is_allocated_for_us(fresh):
    fresh("torch.cuda.empty_cache()")
    before = fresh.stats(), fresh.rig.used_bytes()
    with pytest.raises(JobError) as raised:
        fresh("torch.empty(1 << 40, dtype=torch.uint8, device='cuda')")
    take(fresh.folder)
    assert raised.value.type_name == "OutOfMemoryError"
    assert raised.value.text.startswith("CUDA out of memory. Tried to allocate 1024.00 GiB.")
    assert "allocscope/probe" not in raised.value.traceback
    after = fresh.stats(), fresh.rig.used_bytes()
    changed = {key for key in before[0] if before[0][key] != after[0][key]}
    assert changed == {"num_ooms", "num_alloc_retries", "num_sync_all_streams"}  # by torch's own attempts
    assert before[1] == after[1]


@pytest.mark.parametrize("where", ["run_out_backward()", "run_out_in_capture()"])
def test_an_error_in_a_thread_of_pytorchs_or_in_a_capture_is_as_any_other(fresh, where):
    assert fresh(where).startswith("CUDA out of memory. Tried to allocate 1024.00 GiB.")
    note, snapshot = take(fresh.folder)
    assert note.block_map is not None
    assert mapped(note.block_map) == tallied(snapshot["segments"])


def test_of_a_hundred_errors_each_is_told_and_a_bounded_number_is_kept(fresh):
    told = len(fresh.receiver.events())
    fresh("for _ in range(100): run_out()")
    fresh.receiver.wait_for(lambda: len(fresh.receiver.events()) == told + 100)
    assert (len(notes(fresh.folder)), len(snapshots(fresh.folder))) == (16, 3)
    assert {note.event for note in notes(fresh.folder).values()} <= set(fresh.receiver.events())
    first = next(iter(notes(fresh.folder).values()))
    assert first.block_map is not None


def test_settings_that_were_changed_a_moment_before_are_in_it(fresh):
    fresh("torch.cuda.set_per_process_memory_fraction(0.5)")
    fresh("run_out()")
    fresh("torch.cuda.set_per_process_memory_fraction(1.0)")
    note, snapshot = take(fresh.folder)
    [device] = note.process.devices
    assert device.allowed_bytes == (device.total_bytes or 0) // 2
    assert snapshot["allocscope"]["process"]["devices"][0]["memory_fraction"] == 0.5


def test_a_disk_that_fills_up_costs_the_snapshot_only(fresh):
    fresh("import resource; limits = resource.getrlimit(resource.RLIMIT_FSIZE)")
    fresh("many = [torch.empty(1, device='cuda') for _ in range(500)]")
    fresh("resource.setrlimit(resource.RLIMIT_FSIZE, (8192, limits[1]))")
    assert fresh("run_out()").startswith("CUDA out of memory")
    fresh("resource.setrlimit(resource.RLIMIT_FSIZE, limits); del many")
    [(capture_id, note)] = notes(fresh.folder).items()
    assert [path.name for path in fresh.folder.iterdir()] == [f"{capture_id}.note"]
    assert "File too large" in (note.capture.problem or "")
    assert note.event is not None


def test_pytorchs_own_functions_open_it(fresh):
    fresh("run_out()")
    [path] = fresh.folder.glob("*.snapshot")
    fresh(f"import pickle; kept = pickle.load(open({str(path)!r}, 'rb')); from torch.cuda import _memory_viz as viz")
    assert "total_reserved" in fresh("viz.segsum(kept)")
    assert fresh("isinstance(viz.trace(kept), str)")
    assert "</body>" in fresh("viz.trace_plot(kept)")
    assert "</body>" in fresh("viz.segment_plot(kept)")
    assert "allocated" in fresh("viz.memory(kept, format_flamegraph=str)")


def test_our_own_command_opens_it(fresh, tmp_path):
    fresh("run_out()")
    [path] = fresh.folder.glob("*.snapshot")
    told = Machine(tmp_path).run("inspect", str(path), "--json")
    assert told.returncode == 0, told.stderr
    bill = json.loads(told.stdout)["devices"]["0"]["bill"]
    assert bill["reserved"] == fresh.stats()["reserved_bytes.all.current"]


# histories


def test_an_ordered_history_is_recorded_without_stacks_and_switched_off_again(fresh):
    fresh.receiver.say(orders=(CaptureOrder("0a" * 16, history_us=500_000, history_entries=1000),))
    until(lambda: fresh("torch._C._cuda_isHistoryEnabled()"), "the history is recorded")
    fresh("serve(60)")
    until(lambda: snapshots(fresh.folder), "the capture is there")
    note, snapshot = take(fresh.folder)
    assert (note.capture.capture_id, note.capture.reason, note.capture.problem) == (
        "0a" * 16,
        CaptureReason.ASKED,
        None,
    )
    trace = snapshot["device_traces"][0]
    assert note.capture.history_entries == len(trace) > 60
    assert {"alloc", "free_requested", "free_completed"} <= {entry["action"] for entry in trace}
    assert not [entry for entry in trace if "frames" in entry]
    assert fresh("torch._C._cuda_isHistoryEnabled()") is False
    assert fresh("torch.cuda.memory._snapshot()['device_traces']") == [[]]
    assert "torch._inductor.codecache" not in fresh("list(sys.modules)")


def test_who_holds_the_tensors_is_told_where_it_is_asked(fresh):
    fresh.receiver.say(orders=(CaptureOrder("0b" * 16, tensors=True),))
    until(lambda: snapshots(fresh.folder), "the capture is there")
    note, snapshot = take(fresh.folder)
    assert note.capture.tensors
    assert "Transformer" in json.dumps(snapshot["allocscope"]["tensors"])


def test_a_history_that_the_program_begins_meanwhile_stays_on(fresh):
    fresh.receiver.say(orders=(CaptureOrder("0c" * 16, history_us=1_000_000),))
    until(lambda: fresh("torch._C._cuda_isHistoryEnabled()"), "the history is recorded")
    fresh("torch.cuda.memory._record_memory_history(context=None, max_entries=50)")
    until(lambda: snapshots(fresh.folder), "the capture is there")
    note, _ = take(fresh.folder)
    assert note.capture.problem == "the program began a history of its own"
    assert fresh("torch._C._cuda_isHistoryEnabled()") is True
    fresh("torch.cuda.memory._record_memory_history(None)")
    assert fresh("torch._C._cuda_isHistoryEnabled()") is False


def test_the_history_that_the_program_records_comes_along_and_goes_on(fresh):
    """With stacks: putting the first of them into words takes a second or two, for which the note does not wait."""
    fresh("torch.cuda.memory._record_memory_history(stacks='all', max_entries=10000); serve(20)")
    fresh("run_out()")
    note, snapshot = take(fresh.folder)
    trace = snapshot["device_traces"][0]
    assert note.capture.history_entries == len(trace)
    assert [entry["action"] for entry in trace if entry["action"] in ("alloc", "oom")][-1] == "oom"
    stack = next(entry for entry in trace if entry["action"] == "alloc")["frames"]
    assert "serve" in [frame["name"] for frame in stack]
    assert note.block_map is not None
    assert mapped(note.block_map) == tallied(snapshot["segments"])
    fresh.receiver.say(orders=(CaptureOrder("0d" * 16, history_us=300_000),))
    until(lambda: snapshots(fresh.folder), "the capture is there")
    note, ordered = take(fresh.folder)
    assert (note.capture.problem, note.capture.reason) == (None, CaptureReason.ASKED)
    kept = [entry for entry in ordered["device_traces"][0] if entry["action"] != "snapshot"]
    before = [entry for entry in trace if entry["action"] != "snapshot"]
    assert list(map(_without_words, kept[: len(before)])) == list(map(_without_words, before))
    assert fresh("torch._C._cuda_isHistoryEnabled()") is True
    fresh("torch.cuda.memory._record_memory_history(None)")


def _without_words(entry):
    """What C++ frames are called is looked up at each snapshot, and not always found."""
    return {**entry, "frames": [frame for frame in entry["frames"] if frame["filename"].endswith(".py")]}


PREEMPTED = """
import os, pickle, signal
class Preempted(Exception): pass
def preempt(number, frame): raise Preempted
signal.signal(signal.SIGUSR1, preempt)
dump = pickle.dump
def interrupted(*arguments):
    os.kill(os.getpid(), signal.SIGUSR1)
    return dump(*arguments)
def run_out_and_be_preempted():
    pickle.dump = interrupted
    try:
        run_out()
    except Preempted:
        return "preempted"
    finally:
        pickle.dump = dump
"""


def test_a_signal_amid_a_capture_is_the_jobs_affair_and_the_capture_is_whole(fresh):
    fresh(PREEMPTED)
    assert fresh("run_out_and_be_preempted()") == "preempted"
    note, _ = take(fresh.folder)
    assert (note.capture.reason, note.capture.problem) == (CaptureReason.OOM, None)


# the end


def test_a_job_killed_right_after_has_left_its_capture(tmp_path):
    with watched(Rig(tmp_path), tmp_path) as job:
        job("train(1)")
        job.receiver.wait_for(job.receiver.samples)
        job.job.send("run_out(); __import__('os').kill(__import__('os').getpid(), 9)")
        assert job.job.process.wait() == -signal.SIGKILL
        note, snapshot = take(tmp_path / "captures")
        assert note.event is not None
        assert note.block_map is not None
        assert snapshot["segments"]


def test_a_job_killed_while_the_snapshot_is_written_has_left_its_note(tmp_path):
    with watched(Rig(tmp_path), tmp_path) as job:
        job("train(1)")
        job.receiver.wait_for(job.receiver.samples)
        job("import os, pickle; pickle.dump = lambda *_: os.kill(os.getpid(), 9)")
        job.job.send("run_out()")
        assert job.job.process.wait() == -signal.SIGKILL
        [(capture_id, note)] = notes(tmp_path / "captures").items()
        assert note.event is not None
        assert note.block_map is not None
        assert sorted(path.name for path in (tmp_path / "captures").iterdir()) == [
            f".{capture_id}.snapshot.part", f"{capture_id}.note",
        ]  # fmt: skip


# all the way


@pytest.fixture
def here(tmp_path) -> Iterator[tuple[Rig, Node]]:
    rig = Rig(tmp_path)
    with node(rig, tmp_path) as there:
        yield rig, there


def kept(there: Node, **expected: Any) -> Mapping[str, Any]:
    """A capture of the collector's that is kept, and is so."""

    def found() -> Any:
        items = there.get("/api/v1/captures")["items"]
        return next((c for c in items if c["state"] == "kept" and {**c, **expected} == c), None)

    capture: Mapping[str, Any] = until(found, f"the collector keeps a capture with {expected}")
    return capture


def downloaded(there: Node, capture_id: str) -> Any:
    request = urllib.request.Request(f"http://{there.collector.addresses['http']}/api/v1/captures/{capture_id}")
    request.add_header("accept-encoding", "gzip")
    with urllib.request.urlopen(request, timeout=20) as answer:
        return pickle.loads(gzip.decompress(answer.read()))


def test_captures_reach_the_collector_whatever_becomes_of_the_job(here):
    rig, there = here
    environ = {"ALLOCSCOPE_SOCKET": str(there.socket), "ALLOCSCOPE_JOB": "dies"}
    with rig.shell(environ) as job:
        job(WORKLOADS + START.replace('job="watched"', ""))
        job("train(2)")
        until(lambda: [j for j in there.get("/api/v1/jobs")["items"] if j["job"] == "dies"], "the job is known")
        body = json.dumps({"history_s": 0.5, "tensors": True}).encode()
        order = urllib.request.Request(
            f"http://{there.collector.addresses['http']}/api/v1/jobs/dies/captures",
            body,
            {"content-type": "application/json"},
        )
        with urllib.request.urlopen(order, timeout=20) as answer:
            [ordered] = json.loads(answer.read())["items"]
        capture = kept(there, capture_id=ordered["capture_id"])
        snapshot = downloaded(there, capture["capture_id"])
        assert tallied(snapshot["segments"]) == tallied(job("torch.cuda.memory_snapshot(include_traces=False)"))
        job.send("run_out(); __import__('os').kill(__import__('os').getpid(), 9)")
        assert job.process.wait() == -signal.SIGKILL
    capture = kept(there, reason="oom", job="dies")
    snapshot = downloaded(there, capture["capture_id"])
    assert snapshot["allocscope"]["oom"]["requested_bytes"] == 1 << 40
    assert capture["snapshot_bytes"] > 0
