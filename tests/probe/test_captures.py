"""Captures as files for the daemon: notes first, whole snapshots bounded, each order answered once, a full disk survived."""

import os
import pickle
import stat
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from allocscope.daemon import claims
from allocscope.model import (
    AllocatorRef,
    BlockMap,
    CaptureNote,
    CaptureOrder,
    CaptureReason,
    Device,
    Event,
    EventKind,
    Process,
    Sample,
    wire,
)
from allocscope.probe import capture_folder, capture_writer, host_memory
from allocscope.probe.allocators import Allocators
from allocscope.probe.capture_folder import CaptureFolder
from allocscope.probe.capture_writer import CaptureWriter
from allocscope.probe.captures import Captures, Moment
from allocscope.probe.history import History
from allocscope.probe.torch_blocks import TorchBlocks
from allocscope.probe.torch_cuda import TorchCuda
from allocscope.proto.v1.capture_pb2 import CaptureNote as WireNote
from tests.probe.fake_torch import GIB, FakeTorch, segment
from tests.probe.test_sampler import FakeUplink, Time

PROCESS = Process("a1" * 16, "job", 7, "node", 1, rank=3, world_size=8, torch_version="2.14.0", allocator_conf="a:1")
UUID = "GPU-00000000"
DEVICE = Device(UUID, 0, "Fake H200", 80 * GIB)
TRACE = [{"action": "alloc", "addr": 1, "size": 5, "stream": 0, "time_us": 9}]


class Rig:
    """One process's captures on a fake torch, in told time, beside a socket under `path`."""

    def __init__(self, path: Path, *, backend: str = "native", folder: bool = True, tensors: Any = None) -> None:
        self.torch, self.uplink, self.time, self.folder = FakeTorch(), FakeUplink(), Time(), path / "captures"
        self.torch.backend, self.torch.conf, self.torch.on_call = backend, "a:1", self.time.on_call
        self.torch.segments, self.torch.traces = [segment(0, (512, 500, "active_allocated"))], [list(TRACE)]
        if folder:
            self.make_folder()
        cuda = TorchCuda(self.torch.modules)
        self.allocators = Allocators(cuda, self.uplink, PROCESS, {})  # type: ignore[arg-type]
        self.allocators.get(0)
        self.history = History(self.torch.modules)
        blocks = TorchBlocks(self.torch.modules, cuda.backend)
        writer = CaptureWriter(cuda, blocks, self.allocators, CaptureFolder(str(path / "d.sock")))
        self.captures = Captures(self.allocators, writer, self.history, self.time.clock(), tensors)
        self.sequence = 0

    def make_folder(self) -> None:
        self.folder.mkdir()
        self.folder.chmod(0o1733)

    def moment(self) -> Moment:
        """As the sampler tells of an OutOfMemoryError."""
        self.sequence += 3
        time_us = int(self.time.now_s * 1e6)
        allocator = self.allocators.get(0)
        assert allocator is not None
        return Moment(
            allocator,
            Sample(self.sequence, time_us, allocated_bytes=500),
            BlockMap(self.sequence + 1, time_us, ()),
            Event(
                PROCESS.process_id, self.sequence + 2, time_us, EventKind.OOM, device_uuid=UUID,
                requested_bytes=20 << 20, device_total_bytes=80 * GIB, device_free_bytes=5,
            ),
        )  # fmt: skip

    def oom(self) -> Moment:
        moment = self.moment()
        self.captures.on_oom(moment)
        return moment

    def run(self, seconds: float) -> None:
        end = self.time.now_s + seconds
        while True:
            due_s = self.captures.step()
            if due_s > end:
                break
            self.time.now_s = max(due_s, self.time.now_s)
        self.time.now_s = end

    def recorded(self) -> dict | None:
        """What the history was switched on with."""
        return self.torch.history

    def names(self) -> list[str]:
        return sorted(path.name for path in self.folder.iterdir())

    def notes(self) -> list[CaptureNote]:
        """Oldest first."""
        paths = sorted(self.folder.glob("*.note"), key=lambda path: path.stat().st_mtime_ns)
        return [wire.note_from_wire(WireNote.FromString(path.read_bytes())) for path in paths]

    def note(self) -> CaptureNote:
        [note] = self.notes()
        return note

    def snapshots(self) -> Mapping[str, dict]:
        return {path.stem: pickle.loads(path.read_bytes()) for path in self.folder.glob("*.snapshot")}

    def snapshot(self) -> dict:
        [snapshot] = self.snapshots().values()
        return snapshot


