"""Captures on a real daemon, between a folder that jobs write to and a collector that keeps them."""

from __future__ import annotations

import os
import resource
import stat
import subprocess
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from allocscope.model import CaptureOrder, CaptureReason, Process
from allocscope.model.wire import event_to_wire, order_to_wire, process_to_wire
from allocscope.proto.v1.collector_service_pb2 import ProcessOrder
from tests.daemon.capture_fakes import (
    ID,
    FakeCaptures,
    dead_process,
    folder_of,
    leave,
    leave_note,
    leave_snapshot,
    leave_whole,
    note,
)
from tests.daemon.fakes import WAIT_S, DaemonProcess, FakeCollector, FakeProbe, process, sample
from tests.daemon.stranger import Stranger

MIB = 1 << 20
RANDOM = os.urandom(3 * MIB // 2)
"""Does not shrink."""


@pytest.fixture
def captures():
    return FakeCaptures()


@pytest.fixture
def collector(captures):
    fake = FakeCollector(also=[captures.add_to])
    yield fake
    captures.go_on.set()
    fake.stop()


def until(holds: Callable[[], bool], what: object = "") -> None:
    deadline_s, pause = time.monotonic() + WAIT_S, threading.Event()
    while not holds():
        assert time.monotonic() < deadline_s, what
        pause.wait(0.005)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def spool_of(daemon: DaemonProcess) -> Path:
    return daemon.folder / "spool" / "captures"


def events(collector: FakeCollector) -> Counter[tuple[str, int]]:
    """How often each came, batches that came twice once."""
    once = {batch.sequence: batch for batch in collector.batches}
    return Counter((event.process_id, event.sequence) for batch in once.values() for event in batch.events)


@contextmanager
def living() -> Iterator[Process]:
    """A process that does nothing, as its probe would describe it."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        yield process(host=os.uname().nodename, pid=child.pid, started_us=time.time_ns() // 1000 + 10**6)
    finally:
        child.kill()
        child.communicate(timeout=WAIT_S)


# the way of a capture


def test_what_a_killed_process_left_reaches_the_collector(tmp_path, collector, captures):
    """Its stream never brought anything: not even who it is."""
    with DaemonProcess(tmp_path, collector.address) as daemon:
        leave_whole(folder_of(daemon), note(dead_process()), b"snapshot" * 1000)
        kept = captures.wait_kept()
        collector.wait_for(lambda c: any(batch.events for batch in c.batches))
        assert collector.sequences() == [7]
        batch = next(batch for batch in collector.batches if batch.events)
        assert list(batch.processes) == [process_to_wire(dead_process())]
        assert batch.events[0].message == "CUDA out of memory"
        until(lambda: names(folder_of(daemon)) == names(spool_of(daemon)) == [])
        assert daemon.figures("allocscope_dropped_total") == {}
        assert daemon.figures("allocscope_capture_pack_seconds_count") == {"allocscope_capture_pack_seconds_count": 1}
        assert daemon.stop() == 0
    assert kept.snapshot == b"snapshot" * 1000
    assert kept.hello.node == "node-1"
    assert kept.hello.process == process_to_wire(dead_process())
    assert (kept.hello.capture.capture_id, kept.hello.capture.snapshot_bytes) == (ID, 8000)
    assert not kept.hello.capture.HasField("problem")


def test_what_the_stream_brings_too_is_there_once(tmp_path, collector, captures):
    with DaemonProcess(tmp_path, collector.address) as daemon:
        whose = process()
        probe = FakeProbe(daemon.socket, whose)
        left = note(whose, first=3)
        assert left.event
        probe.samples(sample(1), sample(2))
        leave_note(folder_of(daemon), left)
        leave_snapshot(folder_of(daemon), b"snapshot")
        probe.samples(sample(3))
        probe.send(event=event_to_wire(left.event))
        captures.wait_kept()
        probe.wait_acknowledged(4)
        probe.samples(sample(5))
        collector.wait_for(lambda c: 5 in c.sequences())
        assert collector.sequences() == [1, 2, 3, 5]
        assert events(collector) == {("a" * 32, 4): 1}
        probe.end()


def test_what_a_killed_stream_had_not_brought_is_taken_from_the_note(tmp_path, collector, captures):
    with DaemonProcess(tmp_path, collector.address) as daemon, Stranger(daemon.socket, "a" * 32, samples=2) as job:
        job.wait_acknowledged(2)
        leave_note(folder_of(daemon), note(job.hello, first=3))
        job.kill()
        kept = captures.wait_kept()
        collector.wait_for(lambda c: bool(events(c)))
        assert collector.sequences() == [1, 2, 3]
        assert events(collector) == {("a" * 32, 4): 1}
    assert kept.packed == b""
    assert kept.hello.capture.problem == "its process ended before the snapshot was written"


def test_a_snapshot_that_is_being_written_is_waited_for(tmp_path, collector, captures):
    with DaemonProcess(tmp_path, collector.address) as daemon, living() as whose:
        leave_note(folder_of(daemon), note(whose, figures=False))
        daemon.wait_log("capture noted")
        (folder_of(daemon) / f".{ID}.snapshot.part").write_bytes(b"snap")
        rounds = lambda: sum(daemon.figures("allocscope_capture_intake_seconds_count").values())  # noqa: E731
        before = rounds()
        until(lambda: rounds() > before + 5)
        assert captures.kept == {}
        leave_snapshot(folder_of(daemon), b"snapshot")
        assert captures.wait_kept().snapshot == b"snapshot"
        until(lambda: names(folder_of(daemon)) == [])


def test_a_note_that_says_why_there_is_no_snapshot_is_not_kept_waiting(tmp_path, collector, captures):
    with DaemonProcess(tmp_path, collector.address) as daemon, living() as whose:
        leave_note(folder_of(daemon), note(whose, figures=False, problem="a whole snapshot was taken not long before"))
        hello = captures.wait_kept().hello
    assert hello.capture.problem == "a whole snapshot was taken not long before"
    assert not hello.capture.HasField("snapshot_bytes")


def test_a_note_that_is_written_anew_is_what_counts(tmp_path, collector, captures):
    with DaemonProcess(tmp_path, collector.address) as daemon, living() as whose:
        first = note(whose, figures=False)
        leave_note(folder_of(daemon), first)
        daemon.wait_log("capture noted")
        capture = replace(first.capture, snapshot_bytes=1, history_entries=77, tensors=True)
        leave_note(folder_of(daemon), replace(first, capture=capture))
        leave_snapshot(folder_of(daemon), b"snapshot")
        hello = captures.wait_kept().hello
        assert (hello.capture.history_entries, hello.capture.tensors, hello.capture.snapshot_bytes) == (77, True, 8)


def test_a_note_anew_with_a_reason_ends_the_waiting(tmp_path, collector, captures):
    with DaemonProcess(tmp_path, collector.address) as daemon, living() as whose:
        first = note(whose, figures=False)
        leave_note(folder_of(daemon), first)
        daemon.wait_log("capture noted")
        leave_note(folder_of(daemon), replace(first, capture=replace(first.capture, problem="no room on the disk")))
        assert captures.wait_kept().hello.capture.problem == "no room on the disk"


def test_a_capture_without_figures_is_kept_too(tmp_path, collector, captures):
    with DaemonProcess(tmp_path, collector.address) as daemon:
        leave_whole(
            folder_of(daemon),
            note(dead_process(), figures=False, reason=CaptureReason.ASKED, device_uuid=None),
            b"snapshot",
        )
        assert captures.wait_kept().snapshot == b"snapshot"


def test_many_captures_of_many_processes_all_arrive(tmp_path, collector, captures):
    ids = [uuid.uuid4().hex for _ in range(40)]
    with DaemonProcess(tmp_path, collector.address) as daemon:
        for id_ in ids:
            leave_whole(folder_of(daemon), note(dead_process(process_id=id_), id_), id_.encode() * 1000)
        captures.wait_for(lambda c: len(c.kept) == 40)
        collector.wait_for(lambda c: len(events(c)) == 40)
        until(lambda: names(folder_of(daemon)) == names(spool_of(daemon)) == [])
    assert {id_: kept.snapshot for id_, kept in captures.kept.items()} == {id_: id_.encode() * 1000 for id_ in ids}
    assert set(events(collector).values()) == {1}


# what is lost, and what is not


def test_a_collector_that_is_away_gets_them_when_it_is_back_also_from_a_daemon_that_was_killed(tmp_path, captures):
    with DaemonProcess(tmp_path) as daemon:  # no collector
        leave_whole(folder_of(daemon), note(dead_process()), RANDOM)
        until(lambda: names(spool_of(daemon)) == [f"{ID}.capture"] and names(folder_of(daemon)) == [])
        until(lambda: sum(daemon.figures("allocscope_capture_spool_captures").values()) == 1)
        assert sum(daemon.figures("allocscope_capture_spool_bytes").values()) > len(RANDOM)
        daemon.kill()
    collector = FakeCollector(also=[captures.add_to])
    try:
        with DaemonProcess(tmp_path, collector.address) as daemon:
            assert captures.wait_kept().snapshot == RANDOM
            collector.wait_for(lambda c: bool(events(c)))
            until(lambda: names(spool_of(daemon)) == [])
            assert daemon.stop() == 0
    finally:
        collector.stop()


def test_a_daemon_that_is_killed_again_and_again_loses_none_and_stores_none_twice(tmp_path, collector, captures):
    ids = [uuid.uuid4().hex for _ in range(6)]
    folder, spool = tmp_path / "captures", tmp_path / "spool" / "captures"
    with DaemonProcess(tmp_path, collector.address) as daemon:
        daemon.kill()
    for id_ in ids:
        leave_whole(folder, note(dead_process(process_id=id_), id_), RANDOM + id_.encode())
    moments: list[Callable[[], bool]] = [
        lambda: len([line for line in daemon.log if line.get("event") == "capture noted"]) >= 3,
        lambda: any(name.endswith(".part") for name in names(spool)),
        lambda: len(names(folder)) < 2 * len(ids),
        lambda: len(captures.pieces) > 1,
        lambda: len(captures.kept) > 0,
        lambda: len(names(folder)) < len(ids),
    ]
    for moment in moments:
        with DaemonProcess(tmp_path, collector.address, capture_bytes_per_s=20 * MIB) as daemon:
            until(moment, moments.index(moment))
            daemon.kill()
    with DaemonProcess(tmp_path, collector.address) as daemon:
        captures.wait_for(lambda c: len(c.kept) == len(ids))
        collector.wait_for(lambda c: len(events(c)) == len(ids))
        until(lambda: names(folder) == names(spool) == [])
        assert daemon.figures("allocscope_dropped_total") == {}
        assert daemon.stop() == 0
    assert {id_: kept.snapshot for id_, kept in captures.kept.items()} == {id_: RANDOM + id_.encode() for id_ in ids}
    for id_ in ids:  # what came in two batches is numbered as before, so that the collector stores it once
        assert set(collector.sequences(id_)) == {7}
        assert {sequence for (process_id, sequence) in events(collector) if process_id == id_} == {8}


def test_a_disk_without_room_leaves_captures_where_they_are_until_there_is(tmp_path, collector, captures):
    with DaemonProcess(tmp_path, collector.address) as daemon:
        _, hard = resource.prlimit(daemon.pid, resource.RLIMIT_FSIZE, (MIB, resource.RLIM_INFINITY))
        leave_whole(folder_of(daemon), note(dead_process()), RANDOM)
        daemon.wait_log("a capture cannot be kept, is left where it is, and tried again: File too large")
        leave_note(folder_of(daemon), note(dead_process("b"), "d" * 32, figures=False))
        captures.wait_kept("d" * 32)  # there is room for this one
        assert names(folder_of(daemon)) == [f"{ID}.note", f"{ID}.snapshot"]
        resource.prlimit(daemon.pid, resource.RLIMIT_FSIZE, (hard, hard))
        assert captures.wait_kept().snapshot == RANDOM
        daemon.wait_log("captures can be kept again")
        assert daemon.figures("allocscope_capture_pack_failures_total")["allocscope_capture_pack_failures_total"] > 0
        assert daemon.figures("allocscope_dropped_total") == {}


def test_a_large_capture_on_its_way_holds_up_no_batch(tmp_path, collector, captures):
    with DaemonProcess(tmp_path, collector.address) as daemon:
        captures.go_on.clear()
        leave_whole(folder_of(daemon), note(dead_process("b"), figures=False), RANDOM)
        captures.wait_for(lambda c: bool(c.pieces))
        probe = FakeProbe(daemon.socket, process())
        probe.samples(sample(1))
        collector.wait_for(lambda c: c.sequences() == [1])
        leave_note(folder_of(daemon), note(dead_process("d"), "d" * 32, first=70))
        collector.wait_for(lambda c: c.sequences("d" * 32) == [70])
        captures.go_on.set()
        assert captures.wait_kept().snapshot == RANDOM
        probe.end()


def test_memory_stays_flat_whatever_the_snapshots_size(tmp_path, collector, captures):
    def peak_bytes() -> int:
        status = Path(f"/proc/{daemon.pid}/status").read_text()
        return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))

    with DaemonProcess(tmp_path, collector.address, capture_bytes_per_s=1 << 40) as daemon:
        leave_whole(folder_of(daemon), note(dead_process()), b"small")
        captures.wait_kept()
        before = peak_bytes()
        large = os.urandom(32 * MIB)
        leave_whole(folder_of(daemon), note(dead_process(), "d" * 32), large)
        assert captures.wait_kept("d" * 32).snapshot == large
        assert peak_bytes() - before < 16 * MIB


def test_a_daemon_that_is_told_to_end_does_so_in_the_middle_and_goes_on_at_its_next_start(
    tmp_path, collector, captures
):
    captures.go_on.clear()
    with DaemonProcess(tmp_path, collector.address, drain_s=0.1) as daemon:
        for letter in "bd":
            leave_whole(folder_of(daemon), note(dead_process(letter), letter * 32), RANDOM)
        captures.wait_for(lambda c: bool(c.pieces))
        assert daemon.stop() == 0
        assert [
            line for line in daemon.log if line.get("level") in ("error", "warning") and line["event"] != "nvml"
        ] == []
    captures.go_on.set()
    with DaemonProcess(tmp_path, collector.address) as daemon:
        for letter in "bd":
            assert captures.wait_kept(letter * 32).snapshot == RANDOM


# what is not believed


@pytest.mark.parametrize(
    ("put", "reason", "why"),
    [
        pytest.param(
            lambda folder: leave(folder, f"{ID}.note", b"\xff" * 100),
            "unreadable",
            "it is no note, or damaged",
            id="garbage for a note",
        ),
        pytest.param(
            lambda folder: leave(folder, f"{ID}.note", b""),
            "unnamed_process",
            "a process without an id or a job's name (id '', job '')",
            id="an empty note",
        ),
        pytest.param(
            lambda folder: leave_note(folder, note(process(job="a\nb"))),
            "unprintable",
            "a job with unprintable letters: 'a\\nb'",
            id="a lie",
        ),
        pytest.param(
            lambda folder: leave_note(folder, note(process(), "e" * 32)).rename(folder / f"{ID}.note"),
            "capture_id",
            f"the note {ID} is of capture {'e' * 32}",
            id="another capture's note",
        ),
        pytest.param(
            lambda folder: os.truncate(leave_note(folder, note(process())), 5 * MIB),
            "unreadable",
            f"a note of {5 * MIB} bytes (at most {4 * MIB})",
            id="a huge note",
        ),
        pytest.param(
            lambda folder: (folder / f"{ID}.note").symlink_to("/etc/passwd"),
            "not_a_file",
            "only regular files are taken; what puts others there?",
            id="a link",
        ),
        pytest.param(
            lambda folder: (folder / "core").touch(),
            "not_a_capture",
            "jobs leave only captures there; what else puts files there?",
            id="another file",
        ),
    ],
)
def test_garbage_is_told_of_removed_and_counted_and_what_is_beside_it_is_taken(
    tmp_path, collector, captures, put, reason, why
):
    with DaemonProcess(tmp_path, collector.address) as daemon:
        put(folder_of(daemon))
        leave_whole(folder_of(daemon), note(dead_process("b"), "d" * 32), b"s")
        captures.wait_kept("d" * 32)
        line = daemon.wait_log("capture lost")
        assert (line["reason"], line["why"], line["level"]) == (reason, why, "warning")
        until(lambda: names(folder_of(daemon)) == [])
        name = f'allocscope_dropped_total{{reason="{reason}",what="captures"}}'
        assert daemon.figures("allocscope_dropped_total") == {name: 1}
    assert list(captures.kept) == ["d" * 32]


def test_of_a_snapshot_that_is_too_large_the_rest_is_kept_and_says_why(tmp_path, collector, captures):
    with DaemonProcess(tmp_path, collector.address, capture_largest_bytes=1 << 16) as daemon:
        leave_whole(folder_of(daemon), note(dead_process()), bytes(65537))
        kept = captures.wait_kept()
        assert kept.hello.capture.problem == (
            "the snapshot has 65537 bytes or more, the limit is 65536 (capture_largest_bytes)"
        )
        assert kept.packed == b""
        name = 'allocscope_dropped_total{reason="too_large",what="captures"}'
        assert daemon.figures("allocscope_dropped_total") == {name: 1}
        until(lambda: names(folder_of(daemon)) == [])


def test_figures_that_cannot_be_are_refused_and_the_capture_is_kept(tmp_path, collector, captures):
    with DaemonProcess(tmp_path, collector.address) as daemon:
        left = note(dead_process())
        assert left.samples
        lie = replace(left.samples, columns={**left.samples.columns, "reserved_bytes": (1 << 50,)})
        leave_whole(folder_of(daemon), replace(left, samples=lie), b"snapshot")
        assert captures.wait_kept().snapshot == b"snapshot"
        collector.wait_for(lambda c: bool(events(c)))
        assert collector.sequences() == []
        rejected = 'allocscope_samples_rejected_total{reason="out_of_range"}'
        assert daemon.figures("allocscope_samples_rejected_total") == {rejected: 1}


def test_a_process_that_is_here_is_not_spoken_for_by_another(tmp_path, collector, captures):
    with DaemonProcess(tmp_path, collector.address) as daemon:
        probe = FakeProbe(daemon.socket, process())
        probe.samples(sample(1))
        probe.wait_acknowledged(1)
        leave_note(folder_of(daemon), note(process(pid=os.getpid() + 1)))
        assert daemon.wait_log("capture lost")["reason"] == "process_id_taken"
        assert captures.kept == {}
        probe.end()


@pytest.mark.parametrize("mode", ["0660", "0666"])
def test_the_folder_is_as_open_as_the_socket(tmp_path, mode):
    own = os.getgroups()[0] if os.geteuid() else 7  # nobody but root may give away what is theirs
    with DaemonProcess(tmp_path, socket_group=own, socket_mode=mode) as daemon:
        found = folder_of(daemon).stat()
        assert (found.st_gid, stat.S_IMODE(found.st_mode)) == (own, {"0660": 0o3730, "0666": 0o3733}[mode])


def test_a_folder_that_cannot_be_had_is_told_of_and_all_else_goes_on(tmp_path, collector, captures):
    (tmp_path / "captures").touch()
    with DaemonProcess(tmp_path, collector.address) as daemon:
        line = daemon.wait_log("jobs can leave no captures")
        assert (line["level"], line["why"]) == ("error", "File exists")
        probe = FakeProbe(daemon.socket, process())
        probe.samples(sample(1))
        collector.wait_for(lambda c: c.sequences() == [1])
        daemon.wait_log(f"captures that jobs leave cannot be taken: File exists ({tmp_path / 'captures'})")
        (tmp_path / "captures").unlink()
        until((tmp_path / "captures").is_dir)
        leave_note(folder_of(daemon), note(dead_process("b")))
        captures.wait_kept()
        probe.end()


# orders


def test_an_order_for_a_capture_gets_to_its_process_at_once(tmp_path, collector):
    with DaemonProcess(tmp_path, collector.address, interval_s=10) as daemon:
        probe = FakeProbe(daemon.socket, process())
        order = order_to_wire(CaptureOrder(ID, history_us=20_000_000, tensors=True))
        daemon.wait_log("process attached")
        collector.wait_for(lambda c: bool(c.hellos))
        collector.order(ProcessOrder(process_id="a" * 32, order=order))
        nudge(daemon, collector)
        probe.wait_for(lambda p: p.orders == [order])
        assert (
            len(collector.batches) == 1
        )  # the one that the collector answered by the order; an interval later comes another
        assert probe.acknowledged == 0
        probe.end()


def nudge(daemon: DaemonProcess, collector: FakeCollector) -> None:
    """Have the fake collector speak: it does when it hears of a batch. A process that ends makes one."""
    passing = FakeProbe(daemon.socket, process("f", process_id=uuid.uuid4().hex))
    passing.samples(sample(1))
    passing.end()


def test_an_order_survives_a_short_break_of_its_process(tmp_path, collector, captures):
    with DaemonProcess(tmp_path, collector.address) as daemon:
        order = order_to_wire(CaptureOrder(ID))
        first = FakeProbe(daemon.socket, process())
        first.samples(sample(1))
        first.wait_acknowledged(1)
        collector.order(ProcessOrder(process_id="a" * 32, order=order))
        first.samples(sample(2))
        first.wait_for(lambda p: p.orders == [order])
        first.break_off()
        second = FakeProbe(daemon.socket, process())
        second.wait_for(lambda p: p.orders == [order])
        leave_note(folder_of(daemon), note(process(), figures=False, problem="no snapshot here"))
        assert captures.wait_kept().hello.capture.problem == "no snapshot here"
        second.break_off()
        third = FakeProbe(daemon.socket, process())
        third.samples(sample(3))
        third.wait_acknowledged(3)
        assert third.orders == []
        third.end()


def test_who_waits_for_a_capture_of_a_process_that_is_gone_is_told(tmp_path, collector, captures):
    with DaemonProcess(tmp_path, collector.address) as daemon, Stranger(daemon.socket, "a" * 32) as job:
        job.wait_acknowledged(1)
        job.kill()
        daemon.wait_log("process gone")
        order = CaptureOrder(ID, device_uuid="GPU-1", reason=CaptureReason.ASKED)
        collector.order(ProcessOrder(process_id="a" * 32, order=order_to_wire(order)))
        nudge(daemon, collector)
        hello = captures.wait_kept().hello
    assert hello.capture.problem == "the process is not on its node any more, or has no probe that takes orders"
    assert hello.process == process_to_wire(job.hello)
    assert (hello.capture.process_id, hello.capture.device_uuid) == ("a" * 32, "GPU-1")
