"""What a history tells of its entries: each event, with its figures."""

import pytest

from allocscope.allocator.chronicle.events import Pool, Waiting, WaitOver
from tests.allocator.made import (
    alloc,
    asked_free,
    completed_free,
    entry,
    freed,
    gave_back,
    got,
    mapped,
    oom,
    unmapped,
)
from tests.log.told import MIB, A, brief, history, segment, told

SPLIT_20 = [got(A, 20 * MIB), alloc(A, 5 * MIB)]
SERVED_SPLIT_20 = [
    ("segment_alloc", 0, 20, False),
    ("alloc", 0, 5, 5, True, 20, 15),
]
"""alloc: from where, requested, block, from the driver?, the free block that it was the front of, what is left of it."""


def test_a_block_from_the_driver_and_the_next_ones_by_splitting_what_is_left():
    trace = [*SPLIT_20, alloc(A + 5 * MIB, 3 * MIB)]
    assert brief(told(trace)) == [*SERVED_SPLIT_20, ("alloc", 5, 3, 3, False, 15, 12)]


def test_a_free_block_is_used_again_as_it_was_and_its_slack_is_part_of_it():
    """What is left over and not larger than 1 MiB is not split off in the large pool."""
    trace = [got(A, 20 * MIB), alloc(A, 19 * MIB + MIB // 2), *freed(A), alloc(A, 19 * MIB + MIB // 4)]
    assert brief(told(trace)) == [
        ("segment_alloc", 0, 20, False),
        ("alloc", 0, 19.5, 20, True, 20, 0),
        ("free", 0, 19.5, 20),
        ("alloc", 0, 19.25, 20, False, 20, 0),
    ]


def test_a_freed_block_joins_its_free_neighbours():
    blocks = [alloc(A + at * MIB, 2 * MIB) for at in (0, 2, 4)]
    trace = [got(A, 20 * MIB), *blocks, *freed(A), *freed(A + 4 * MIB), *freed(A + 2 * MIB)]
    assert brief(told(trace))[4:] == [
        ("free", 0, 2, 2),
        ("free", 4, 2, 2),
        ("merge", 4, 16, 2, 0, 14),  # what came of it, itself, before, behind
        ("free", 2, 2, 2),
        ("merge", 0, 20, 2, 2, 16),
    ]


def test_a_free_that_waits_for_another_stream_tells_how_long():
    trace = [
        *SPLIT_20,
        asked_free(A, time_us=1_000),
        alloc(A + 5 * MIB, 2 * MIB, time_us=1_500),
        completed_free(A, time_us=3_500),
    ]
    waiting, _, over = told(trace)[2:]
    pool = Pool(0, 0, False, (0, 0))
    assert waiting == Waiting(2, 1_000, pool, A, 5 * MIB, 5 * MIB)
    assert over == WaitOver(4, 3_500, pool, A, 5 * MIB, 5 * MIB, 2_500)


@pytest.mark.parametrize("left_out", ["free_requested", "free_completed"])
def test_frees_of_which_only_one_half_is_recorded_are_frees(left_out):
    """As with skip_actions of _record_memory_history (PyTorch 2.11 on)."""
    trace = [entry for entry in [*SPLIT_20, *freed(A)] if entry.action != left_out]
    found = history(trace, [segment(A, [(20 * MIB, 0, "free")])])
    assert brief(found.events())[2:] == [("free", 0, 5, 5), ("merge", 0, 20, 5, 0, 15)]
    assert found.estimate_from is None


def test_an_expandable_segment_grows_is_split_to_512_bytes_and_given_back_by_pages():
    trace = [
        mapped(A, 20 * MIB),
        alloc(A, 19 * MIB + MIB // 2),
        mapped(A + 20 * MIB, 20 * MIB),
        alloc(A + 19 * MIB + MIB // 2, 10 * MIB),
        *freed(A + 19 * MIB + MIB // 2),
        unmapped(A + 20 * MIB, 20 * MIB),
    ]
    left = [(19 * MIB + MIB // 2, 19 * MIB + MIB // 2, "live"), (MIB // 2, 0, "free")]
    found = history(trace, [segment(A, left, expandable=True)], "expandable_segments:True")
    assert brief(found.events()) == [
        ("segment_map", 0, 20, True),
        ("alloc", 0, 19.5, 19.5, True, 20, 0.5),
        ("segment_map", 20, 20, True),
        ("alloc", 19.5, 10, 10, True, 20.5, 10.5),
        ("free", 19.5, 10, 10),
        ("merge", 19.5, 20.5, 10, 0, 10.5),
        ("empty_cache", 1, 20, None, True),
        ("segment_unmap", 20, 20, True),
    ]
    assert found.estimate_from is None


def test_an_out_of_memory_error_tells_what_was_free_and_in_how_many_holes():
    trace = [*SPLIT_20, got(A + 64 * MIB, 2 * MIB), alloc(A + 64 * MIB, 1024), oom(30 * MIB, 7 * MIB)]
    event = told(trace)[-1]
    assert event._asdict() == {
        "entry": 4,
        "time_us": trace[4].time_us,
        "pool": Pool(0, 0, False, (0, 0)),
        "requested_bytes": 30 * MIB,
        "device_free_bytes": 7 * MIB,
        "free_bytes": 15 * MIB + 2 * MIB - 1024,
        "hole_count": 2,
        "pool_free_bytes": 15 * MIB,
        "pool_hole_count": 1,
        "pool_largest_bytes": 15 * MIB,
    }


def test_streams_and_private_pools_are_those_of_the_segment():
    trace = [
        got(A, 20 * MIB, stream=7, pool_id=(0, 1)),
        alloc(A, 20 * MIB, stream=7, pool_id=(0, 1)),
        got(A + 32 * MIB, 2 * MIB),
        alloc(A + 32 * MIB, 512),
    ]
    assert [event.pool for event in told(trace)] == [Pool(0, 7, False, (0, 1))] * 2 + [Pool(0, 0, True, (0, 0))] * 2


def test_a_private_pool_that_entries_do_not_tell_is_known_from_the_snapshot():
    """Before PyTorch 2.12 entries have no pool_id, but segments have."""
    trace = [got(A, 20 * MIB), alloc(A, 20 * MIB)]
    found = history(trace, [segment(A, [(20 * MIB, 20 * MIB, "live")], pool_id=(0, 3))])
    assert [event.pool.private for event in found.events()] == [(0, 3), (0, 3)]
    assert found.estimate_from is None


def test_a_pool_that_never_splits_gives_whole_segments():
    """MemPool(no_split=True): 1000 bytes take 2 MiB."""
    trace = [got(A, 2 * MIB, pool_id=(0, 1)), alloc(A, 1000, pool_id=(0, 1))]
    found = history(trace, [segment(A, [(2 * MIB, 1000, "live")], pool_id=(0, 1), small=True)])
    assert brief(found.events())[1] == ("alloc", 0, 1000 / MIB, 2, True, 2, 0)
    assert found.estimate_from is None


def test_a_history_that_begins_in_the_middle_knows_what_was_there():
    """The ring wrapped: what the first entries free nobody saw allocated."""
    trace = [*freed(A), alloc(A, 4 * MIB)]
    trace[:2] = [each._replace(size=6 * MIB) for each in trace[:2]]
    after = [(4 * MIB, 4 * MIB, "live"), (8 * MIB, 0, "free"), (8 * MIB, 8 * MIB, "live")]
    found = history(trace, [segment(A, after)])
    assert found.reserved_before == 20 * MIB
    assert sorted(found.live_before) == [6 * MIB, 8 * MIB]
    assert brief(found.events()) == [
        ("free", 0, 6, 6),
        ("merge", 0, 12, 6, 0, 6),
        ("alloc", 0, 4, 4, False, 12, 8),
    ]
    assert found.estimate_from is None


def test_slack_of_a_block_from_before_shows_by_an_allocation_behind_it():
    """Its size is not told; what lies directly behind it later shows where it ended."""
    trace = [alloc(A + 6 * MIB, 5 * MIB), *freed(A)]
    trace[1:] = [each._replace(size=5 * MIB + MIB // 2) for each in trace[1:]]
    after = [(6 * MIB, 0, "free"), (5 * MIB, 5 * MIB, "live"), (9 * MIB, 0, "free")]
    found = history(trace, [segment(A, after)])
    assert brief(found.events())[1] == ("free", 0, 5.5, 6)
    assert found.estimate_from is None


def test_times_that_are_not_told_are_not_known():
    """PyTorch before 2.2."""
    trace = [each._replace(time_us=0) for each in SPLIT_20]
    assert [event.time_us for event in told(trace)] == [None, None]
    assert history(trace).times_us == (None, None)


@pytest.mark.parametrize("action", ["snapshot", "annotate", "something_new"])
def test_entries_that_change_nothing_tell_nothing(action):
    assert told([*SPLIT_20, entry(action, 0, 5)]) == told(SPLIT_20)


def test_nothing_at_all():
    assert told([]) == []


# who gave memory back

RELEASED = [*SPLIT_20, *freed(A), gave_back(A, 20 * MIB)]


def released(trace, conf="", room=None):
    return [
        (event[0], event[4])
        for event in brief(told(trace, conf=conf, room=None if room is None else lambda _: room))
        if event[0] in ("flush", "empty_cache", "garbage_collection", "made_room", "pool_end")
    ]


@pytest.mark.parametrize(
    ("after", "room", "cause", "sure"),
    [
        pytest.param([], None, "empty_cache", True, id="nothing follows"),
        pytest.param(
            [got(A + 64 * MIB, 30 * MIB), alloc(A + 64 * MIB, 30 * MIB)], 40 * MIB, "flush", True, id="no room"
        ),
        pytest.param(
            [got(A + 64 * MIB, 30 * MIB), alloc(A + 64 * MIB, 30 * MIB)],
            50 * MIB,
            "empty_cache",
            True,
            id="there was room",
        ),
        pytest.param(
            [got(A + 64 * MIB, 30 * MIB), alloc(A + 64 * MIB, 30 * MIB)], None, "flush", False, id="who knows"
        ),
        pytest.param(
            [got(A, 20 * MIB), alloc(A, 5 * MIB)], None, "empty_cache", True, id="what was given back would have served"
        ),
        pytest.param([oom(30 * MIB, MIB)], None, "flush", True, id="it failed"),
    ],
)
def test_whose_doing_it_was_that_memory_was_given_back(after, room, cause, sure):
    assert released([*RELEASED, *after], room=room) == [(cause, sure)]


def test_a_private_pool_that_ends_gives_back_its_own():
    trace = [entry._replace(pool_id=(0, 1)) for entry in RELEASED]
    assert released(trace) == [("pool_end", True)]


def test_garbage_collection_leaves_what_is_not_old():
    kept = [got(A + 64 * MIB, 20 * MIB), alloc(A + 64 * MIB, 15 * MIB), *freed(A + 64 * MIB)]
    trace = [*RELEASED[:4], *kept, gave_back(A, 20 * MIB), got(A + 128 * MIB, 40 * MIB), alloc(A + 128 * MIB, 40 * MIB)]
    conf = "garbage_collection_threshold:0.8,per_process_memory_fraction:0.5"
    assert released(trace, conf, room=200 * MIB) == [("garbage_collection", True)]