# at an OutOfMemoryError


def test_an_oom_leaves_a_note_that_says_what_the_stream_says(tmp_path):
    rig = Rig(tmp_path)
    moment = rig.oom()
    note = rig.note()
    capture = note.capture
    assert (capture.reason, capture.process_id, capture.device_uuid) == (CaptureReason.OOM, PROCESS.process_id, UUID)
    assert (capture.time_us, capture.problem, capture.tensors) == (100_000_000, None, False)
    assert note.process == rig.allocators.process
    assert (note.process.devices, note.process.allocator_conf) == ((DEVICE,), "a:1")
    assert note.samples is not None
    assert note.samples.allocator == AllocatorRef(PROCESS.process_id, UUID)
    assert list(note.samples.samples()) == [moment.sample]
    assert (note.block_map, note.event) == (moment.block_map, moment.event)


def test_an_oom_leaves_the_whole_snapshot_with_pytorchs_own_keys_untouched(tmp_path):
    rig = Rig(tmp_path)
    rig.torch.fractions = [0.5]
    rig.oom()
    capture_id = rig.note().capture.capture_id
    assert rig.names() == [f"{capture_id}.note", f"{capture_id}.snapshot"]
    snapshot = rig.snapshot()
    ours = snapshot.pop("allocscope")
    assert snapshot == {"segments": rig.torch.segments, "device_traces": [TRACE], "allocator_settings": {}}
    assert (ours["capture_id"], ours["reason"], ours["time_us"]) == (capture_id, "oom", 100_000_000)
    assert (ours["process"]["job"], ours["process"]["rank"], ours["process"]["allocator_conf"]) == ("job", 3, "a:1")
    assert ours["process"]["devices"] == [
        {"uuid": UUID, "index": 0, "model": "Fake H200", "total_bytes": 80 * GIB, "memory_fraction": 0.5}
    ]
    assert ours["oom"] == {
        "device": 0, "device_uuid": UUID, "requested_bytes": 20 << 20, "device_total_bytes": 80 * GIB, "device_free_bytes": 5,
    }  # fmt: skip


def test_what_is_known_once_the_snapshot_is_there_is_in_the_note(tmp_path):
    rig = Rig(tmp_path)
    rig.oom()
    [path] = rig.folder.glob("*.snapshot")
    assert (rig.note().capture.snapshot_bytes, rig.note().capture.history_entries) == (path.stat().st_size, 1)


def test_the_note_is_there_before_the_snapshot_is_taken(tmp_path):
    rig = Rig(tmp_path)
    seen = []
    rig.torch.on_call = lambda name: seen.append(rig.names()) if name == "whole snapshot" else None
    rig.oom()
    capture_id = rig.note().capture.capture_id
    assert seen == [[f".{capture_id}.snapshot.part", f"{capture_id}.note"]]


def test_a_map_that_was_not_made_before_is_made_of_the_snapshot(tmp_path):
    rig = Rig(tmp_path)
    moment = rig.moment()
    made = BlockMap(99, 5, ())
    maps = {str(rig.torch.segments): made}
    rig.captures.on_oom(replace(moment, block_map=None, map_of=lambda segments: maps[str(segments)]))
    assert rig.note().block_map == made


def test_pytorchs_viewer_knows_the_pickles_protocol(tmp_path):
    rig = Rig(tmp_path)
    rig.oom()
    [path] = rig.folder.glob("*.snapshot")
    assert path.read_bytes()[:2] == b"\x80\x04"


