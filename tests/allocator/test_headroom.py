"""Headroom says what the real allocator would do: of every request that a recorded run made, and of made-up blocks."""

from dataclasses import replace

import pytest

from allocscope.allocator.headroom import (
    Headroom,
    HeadroomBounds,
    Way,
    bounds_from_counters,
    headroom,
    headrooms,
    main_stream,
    would_succeed,
)
from allocscope.allocator.recording import read_recording
from allocscope.allocator.settings import AllocatorSettings, parse_settings
from allocscope.allocator.state import AllocatorState
from allocscope.model import BlockMap, Pool, PrivatePool, Sample, condense
from tests.allocator.made import MIB, SHIPPED

DEFAULT = AllocatorSettings()
EXPANDABLE = parse_settings("expandable_segments:True")


def segment(*blocks, address=0, stream=0, kind="large", pool_id=(0, 0), expandable=False):
    """A segment of blocks given in MiB; those below 0 are free."""
    return {
        "address": address * MIB,
        "total_size": sum(abs(b) for b in blocks) * MIB,
        "stream": stream,
        "segment_type": kind,
        "segment_pool_id": pool_id,
        "is_expandable": expandable,
        "blocks": [
            {
                "size": abs(b) * MIB,
                "requested_size": abs(b) * MIB,
                "state": "inactive" if b < 0 else "active_allocated",
            }
            for b in blocks
        ],
    }


def blocks(*segments) -> BlockMap:
    return BlockMap(1, 1, condense(segments))


HOLES = blocks(segment(4, -16, 12), segment(-30, address=100), segment(-40, address=200, stream=7))
"""Of stream 0: a hole of 16 MiB and a whole free segment of 30; of stream 7 one of 40."""


@pytest.mark.parametrize(
    ("asked", "free", "allowed", "way"),
    [
        pytest.param(30, 0, None, Way.CACHE, id="a cached block of its stream"),
        pytest.param(31, 32, None, Way.DEVICE, id="the driver"),
        pytest.param(70, 0, None, Way.AFTER_RELEASE, id="the segments of all streams given back"),
        pytest.param(72, 0, None, Way.NONE, id="more than that"),
        pytest.param(31, 32, 130, Way.AFTER_RELEASE, id="a memory fraction that has no room but for a flush"),
        pytest.param(71, 32, 102, Way.NONE, id="a memory fraction that has no room at all"),
    ],
)
def test_the_allocator_goes_three_ways(asked, free, allowed, way):
    found = would_succeed(
        asked * MIB, HOLES, DEFAULT, device_free_bytes=free * MIB, allowed_bytes=allowed and allowed * MIB
    )
    assert found is way


def test_success_is_not_monotone_in_size():
    """A request between 1 and 10 MiB needs a whole large segment, a larger one only itself."""
    full = blocks(segment(32))
    assert would_succeed(12 * MIB, full, DEFAULT, device_free_bytes=14 * MIB) is Way.DEVICE
    assert would_succeed(2 * MIB, full, DEFAULT, device_free_bytes=14 * MIB) is Way.NONE
    assert headroom(full, DEFAULT, device_free_bytes=14 * MIB).request_bytes == 14 * MIB
    assert headroom(full, DEFAULT, device_free_bytes=9 * MIB) == Headroom(Pool.LARGE, 0, None, 0, Way.NONE)


@pytest.mark.parametrize(
    ("free", "request_mib", "way"),
    [(0, 70, Way.AFTER_RELEASE), (5, 74, Way.AFTER_RELEASE)],
)
def test_the_largest_request_counts_what_a_flush_gives(free, request_mib, way):
    found = headroom(HOLES, DEFAULT, device_free_bytes=free * MIB)
    assert (found.request_bytes, found.way) == (request_mib * MIB, way)


def test_holes_are_no_headroom_for_more_than_the_largest():
    stranded = blocks(segment(2, -16, 4, -18, 2, -14, 8))
    assert headroom(stranded, DEFAULT, device_free_bytes=3 * MIB) == Headroom(Pool.LARGE, 0, None, 18 * MIB, Way.CACHE)


def test_the_rounding_of_the_settings_is_taken_off():
    settings = parse_settings("roundup_power2_divisions:4")
    found = headroom(blocks(segment(2, -38)), settings, device_free_bytes=0)
    assert found.request_bytes == 32 * MIB
    assert would_succeed(32 * MIB + 1, blocks(segment(2, -38)), settings, device_free_bytes=0) is Way.NONE


