"""Whatever a history says, it is told to its end: what cannot be is told, counted and mended."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from allocscope.allocator.chronicle.events import Contradiction
from allocscope.allocator.chronicle.history import DeviceHistory
from allocscope.allocator.chronicle.standing import Standing
from allocscope.allocator.chronicle.tally import Tally
from allocscope.allocator.snapshot import Snapshot, TraceEntry, read_snapshot
from allocscope.cli.log_json import account_as_json, event_as_json
from allocscope.cli.log_summary import Account, as_text
from allocscope.cli.log_text import LineText, beginning_as_text, end_as_text
from tests.allocator.made import alloc, asked_free, completed_free, freed, gave_back, got, mapped, unmapped
from tests.log.told import MIB, A, brief, history, segment, told
from tests.snapshots.made import DATA

BLOCK = [got(A, 20 * MIB), alloc(A, 5 * MIB)]


@pytest.mark.parametrize(
    ("entries", "problem"),
    [
        pytest.param([asked_free(A + MIB)], "a free of 0x7f0000100000, where no block begins", id="a free of nothing"),
        pytest.param([*freed(A), asked_free(A)], "a free of 0x7f0000000000, where one is free", id="freed twice"),
        pytest.param(
            [completed_free(A), alloc(A, 2 * MIB), *freed(A)],
            "a completed free of 0x7f0000000000, where one is live",
            id="completed, not asked for",
        ),
        pytest.param([alloc(A, MIB)], "1048576 bytes at 0x7f0000000000, where one is live", id="allocated twice"),
        pytest.param(
            [alloc(A + 2 * MIB, MIB)],
            "1048576 bytes at 0x7f0000200000, in the middle of a block in use",
            id="inside a block",
        ),
        pytest.param(
            [alloc(A + 8 * MIB, MIB)],
            "1048576 bytes at 0x7f0000800000, in the middle of a free block",
            id="inside a hole",
        ),
        pytest.param(
            [alloc(A + 5 * MIB, 16 * MIB)],
            "16777216 bytes at 0x7f0000500000, where 15728640 are free",
            id="larger than the hole",
        ),
        pytest.param(
            [alloc(A + 64 * MIB, MIB)], "1048576 bytes at 0x7f0004000000, where there is no segment", id="outside"
        ),
        pytest.param(
            [alloc(A + 5 * MIB, 2 * MIB, stream=7)],
            "2097152 bytes at 0x7f0000500000 for stream 7, in another stream's segment",
            id="of another stream",
        ),
        pytest.param(
            [gave_back(A, 20 * MIB)],
            "segment 0x7f0000000000 given back, where no whole free one begins",
            id="given back in use",
        ),
        pytest.param(
            [got(A + 10 * MIB, 20 * MIB)],
            "a new segment of 20971520 bytes at 0x7f0000a00000, where there is one",
            id="overlapping",
        ),
        pytest.param(
            [mapped(A, 20 * MIB)],
            "newly mapped pages of 20971520 bytes at 0x7f0000000000, where there is one",
            id="mapped over one",
        ),
        pytest.param(
            [unmapped(A, 2 * MIB)],
            "2097152 bytes unmapped at 0x7f0000000000, which are not all free",
            id="unmapped in use",
        ),
        pytest.param([got(A + 64 * MIB, 0)], "segment_alloc of 0 bytes at 0x7f0004000000", id="nothing got"),
    ],
)
def test_what_cannot_be_is_told_and_what_follows_is_told_too(entries, problem):
    after = [got(A + 128 * MIB, 2 * MIB), alloc(A + 128 * MIB, 2 * MIB)]
    found = history([*BLOCK, *entries, *after])
    events = list(found.events())
    assert [event.problem for event in events if isinstance(event, Contradiction)] == [problem]
    assert brief(events)[-2:] == [("segment_alloc", 128, 2, False), ("alloc", 128, 2, 2, True, 2, 0)]
    assert found.first_contradiction == (4 if entries[:2] == freed(A) else 2)


def test_a_block_allocated_over_another_ends_that_one():
    events = told([*BLOCK, alloc(A + 2 * MIB, MIB), *freed(A), *freed(A + 2 * MIB)])
    assert [event for event in brief(events) if event[0] in ("free", "merge")] == [
        ("free", 0, 5, 2),
        ("free", 2, 1, 1),
        ("merge", 0, 20, 1, 2, 17),
    ]


def test_a_device_without_its_segments_is_told_and_differs():
    found = history(BLOCK, [segment(A + 64 * MIB, [(20 * MIB, 0, "free")])])
    list(found.events())
    difference = found.difference()
    assert difference is not None
    assert (difference.blocks, found.estimate_from) == (3, 1)
    assert "3 blocks are not as the snapshot says, the first at 0x7f0000000000" in end_as_text(found)


REAL: list[Snapshot] = [
    read_snapshot((DATA / name).read_bytes(), name)
    for name in (
        "snapshot-2.11.0-default.pickle",
        "snapshot-2.14.1-expandable.pickle",
        "pool-pending-expandable-1.pickle.gz",
        "graph-1.pickle.gz",
    )
]
ACTIONS = (
    "alloc",
    "free_requested",
    "free_completed",
    "segment_alloc",
    "segment_free",
    "segment_map",
    "segment_unmap",
    "oom",
    "x",
)
NUMBERS = st.sampled_from([0, 1, 512, MIB, 2 * MIB, 20 * MIB, (1 << 64) - 1]) | st.integers(0, 1 << 64)
PLACE = st.floats(0, 1, exclude_max=True)


def damaged(trace: list[TraceEntry], what: str, place: float, other: float, number: int, action: str) -> None:
    at, there = int(place * len(trace)), int(other * len(trace))
    match what:
        case "drop":
            del trace[at]
        case "repeat":
            trace.insert(there, trace[at])
        case "swap":
            trace[at], trace[there] = trace[there], trace[at]
        case "action":
            trace[at] = trace[at]._replace(action=action)
        case "size":
            trace[at] = trace[at]._replace(size=number)
        case "move":
            trace[at] = trace[at]._replace(address=trace[at].address ^ number & 0xFFFFFFF)
        case "stream":
            trace[at] = trace[at]._replace(stream=number - 5, time_us=number, pool_id=(0, number % 2))


@given(
    snapshot=st.sampled_from(REAL),
    start=PLACE,
    damage=st.lists(
        st.tuples(
            st.sampled_from(["drop", "repeat", "swap", "action", "size", "move", "stream"]),
            PLACE,
            PLACE,
            NUMBERS,
            st.sampled_from(ACTIONS),
        ),
        max_size=8,
    ),
    without=st.none() | st.integers(0, 40),
)
@settings(max_examples=150, deadline=None)
def test_a_damaged_history_is_told_to_its_end_and_says_what_is_not_exact(snapshot, start, damage, without):
    trace = list(snapshot.traces[0])
    trace = trace[int(start * len(trace)) :]
    for each in damage:
        if trace:
            damaged(trace, *each)
    segments = [each for at, each in enumerate(snapshot.segments) if at != without]
    found = DeviceHistory(0, tuple(trace), tuple(segments), snapshot.settings)
    lines, standing = LineText(None), Standing(found.live_before, found.reserved_before)
    tally = Tally(late_from_entry=found.entries // 2)
    assert list(beginning_as_text(found))
    for event in found.events():
        assert "\n" not in lines.line(event)
        assert json.loads(json.dumps(event_as_json(event)))["kind"] == event.kind.value
        standing.take(event)
        tally.take(event)
    assert tally.contradictions <= found.contradictions
    assert (found.estimate_from is None) == (found.difference() is None and not found.contradictions)
    account = Account(0, tally, found, standing)
    assert as_text(account)
    assert json.loads(json.dumps(account_as_json(account)))["allocations"] == tally.allocations