def test_a_program_that_catches_many_ooms_leaves_a_bounded_number(tmp_path):
    rig = Rig(tmp_path)
    for _ in range(100):
        rig.oom()
        rig.time.now_s += 0.01
    assert (len(rig.notes()), len(rig.snapshots())) == (16, 3)
    problems = [note.capture.problem for note in rig.notes()]
    assert problems == [None] * 3 + ["a whole snapshot was taken not long before"] * 13


def test_the_next_ones_of_a_long_run_leave_theirs_too(tmp_path):
    rig = Rig(tmp_path)
    for _ in range(48):
        rig.oom()
        rig.time.now_s += 300
    assert (len(rig.notes()), len(rig.snapshots())) == (48, 3 + 15)


def test_snapshots_of_caught_ooms_take_a_hundredth_of_the_time(tmp_path):
    rig = Rig(tmp_path)
    rig.time.costs = {"whole snapshot": 20.0}
    began_s = rig.time.now_s
    for _ in range(10):
        rig.oom()
        rig.time.now_s += 1000
    taken = rig.torch.calls.count("whole snapshot")
    assert 2 <= taken <= 1 + (rig.time.now_s - began_s) / 2000


def test_no_snapshot_is_taken_within_another(tmp_path):
    """Two threads may run out at once, on two devices."""
    rig = Rig(tmp_path)
    within: list[Moment] = []

    def on_call(name: str) -> None:
        if name == "whole snapshot" and not within:
            within.append(rig.moment())
            rig.captures.on_oom(within[0])

    rig.torch.on_call = on_call
    rig.oom()
    assert len(rig.snapshots()) == 1
    assert {note.capture.problem for note in rig.notes()} == {None, "another capture was being taken just then"}


@pytest.mark.parametrize(
    "error", [RuntimeError("x"), MemoryError(), RecursionError(), ZeroDivisionError()], ids=lambda e: type(e).__name__
)
def test_whatever_goes_wrong_is_told_and_raises_nothing(tmp_path, error):
    rig = Rig(tmp_path)
    rig.torch.fails = {"whole snapshot": error}
    rig.oom()
    assert rig.names() == [f"{rig.note().capture.capture_id}.note"]
    assert rig.note().capture.problem
    assert rig.note().event is not None


@pytest.mark.parametrize("text", ["a\0b", "a\udcffb", "a\n" * 20_000])
def test_a_problem_in_whatever_words_costs_no_note(tmp_path, text):
    def raising(_: float) -> None:
        raise ZeroDivisionError(text)

    rig = Rig(tmp_path, tensors=raising)
    rig.torch.fails["whole snapshot"] = ZeroDivisionError(text)
    rig.captures.order(CaptureOrder("0a" * 16, tensors=True))
    rig.run(60)
    rig.oom()
    assert len(rig.notes()) == 2
    for note in rig.notes():
        assert note.capture.problem
        claims.check_capture(note.capture)


def test_a_note_without_figures_is_one_all_the_same(tmp_path):
    rig = Rig(tmp_path)
    moment = rig.moment()
    rig.captures.on_oom(Moment(moment.allocator, None, None, moment.event))
    assert (rig.note().samples, rig.note().block_map, rig.note().event) == (None, None, moment.event)


def test_a_note_that_would_be_too_large_goes_without_its_map(tmp_path, monkeypatch):
    rig = Rig(tmp_path)
    monkeypatch.setattr(capture_writer, "LARGEST_NOTE_BYTES", 10)
    rig.oom()
    assert rig.note().block_map is None
    assert rig.note().event is not None


# the folder


def test_files_can_be_read_by_the_folders_group(tmp_path):
    rig = Rig(tmp_path)
    old = os.umask(0o077)
    try:
        rig.oom()
    finally:
        os.umask(old)
    for path in rig.folder.iterdir():
        assert (stat.S_IMODE(path.stat().st_mode), path.stat().st_gid) == (0o640, rig.folder.stat().st_gid)