def test_each_pool_and_stream_has_its_own():
    mixed = blocks(
        segment(1, -1, kind="small"),
        segment(2, -18, address=50),
        segment(2, -30, address=100, stream=3),
        segment(2, -10, address=200, pool_id=(0, 1)),
    )
    assert headrooms(mixed, DEFAULT, device_free_bytes=12 * MIB) == (
        Headroom(Pool.LARGE, 0, None, 18 * MIB, Way.CACHE),
        Headroom(Pool.LARGE, 0, PrivatePool(0, 1), 12 * MIB, Way.DEVICE),
        Headroom(Pool.LARGE, 3, None, 30 * MIB, Way.CACHE),
        Headroom(Pool.SMALL, 0, None, MIB, Way.CACHE),
    )
    assert main_stream(mixed) == 3
    assert headroom(mixed, DEFAULT, device_free_bytes=12 * MIB).stream == 3
    assert headroom(mixed, DEFAULT, device_free_bytes=12 * MIB, stream=0).request_bytes == 18 * MIB


def test_before_its_first_allocation_the_driver_is_all():
    nothing = BlockMap(1, 1, ())
    assert headroom(nothing, DEFAULT, device_free_bytes=101 * MIB) == Headroom(
        Pool.LARGE, 0, None, 100 * MIB, Way.DEVICE
    )


GROWN = blocks(segment(12, -30, 30, -8, expandable=True))
"""80 MiB in pages of 20: a hole of 30 MiB with one whole page in it, and a free end of 8."""


@pytest.mark.parametrize(
    ("asked", "free", "allowed", "way"),
    [
        pytest.param(30, 0, None, Way.CACHE, id="the hole"),
        pytest.param(48, 40, None, Way.DEVICE, id="the free end and two pages more"),
        pytest.param(49, 40, None, Way.AFTER_RELEASE, id="and the page in the hole, given back"),
        pytest.param(68, 40, None, Way.AFTER_RELEASE, id="all of it"),
        pytest.param(69, 40, None, Way.NONE, id="more than that"),
        pytest.param(46, 40, 125, Way.AFTER_RELEASE, id="a memory fraction that has no room but for a flush"),
        pytest.param(48, 40, 100, Way.NONE, id="a memory fraction that has no room at all"),
    ],
)
def test_expandable_segments_grow_at_their_end(asked, free, allowed, way):
    found = would_succeed(
        asked * MIB, GROWN, EXPANDABLE, device_free_bytes=free * MIB, allowed_bytes=allowed and allowed * MIB
    )
    assert found is way


def test_the_largest_request_of_an_expandable_segment():
    assert headroom(GROWN, EXPANDABLE, device_free_bytes=40 * MIB) == Headroom(
        Pool.LARGE, 0, None, 68 * MIB, Way.AFTER_RELEASE
    )
    limited = headroom(GROWN, EXPANDABLE, device_free_bytes=40 * MIB, allowed_bytes=111 * MIB)
    assert limited == Headroom(Pool.LARGE, 0, None, 50 * MIB, Way.AFTER_RELEASE)


def test_with_holes_in_the_addresses_nothing_is_counted_on_to_grow():
    ranges = blocks(segment(12, -8, expandable=True), segment(12, -8, address=40, expandable=True))
    assert headroom(ranges, EXPANDABLE, device_free_bytes=25 * MIB).request_bytes == 20 * MIB


def test_expandable_blocks_serve_nothing_once_the_option_is_off():
    assert would_succeed(8 * MIB, GROWN, DEFAULT, device_free_bytes=0) is Way.AFTER_RELEASE
    assert would_succeed(30 * MIB, GROWN, DEFAULT, device_free_bytes=0) is Way.NONE


@pytest.mark.parametrize(
    ("asked", "way"),
    [
        pytest.param(30, Way.AFTER_RELEASE, id="a large block does not serve a small request"),
        pytest.param(70, Way.AFTER_RELEASE, id="nor one that leaves too much over"),
        pytest.param(90, Way.CACHE, id="but one that it nearly fits"),
        pytest.param(101, Way.NONE, id="and none that is larger"),
    ],
)
def test_blocks_that_are_not_split_serve_what_they_fit(asked, way):
    settings = parse_settings("max_split_size_mb:64")
    assert would_succeed(asked * MIB, blocks(segment(-100)), settings, device_free_bytes=0) is way


def test_in_doubt_which_block_of_a_size_class_it_is_the_answer_is_no():
    """65 and 75 MiB are of one class: whether the smaller one is there, a condensed map does not tell."""
    settings = parse_settings("max_split_size_mb:66")
    one_class = blocks(segment(-65), segment(-75, address=100))
    assert would_succeed(64 * MIB, one_class, settings, device_free_bytes=0) is Way.AFTER_RELEASE


