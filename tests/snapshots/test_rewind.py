"""Going back from a snapshot gives the memory as it was, to the byte."""

import gzip
import random

import pytest

from allocscope.allocator.diagnosis import diagnose
from allocscope.allocator.diagnosis.rewind import Rewind
from allocscope.allocator.errors import TraceError
from allocscope.allocator.messages import Verdict
from allocscope.allocator.recording import read_recording
from allocscope.allocator.settings import AllocatorSettings
from allocscope.allocator.snapshot import SnapshotSegment, read_snapshot
from allocscope.allocator.state import AllocatorState
from tests.allocator.made import recordings
from tests.snapshots.made import DATA, FRAMES, MIB, A, block, entry, live, pickled, segment


def rows(segments) -> list:
    """Segments of either kind, comparable."""
    if segments and isinstance(segments[0], SnapshotSegment):
        return [
            (s.address, s.total_size, s.stream, s.segment_type, s.pool_id, s.is_expandable,
             [(b.address, b.size, b.state, b.requested_size if b.state != "inactive" else 0) for b in s.blocks])
            for s in segments
        ]  # fmt: skip
    return [
        (s["address"], s["total_size"], s["stream"], s["segment_type"], s["segment_pool_id"], s["is_expandable"],
         [(b["address"], b["size"], b["state"], b["requested_size"] if b["state"] != "inactive" else 0) for b in s["blocks"]])
        for s in segments
    ]  # fmt: skip


@pytest.mark.parametrize("path", recordings()[::3], ids=lambda path: path.name.removesuffix(".run.json"))
def test_a_whole_run_taken_back_was_at_each_moment_as_it_is_forwards(path):
    recording = read_recording(path)
    last = len(recording.trace) - 1
    draw = random.Random(path.name)
    moments = sorted({0, last, *(draw.randrange(last) for _ in range(4))})
    state = AllocatorState(recording.settings, device_total_bytes=recording.device_total_bytes)
    forwards, applied = {}, 0
    for moment in moments:
        state.apply(recording.trace[applied : moment + 1])
        forwards[moment] = rows(state.segments())
        applied = moment + 1
    rewind = Rewind(recording.device_index, recording.segments, recording.trace, recording.settings)
    for moment in reversed(moments):
        assert rows(rewind.back_to(moment)) == forwards[moment]


def backwards(segments: list[dict], trace: list[dict], to: int, settings: AllocatorSettings | None = None) -> list:
    read = read_snapshot(pickled({"segments": segments, "device_traces": [trace]}), "x")
    return rows(Rewind(0, read.segments, read.traces[0], settings or AllocatorSettings()).back_to(to))


def test_each_kind_of_entry_is_undone():
    freed = [entry("free_requested", A + 4 * MIB, 3 * MIB), entry("free_completed", A + 4 * MIB, 3 * MIB)]
    after = [segment(A, [live(4 * MIB), block(16 * MIB)])]
    before = [segment(A, [live(4 * MIB), live(3 * MIB), block(13 * MIB)])]
    assert backwards(after, [entry("oom", 0, MIB), *freed], 0) == rows(before)
    assert backwards(before, [entry("oom", 0, MIB), entry("alloc", A + 4 * MIB, 3 * MIB)], 0) == rows(after)
    assert backwards([], [entry("oom", 0, MIB), entry("segment_free", A, 20 * MIB)], 0) == rows(
        [segment(A, [block(20 * MIB)])]
    )
    assert (
        backwards([segment(A, [block(20 * MIB)])], [entry("oom", 0, MIB), entry("segment_alloc", A, 20 * MIB)], 0) == []
    )


def test_a_free_that_waits_is_seen_waiting():
    freed = [entry("free_requested", A, 3 * MIB), entry("free_completed", A, 3 * MIB)]
    (row,) = backwards([segment(A, [block(20 * MIB)])], freed, 0)
    assert row[-1] == [(A, 3 * MIB, "active_pending_free", 3 * MIB), (A + 3 * MIB, 17 * MIB, "inactive", 0)]