@pytest.mark.parametrize(
    ("group_of_file", "owner_of_file", "mode"),
    [(5, 1000, 0o640), (1000, 0, 0o640), (1000, 1000, 0o644)],
    ids=["the folder's group", "the folder's owner", "neither, and a name that nobody else knows"],
)
def test_files_can_be_read_by_a_daemon_of_another_user(tmp_path, monkeypatch, group_of_file, owner_of_file, mode):
    """The folder is user 0's and group 5's."""
    rig = Rig(tmp_path)
    stats = {
        True: SimpleNamespace(st_uid=0, st_gid=5),
        False: SimpleNamespace(st_uid=owner_of_file, st_gid=group_of_file),
    }
    fstat, refused = os.fstat, PermissionError(1, "Operation not permitted")
    monkeypatch.setattr(os, "fstat", lambda file: stats[stat.S_ISDIR(fstat(file).st_mode)])
    monkeypatch.setattr(os, "fchown", lambda *_: (_ for _ in ()).throw(refused))
    rig.oom()
    monkeypatch.undo()
    assert {stat.S_IMODE(path.stat().st_mode) for path in rig.folder.iterdir()} == {mode}


def test_without_a_folder_the_newest_note_waits_for_it(tmp_path):
    rig = Rig(tmp_path, folder=False)
    rig.oom()
    last = rig.oom()
    rig.run(5)
    assert not rig.folder.exists()
    rig.make_folder()
    rig.run(2)
    assert rig.note().event == last.event
    assert rig.note().capture.problem == "no daemon was there to leave a snapshot with"
    assert rig.snapshots() == {}
    assert "whole snapshot" not in rig.torch.calls
    rig.run(100)
    assert len(rig.notes()) == 1


def test_a_folder_that_is_a_link_is_not_followed(tmp_path):
    rig = Rig(tmp_path, folder=False)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    rig.folder.symlink_to(elsewhere)
    rig.oom()
    assert list(elsewhere.iterdir()) == []


def test_a_folder_that_may_not_be_written_costs_the_capture_only(tmp_path, monkeypatch):
    rig = Rig(tmp_path)
    refused = PermissionError(13, "Permission denied")
    monkeypatch.setattr(capture_folder.Part, "__init__", lambda *_: (_ for _ in ()).throw(refused))
    rig.oom()
    assert rig.names() == []


def test_a_disk_that_fills_up_leaves_the_note_and_no_part(tmp_path, monkeypatch):
    rig = Rig(tmp_path)
    rig.torch.segments = [segment(0, *[(512, 500, "active_allocated")] * 1000)] * 100
    write = os.write

    def full(file: int, data: bytes) -> int:
        if len(data) > 16384:
            raise OSError(28, "No space left on device")
        return write(file, data)

    monkeypatch.setattr(os, "write", full)
    rig.oom()
    assert rig.names() == [f"{rig.note().capture.capture_id}.note"]
    assert "No space left on device" in (rig.note().capture.problem or "")


def test_a_nearly_full_disk_gets_a_note_and_no_snapshot(tmp_path, monkeypatch):
    rig = Rig(tmp_path)
    monkeypatch.setattr(capture_folder, "KEPT_FREE_SHARE", 1.0)
    rig.oom()
    assert rig.snapshots() == {}
    assert "bytes free" in (rig.note().capture.problem or "")


def test_once_there_is_room_again_the_next_error_leaves_its_snapshot(tmp_path, monkeypatch):
    rig = Rig(tmp_path)
    rig.time.costs = {"whole snapshot": 0.01}
    with monkeypatch.context() as nearly_full:
        nearly_full.setattr(capture_folder, "KEPT_FREE_SHARE", 1.0)
        for _ in range(10):
            rig.oom()
            rig.time.now_s += 5
    assert rig.snapshots() == {}
    rig.oom()
    assert len(rig.snapshots()) == 1