SAMPLE = Sample(
    sequence=1,
    time_us=1,
    reserved_bytes=100 * MIB,
    active_bytes=60 * MIB,
    allocated_bytes=55 * MIB,
    inactive_split_bytes=15 * MIB,
    private_pools_reserved_bytes=0,
)


@pytest.mark.parametrize(
    ("changed", "settings", "free", "allowed", "bounds"),
    [
        pytest.param({}, DEFAULT, 20, None, (44, 50), id="25 MiB are whole segments"),
        pytest.param({}, DEFAULT, 20, 105, (30, 35), id="a memory fraction"),
        pytest.param({}, DEFAULT, 0, 90, (24, 30), id="a memory fraction that is used up"),
        pytest.param({"private_pools_reserved_bytes": None}, DEFAULT, 21, None, (20, 66), id="perhaps private pools"),
        pytest.param({"inactive_split_bytes": 0}, EXPANDABLE, 25, None, (20, 70), id="expandable segments"),
        pytest.param({"active_bytes": None}, DEFAULT, 25, None, (24, 125), id="hardly anything known"),
        pytest.param({"inactive_split_bytes": 40}, DEFAULT, 5, None, (0, 45), id="all of it in holes"),
    ],
)
def test_counters_bound_what_a_map_would_say(changed, settings, free, allowed, bounds):
    changed = {k: v and v * MIB for k, v in changed.items()}
    found = bounds_from_counters(
        replace(SAMPLE, **changed), settings, device_free_bytes=free * MIB, allowed_bytes=allowed and allowed * MIB
    )
    assert (found.lower_bytes, found.upper_bytes) == (bounds[0] * MIB, bounds[1] * MIB)


def test_without_the_devices_free_bytes_nothing_is_promised():
    assert bounds_from_counters(SAMPLE, DEFAULT, device_free_bytes=None) == HeadroomBounds(0, None)


@pytest.mark.parametrize("name", ["islands_grow-4-5518", "varlen-1-2985", "kv_serve-1-4114", "curriculum-2-2200"])
def test_every_request_of_a_recorded_run_that_the_cache_could_not_serve_went_as_foretold(name):
    """And some hundred that it could; and the headroom of that moment is the largest that would have succeeded, within its bounds."""
    recording = read_recording(SHIPPED / f"{name}.run.json")
    state, settings = AllocatorState(recording.settings), recording.settings
    ways = dict.fromkeys(Way, 0)
    for number, (done, call) in enumerate(_mallocs(recording.trace)):
        if len(call) == 1 and call[0].action == "alloc" and number % 200:
            continue
        state.apply(recording.trace[state.entries_applied : done])
        block_map = BlockMap(1, 1, condense(state.segments()))
        asked = call[-1]
        free = recording.device_total_bytes - recording.other_used_at(asked.time_us) - state.reserved_bytes
        way = _way_taken([e.action for e in call])
        assert would_succeed(asked.size, block_map, settings, device_free_bytes=free) is way
        ways[way] += 1
        largest = headroom(block_map, settings, device_free_bytes=free, stream=0)
        assert would_succeed(largest.request_bytes, block_map, settings, device_free_bytes=free) is largest.way
        for more in (512, 2 * MIB, 64 * MIB):
            more_than_that = max(largest.request_bytes + more, 2 * MIB)
            assert would_succeed(more_than_that, block_map, settings, device_free_bytes=free) is Way.NONE
        bounds = bounds_from_counters(state.sample(1, 1), settings, device_free_bytes=free)
        assert bounds.upper_bytes is not None
        assert bounds.lower_bytes <= largest.request_bytes <= bounds.upper_bytes
    assert min(ways[Way.CACHE], ways[Way.DEVICE]) > 10
    assert ways[Way.AFTER_RELEASE] > 1
    assert ways[Way.NONE] == 1


def _mallocs(trace):
    """Each allocation's entries, and how many entries came before; these recordings never call empty_cache."""
    call = []
    for index, e in enumerate(trace):
        if e.action in ("segment_alloc", "segment_free"):
            call.append(e)
        elif e.action in ("alloc", "oom"):
            yield index - len(call), [*call, e]
            call = []


def _way_taken(actions):
    if actions[-1] == "oom":
        return Way.NONE
    if "segment_free" in actions:
        return Way.AFTER_RELEASE
    return Way.DEVICE if "segment_alloc" in actions else Way.CACHE