def test_slack_belongs_to_the_block_before_it():
    """In a large segment less than 1 MiB is not split off: 3 MiB - 512 of a hole of 3.5 MiB takes all of it."""
    after = [segment(A, [block(7 * MIB // 2), live(33 * MIB // 2)])]
    freed = [entry("free_requested", A, 3 * MIB - 700), entry("free_completed", A, 3 * MIB - 700)]
    (row,) = backwards(after, [entry("oom", 0, MIB), *freed], 0)
    assert row[-1][0] == (A, 7 * MIB // 2, "active_allocated", 3 * MIB - 700)


def test_slack_before_free_bytes_is_known_from_what_was_there():
    """The block behind the slack was freed first, so only an earlier entry of its tells where the slack ends."""
    first, second = A, A + 7 * MIB // 2
    trace = [
        entry("alloc", second, 4 * MIB),
        entry("alloc", first, 3 * MIB),
        entry("free_requested", second, 4 * MIB),
        entry("free_completed", second, 4 * MIB),
        entry("oom", 0, MIB),
        entry("free_requested", first, 3 * MIB),
        entry("free_completed", first, 3 * MIB),
    ]
    (row,) = backwards([segment(A, [block(20 * MIB)])], trace, 4)
    assert row[-1] == [(first, 7 * MIB // 2, "active_allocated", 3 * MIB), (second, 33 * MIB // 2, "inactive", 0)]


def test_pages_mapped_since_are_gone_and_unmapped_ones_are_back():
    def mapped(*blocks, at=A):
        return segment(at, list(blocks), is_expandable=True, segment_type="large")

    held = [mapped(live(MIB), block(39 * MIB)), mapped(block(19 * MIB), live(MIB), at=A + 60 * MIB)]
    whole = [mapped(live(MIB), block(78 * MIB), live(MIB))]
    expandable = AllocatorSettings(expandable=True)
    unmapped = [entry("oom", 0, MIB), entry("segment_unmap", A + 40 * MIB, 20 * MIB)]
    remapped = [entry("oom", 0, MIB), entry("segment_map", A + 40 * MIB, 20 * MIB)]
    assert backwards(held, unmapped, 0, expandable) == rows(whole)
    assert backwards(whole, remapped, 0, expandable) == rows(held)


@pytest.mark.parametrize(
    "trace",
    [
        [entry("alloc", A + MIB, 512)],
        [entry("alloc", A - MIB, 512)],
        [entry("free_requested", A, 512)],
        [entry("free_completed", A, 512)],
        [entry("free_completed", A + 4 * MIB, 17 * MIB)],
        [entry("segment_alloc", A, 20 * MIB)],
        [entry("segment_free", A + 10 * MIB, 20 * MIB)],
        [entry("segment_map", A, 20 * MIB)],
        [entry("segment_unmap", A - 10 * MIB, 20 * MIB)],
    ],
)
def test_a_history_that_contradicts_the_snapshot_is_told_as_such(trace):
    with pytest.raises(TraceError, match="the history has a gap between this entry and the snapshot"):
        backwards([segment(A, [live(4 * MIB), block(16 * MIB)])], [entry("oom", 0, MIB), *trace], 0)


def test_an_out_of_memory_is_judged_by_its_own_moment():
    """The program unwound and gave everything back before the snapshot was taken."""
    trace = [
        entry("alloc", A + 8 * MIB, 4 * MIB, frames=FRAMES),
        {"action": "oom", "device_free": 3 * MIB, "size": 17 * MIB, "stream": 0, "time_us": 5},
        entry("free_requested", A + 8 * MIB, 4 * MIB),
        entry("free_completed", A + 8 * MIB, 4 * MIB),
        entry("segment_free", A, 20 * MIB),
    ]
    (device,) = diagnose(read_snapshot(pickled({"segments": [], "device_traces": [trace]}), "x")).devices
    (failure,) = device.failures
    assert device.now.reserved_bytes == 0
    assert failure.verdict is Verdict.FRAGMENTATION
    assert failure.why[0] == (
        "16.00 MiB was free inside the allocator and 3.00 MiB on the device: together 19.00 MiB, enough for 17.00 MiB"
    )
    assert failure.moment is not None
    assert failure.moment is device.focus
    assert rows(failure.moment.segments) == rows([segment(A, [block(8 * MIB), live(4 * MIB), block(8 * MIB)])])
    assert failure.moment.segments[0].blocks[1].stack is not None
    assert device.device_free_bytes == 23 * MIB


@pytest.mark.parametrize(
    ("device_free", "requested", "verdict"),
    [
        (3 * MIB, 20 * MIB, Verdict.CAPACITY),
        (3 * MIB, 19 * MIB, Verdict.FRAGMENTATION),
        (20 * MIB, 19 * MIB, Verdict.LIMIT),
        (None, 17 * MIB, Verdict.UNKNOWN),
    ],
)
def test_the_verdict_follows_from_what_was_free(device_free, requested, verdict):
    told = {"action": "oom", "device_free": device_free, "size": requested, "stream": 0, "time_us": 5}
    held = [segment(A, [block(8 * MIB), live(4 * MIB), block(8 * MIB)])]
    (device,) = diagnose(read_snapshot(pickled({"segments": held, "device_traces": [[told]]}), "x")).devices
    assert device.failures[0].verdict is verdict


def test_a_failure_that_the_history_does_not_lead_back_to_is_unknown():
    trace = [entry("oom", 0, 64 * MIB, device_free=MIB), entry("alloc", A, 512)]
    diagnosis = diagnose(read_snapshot(pickled({"segments": [], "device_traces": [trace]}), "x"))
    (failure,) = diagnosis.devices[0].failures
    assert (failure.verdict, failure.moment) == (Verdict.UNKNOWN, None)
    assert [finding.kind for finding in diagnosis.findings] == ["history"]
    assert diagnosis.devices[0].focus is diagnosis.devices[0].now


@pytest.mark.parametrize("name", ["snapshot-2.11.0-default.pickle", "snapshot-2.14.1-expandable.pickle"])
def test_a_real_failure_was_as_its_own_message_said(name):
    """Both ran the same program: 51.96 MiB reserved but not allocated, 298 MiB free on the device, 900 MiB wanted."""
    diagnosis = diagnose(read_snapshot((DATA / name).read_bytes(), name))
    (failure,) = diagnosis.devices[0].failures
    assert failure.moment is not None
    assert (failure.entry.size, failure.entry.device_free) == (900 * MIB, 298 * MIB)
    assert failure.moment.reserved_bytes == 106_954_752
    assert failure.moment.reserved_bytes - failure.moment.allocated_bytes == 38_759_424 + 15_728_640
    assert failure.verdict is Verdict.CAPACITY
    assert diagnosis.findings == ()


def test_only_the_latest_failures_are_gone_back_to():
    trace = [entry("oom", 0, 64 * MIB, device_free=MIB) for _ in range(25)]
    held = [segment(A, [live(20 * MIB)])]
    (device,) = diagnose(
        read_snapshot(gzip.compress(pickled({"segments": held, "device_traces": [trace]})), "x")
    ).devices
    assert [failure.moment is not None for failure in device.failures] == [False] * 5 + [True] * 20