def test_snapshots_that_come_to_nothing_take_a_hundredth_of_the_time_too(tmp_path):
    rig = Rig(tmp_path)
    rig.time.costs, rig.torch.fails = {"whole snapshot": 0.1}, {"whole snapshot": MemoryError()}
    began_s = rig.time.now_s
    for _ in range(1000):
        rig.oom()
        rig.time.now_s += 0.1
    taken = rig.torch.calls.count("whole snapshot")
    assert 2 <= taken <= 1 + (rig.time.now_s - began_s) / 10
    assert "a whole snapshot was tried not long before" in {note.capture.problem for note in rig.notes()}


def test_what_no_daemon_takes_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(capture_folder, "HELD_BYTES", 10_000)
    rig = Rig(tmp_path)
    rig.torch.segments = [segment(0, *[(512, number, "active_allocated") for number in range(300, 512)])]
    for _ in range(16):
        rig.oom()
        rig.time.now_s += 3600
    held = sum(path.stat().st_size for path in rig.folder.iterdir())
    assert 5_000 < held <= 10_000
    for path in rig.folder.iterdir():
        path.unlink()
    rig.oom()
    assert rig.snapshot()["allocscope"]["reason"] == "oom"


# memory


def test_a_history_that_the_machine_has_no_memory_for_is_left_out(tmp_path, monkeypatch):
    rig = Rig(tmp_path)
    rig.torch.history = {"enabled": "all"}
    rig.torch.figures = [{"allocation": 10_000_000}]
    monkeypatch.setattr(host_memory, "available_bytes", lambda: GIB)
    monkeypatch.setattr(host_memory, "anonymous_bytes", lambda: GIB)
    rig.oom()
    assert rig.snapshot()["device_traces"] == [[]]
    assert "its history is left out" in (rig.note().capture.problem or "")


def test_a_history_of_ours_is_as_long_as_it_was_asked_for(tmp_path, monkeypatch):
    """However much the process allocated before, and holds."""
    rig = Rig(tmp_path)
    rig.torch.figures = [{"allocation": 10_000_000}]
    monkeypatch.setattr(host_memory, "available_bytes", lambda: GIB)
    monkeypatch.setattr(host_memory, "anonymous_bytes", lambda: GIB)
    rig.captures.order(ORDER)
    rig.run(21)
    assert (rig.snapshot()["device_traces"], rig.note().capture.problem) == ([TRACE], None)


