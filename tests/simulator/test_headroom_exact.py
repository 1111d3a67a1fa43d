"""Headroom says what the allocator would do: exactly from its state or a snapshot, and never too much from a condensed map."""

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from allocscope.allocator.headroom import Way, headroom, would_succeed
from allocscope.allocator.settings import parse_settings
from allocscope.allocator.simulator import Device, Simulator
from allocscope.allocator.simulator.headroom import largest_request
from allocscope.allocator.simulator.seed import simulator_from
from allocscope.model import BlockMap, Pool, condense
from tests.simulator.programs import CONFS, EDGES, MIB, THOROUGHLY, programs, run, sizes

PLAIN = tuple(
    c for c in CONFS if "max_split" not in c and "garbage" not in c and "throw" not in c and "expand" not in c
)
EXPANDABLE = tuple(c for c in CONFS if "expandable" in c and "max_split" not in c)


def state_after(program):
    allocator = program.allocator()
    run(allocator, program.requests)
    return allocator


def map_of(allocator):
    groups = condense(allocator.segments(), large_page_bytes=allocator.settings.large_segment_bytes)
    return BlockMap(1, 1, groups)


def known_of(allocator):
    return {"device_free_bytes": allocator.device.free_bytes, "allowed_bytes": allocator.allowed_bytes}


def waits(allocator):
    stats = allocator.stats()
    return stats["active.all.current"] > stats["allocation.all.current"]


def begins_unmapped(allocator):
    """Whether an expandable segment's first page has no memory, which a snapshot does not tell."""
    starts = {segment["address"] for segment in allocator.segments()}
    unmapped = [b for pool in allocator._pools.all() for s in pool.free_sets.values() for b in s.unmapped]
    return any(block.prev is None and block.next is not None for block in unmapped) and bool(starts)


@given(programs(), sizes, st.sampled_from((0, 1)))
@settings(max_examples=150 * THOROUGHLY, deadline=None)
def test_the_way_is_the_one_that_a_copy_takes_and_nothing_changes(program, size, stream):
    allocator = state_after(program)
    before = allocator.stats(), allocator.segments(), allocator.device.free_bytes
    way = allocator.way(size, stream)
    assert (allocator.stats(), allocator.segments(), allocator.device.free_bytes) == before
    before_retries, before_calls = before[0]["num_alloc_retries"], before[0]["num_device_alloc"]
    assert allocator.try_malloc(size, stream) is way
    after = allocator.stats()
    if way is Way.CACHE:
        assert after["num_device_alloc"] == before_calls
    if way in (Way.CACHE, Way.DEVICE):
        assert after["num_alloc_retries"] == before_retries


@given(programs(), sizes, st.sampled_from((0, 1)))
@settings(max_examples=150 * THOROUGHLY, deadline=None)
def test_a_snapshot_is_enough(program, size, stream):
    allocator = state_after(program)
    assume(not waits(allocator) and not begins_unmapped(allocator))
    seeded = simulator_from(
        allocator.segments(),
        allocator.settings,
        device_total_bytes=allocator.device.total_bytes,
        version=program.version,
        **known_of(allocator),
    )
    assert seeded.segments() == allocator.segments()
    assert seeded.way(size, stream) is allocator.way(size, stream)


@given(programs(PLAIN), sizes, st.sampled_from((0, 1)))
@settings(max_examples=150 * THOROUGHLY, deadline=None)
def test_a_condensed_map_is_enough_without_limits_to_splitting(program, size, stream):
    allocator = state_after(program)
    assume(not waits(allocator))
    found = would_succeed(size, map_of(allocator), allocator.settings, stream=stream, **known_of(allocator))
    assert found is allocator.way(size, stream)


@given(programs(), sizes, st.sampled_from((0, 1)))
@settings(max_examples=200 * THOROUGHLY, deadline=None)
def test_a_condensed_map_never_promises_too_much(program, size, stream):
    allocator = state_after(program)
    block_map = map_of(allocator)
    total = allocator.device.total_bytes
    known = known_of(allocator)
    found = would_succeed(size, block_map, allocator.settings, stream=stream, device_total_bytes=total, **known)
    if found is not Way.NONE:
        assert allocator.way(size, stream) is not Way.NONE
    largest = headroom(block_map, allocator.settings, stream=stream, device_total_bytes=total, **known)
    if largest.request_bytes:
        assert allocator.way(largest.request_bytes, stream) is not Way.NONE


@given(programs(), st.lists(sizes, min_size=1, max_size=20), st.sampled_from((0, 1)))
@settings(max_examples=100 * THOROUGHLY, deadline=None)
def test_nothing_larger_than_the_largest_request_succeeds(program, others, stream):
    allocator = state_after(program)
    before = allocator.stats()
    for pool, most in ((Pool.SMALL, MIB), (Pool.LARGE, None)):
        largest = largest_request(allocator, stream=stream, pool=pool)
        if largest.request_bytes:
            assert allocator.way(largest.request_bytes, stream) is largest.way is not Way.NONE
        nearby = {largest.request_bytes + more for more in (1, 512, 2 * MIB, 20 * MIB)}
        total = range(2 * MIB, program.total_mib * MIB, 6 * MIB)
        for size in {*nearby, *others, *EDGES, *total}:
            if largest.request_bytes < size and (size <= MIB if most else allocator.settings.round(size) > MIB):
                assert allocator.way(size, stream) is Way.NONE, size
    assert allocator.stats() == before


@pytest.mark.parametrize(
    ("conf", "largest_mib"),
    [
        pytest.param("throw_on_cudamalloc_oom:True", 80, id="what is reserved counts, though it would be given back"),
        pytest.param(
            "throw_on_cudamalloc_oom:True,per_process_memory_fraction:0.9", 90, id="a fraction ends it before"
        ),
    ],
)
def test_a_policy_judges_before_anything_is_given_back(conf, largest_mib):
    """100 MiB, 10 of others, 20 in a cached segment."""
    allocator = Simulator(parse_settings(conf), Device(100 * MIB, other_bytes=10 * MIB))
    allocator.free(allocator.malloc(20 * MIB))
    largest = largest_request(allocator)
    assert (largest.request_bytes, largest.way) == (largest_mib * MIB, Way.AFTER_RELEASE)


@pytest.mark.parametrize("pool", list(Pool))
def test_an_empty_allocator_has_the_whole_device(pool):
    allocator = Simulator(parse_settings(""), Device(101 * MIB))
    largest = largest_request(allocator, pool=pool)
    assert (largest.request_bytes, largest.way) == ((MIB if pool is Pool.SMALL else 100 * MIB), Way.DEVICE)