@pytest.mark.parametrize(("allocations", "held"), [(1000, 64 * GIB), (10_000_000, GIB // 10)])
def test_either_of_two_bounds_says_that_a_history_has_room(tmp_path, monkeypatch, allocations, held):
    rig = Rig(tmp_path)
    rig.torch.history = {"enabled": "all"}
    rig.torch.figures = [{"allocation": allocations}]
    monkeypatch.setattr(host_memory, "available_bytes", lambda: GIB)
    monkeypatch.setattr(host_memory, "anonymous_bytes", lambda: held)
    rig.oom()
    assert (rig.snapshot()["device_traces"], rig.note().capture.problem) == ([TRACE], None)


# as ordered

ORDER = CaptureOrder("0a" * 16, device_uuid=UUID, history_us=20_000_000, history_entries=1000)


def test_an_order_has_a_history_recorded_and_then_the_snapshot_taken(tmp_path):
    rig = Rig(tmp_path)
    rig.captures.order(ORDER)
    rig.run(19)
    assert rig.recorded() == {"enabled": "all", "how": (None, "python", 1000, True)}
    assert rig.names() == []
    rig.run(2)
    assert rig.recorded() is None
    capture = rig.note().capture
    assert (capture.capture_id, capture.reason, capture.device_uuid) == ("0a" * 16, CaptureReason.ASKED, UUID)
    assert (capture.time_us, capture.history_entries, capture.problem) == (120_000_000, 1, None)
    assert rig.snapshot()["allocscope"]["capture_id"] == "0a" * 16
    assert (rig.note().samples, rig.note().event) == (None, None)


def test_an_order_without_a_history_is_followed_at_once(tmp_path):
    rig = Rig(tmp_path)
    rig.captures.order(CaptureOrder("0b" * 16, reason=CaptureReason.FORECAST))
    rig.captures.step()
    assert (rig.note().capture.reason, rig.note().capture.device_uuid) == (CaptureReason.FORECAST, None)
    assert "switch" not in rig.torch.calls
    assert len(rig.snapshots()) == 1


def test_the_history_that_a_program_records_comes_along_untouched(tmp_path):
    rig = Rig(tmp_path)
    rig.torch.history = mine = {"enabled": "all", "how": "mine"}
    rig.captures.order(ORDER)
    rig.run(21)
    assert "switch" not in rig.torch.calls
    assert rig.recorded() == mine
    assert (rig.note().capture.history_entries, rig.note().capture.problem) == (1, None)


def test_a_program_that_meddles_with_the_history_is_told_of(tmp_path):
    rig = Rig(tmp_path)
    rig.captures.order(ORDER)
    rig.torch.modules["torch.cuda.memory"]._record_memory_history(None)
    rig.run(21)
    assert rig.note().capture.problem == "the program switched the history off, which was recorded for this capture"
    assert rig.snapshot()["allocscope"]["problem"] == rig.note().capture.problem


def test_orders_that_overlap_share_one_recording_and_each_is_answered(tmp_path):
    rig = Rig(tmp_path)
    rig.captures.order(ORDER)
    rig.run(5)
    rig.captures.order(CaptureOrder("0c" * 16, history_us=30_000_000))
    rig.run(16)
    assert rig.recorded() == {"enabled": "all", "how": (None, "python", 1000, True)}
    rig.run(15)
    assert rig.recorded() is None
    assert rig.torch.calls.count("switch") == 2
    assert [(n.capture.capture_id, n.capture.time_us) for n in rig.notes()] == [
        ("0a" * 16, 120_000_000), ("0c" * 16, 135_000_000),
    ]  # fmt: skip
    assert len(rig.snapshots()) == 2


def test_an_order_that_comes_again_is_followed_once(tmp_path):
    rig = Rig(tmp_path)
    for _ in range(3):
        rig.captures.order(ORDER)
        rig.run(30)
    assert [note.capture.time_us for note in rig.notes()] == [120_000_000]
    assert rig.torch.calls.count("switch") == 2


def test_an_order_for_a_device_that_is_not_used_is_answered_with_why_not(tmp_path):
    rig = Rig(tmp_path)
    rig.captures.order(CaptureOrder("0d" * 16, device_uuid="GPU-9", history_us=5))
    rig.run(1)
    assert rig.note().capture.problem == f"the process does not use device GPU-9 by torch; it uses {UUID}"
    assert (rig.snapshots(), rig.recorded()) == ({}, None)


@pytest.mark.parametrize("backend", ["cudaMallocAsync", "pluggable"])
def test_an_order_that_the_backend_cannot_follow_is_answered_with_why_not(tmp_path, backend):
    rig = Rig(tmp_path, backend=backend)
    rig.captures.order(CaptureOrder("0d" * 16))
    rig.run(1)
    assert rig.note().capture.problem == f"torch's allocator here is {backend}, of which no snapshot can be taken"
    assert rig.names() == ["0d" * 16 + ".note"]


def test_where_no_history_can_be_recorded_the_snapshot_comes_without_and_at_once(tmp_path):
    rig = Rig(tmp_path)
    rig.torch.fails = {"switch": RuntimeError("x")}
    rig.captures.order(ORDER)
    rig.captures.step()
    assert rig.note().capture.problem == "torch's recording of a history fails"
    assert len(rig.snapshots()) == 1


def test_what_is_asked_for_is_bounded(tmp_path):
    rig = Rig(tmp_path)
    rig.captures.order(CaptureOrder("0e" * 16, history_us=2**60, history_entries=2**60))
    assert rig.recorded() == {"enabled": "all", "how": (None, "python", 1_000_000, True)}
    rig.run(601)
    assert len(rig.snapshots()) == 1


def test_too_many_orders_at_once_are_answered_with_why_not(tmp_path):
    rig = Rig(tmp_path)
    for number in range(20):
        rig.captures.order(CaptureOrder(f"{number:032x}", history_us=20_000_000))
    assert [n.capture.problem for n in rig.notes()] == [
        "16 captures of this process are waiting already; ask again when they are done"
    ] * 4
    rig.run(1000)
    assert len(rig.snapshots()) == 16


def test_ordered_captures_that_cost_much_are_spread_out(tmp_path):
    rig = Rig(tmp_path)
    rig.time.costs = {"whole snapshot": 1.0}
    for number in range(3):
        rig.captures.order(CaptureOrder(f"{number:032x}"))
    rig.run(100)
    assert [n.capture.time_us / 1e6 for n in rig.notes()] == [100, 121, 130]


def test_orders_that_the_end_overtakes_are_answered_and_the_history_given_back(tmp_path):
    rig = Rig(tmp_path)
    rig.captures.order(ORDER)
    rig.run(3)
    rig.captures.close()
    assert rig.note().capture.problem == "the process ended, or stopped its probe, before it was due"
    assert (rig.recorded(), rig.snapshots()) == (None, {})


def test_orders_that_nobody_looked_at_before_the_end_are_answered_too(tmp_path):
    rig = Rig(tmp_path)
    rig.captures.order(ORDER)
    rig.captures.close([ORDER, replace(ORDER, capture_id="0b" * 16)])
    problem = "the process ended, or stopped its probe, before it was due"
    assert [(note.capture.capture_id, note.capture.problem) for note in rig.notes()] == [
        (ORDER.capture_id, problem), ("0b" * 16, problem),
    ]  # fmt: skip


def test_an_order_is_answered_though_the_end_overtakes_the_taking_of_it(tmp_path):
    told: list[str | None] = []

    def tensors(limit_s):
        rig.captures.close()
        told.append(rig.note().capture.problem)

    rig = Rig(tmp_path, tensors=tensors)
    rig.captures.order(CaptureOrder(ORDER.capture_id, tensors=True))
    rig.run(1)
    assert told == ["the process ended, or stopped its probe, while it was taken"]
    assert rig.note().capture.problem is None  # it was taken all the same
    assert set(rig.snapshots()) == {ORDER.capture_id}


def test_who_holds_the_tensors_comes_along_where_it_is_asked(tmp_path):
    rig = Rig(tmp_path, tensors=lambda limit_s: {"rows": [limit_s]})
    rig.captures.order(CaptureOrder("0f" * 16, tensors=True))
    rig.captures.step()
    assert rig.snapshot()["allocscope"]["tensors"] == {"rows": [10.0]}
    assert rig.note().capture.tensors


def test_an_error_while_somebody_is_told_who_holds_the_tensors_has_its_own_snapshot(tmp_path):
    """That may take seconds."""
    rig: Rig = Rig(tmp_path, tensors=lambda limit_s: {"at": rig.oom().event.sequence})
    rig.captures.order(CaptureOrder("0f" * 16, tensors=True))
    rig.captures.step()
    assert sorted(snapshot["allocscope"]["reason"] for snapshot in rig.snapshots().values()) == ["asked", "oom"]


def test_who_holds_the_tensors_may_fail(tmp_path):
    rig = Rig(tmp_path, tensors=lambda limit_s: 1 / 0)
    rig.captures.order(CaptureOrder("0f" * 16, tensors=True))
    rig.captures.step()
    assert "who holds the tensors could not be told" in (rig.note().capture.problem or "")
    assert (rig.note().capture.tensors, len(rig.snapshots())) == (False, 1)
