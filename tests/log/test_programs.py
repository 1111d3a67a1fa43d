"""Whatever a program asks, under whatever settings and version, its history comes to the blocks that the allocator has."""

from hypothesis import given, settings
from hypothesis import strategies as st

from allocscope.allocator.chronicle.events import Allocated, GivenBack, Got, Kind, Release
from allocscope.allocator.chronicle.history import DeviceHistory
from allocscope.allocator.errors import OutOfMemoryError
from allocscope.allocator.snapshot import SnapshotBlock, SnapshotSegment
from tests.simulator.programs import MIB, THOROUGHLY, programs, run, streams

POOLS = ((0, 0), (0, 0), (0, 1), (7, 0))


def segments_of(simulator):
    return tuple(
        SnapshotSegment(
            0,
            each["address"],
            each["total_size"],
            each["stream"],
            each["segment_type"],
            each["segment_pool_id"],
            each["is_expandable"],
            tuple(
                SnapshotBlock(block["address"], block["size"], block["requested_size"], block["state"])
                for block in each["blocks"]
            ),
        )
        for each in simulator.segments()
    )


@given(program=programs(), late=st.floats(0, 1))
@settings(max_examples=100 * THOROUGHLY, deadline=None)
def test_a_history_comes_to_the_blocks_wherever_it_begins(program, late):
    """But for slack that nobody saw: where it begins late it is exact, or says that it is not."""
    simulator = program.allocator(trace=True)
    run(simulator, program.requests)
    trace, segments = tuple(simulator.trace), segments_of(simulator)
    whole = DeviceHistory(0, trace, segments, simulator.settings)
    events = list(whole.events())
    assert (whole.contradictions, whole.difference()) == (0, None)
    stats = simulator.stats()
    assert sum(isinstance(event, Allocated) for event in events) == stats["allocation.all.allocated"]
    assert sum(isinstance(event, Got) for event in events) == stats["num_device_alloc"]
    assert sum(isinstance(event, GivenBack) for event in events) == stats["num_device_free"]
    assert sum(event.pieces for event in events if isinstance(event, Release)) == stats["num_device_free"]
    rest = DeviceHistory(0, trace[int(late * len(trace)) :], segments, simulator.settings)
    assert len(list(rest.events())) <= len(events) + rest.contradictions
    assert (rest.estimate_from is None) == (rest.difference() is None and not rest.contradictions)


@given(
    program=programs(("",), ("2.12.1", "2.14.1")),
    requests=st.lists(st.tuples(st.sampled_from(POOLS), st.integers(1, 30 * MIB), streams, st.booleans()), max_size=60),
)
@settings(max_examples=50 * THOROUGHLY, deadline=None)
def test_private_pools_stay_apart(program, requests):
    simulator = program.allocator(trace=True)
    live = []
    for pool_id, size, stream, frees in requests:
        try:
            live.append((simulator.malloc_in(pool_id, size, stream), pool_id))
        except OutOfMemoryError:
            continue
        if frees:
            simulator.free(live.pop(0)[0])
    found = DeviceHistory(0, tuple(simulator.trace), segments_of(simulator), simulator.settings)
    events = list(found.events())
    assert found.estimate_from is None
    private = [event.pool.private for event in events if event.kind == Kind.ALLOC]
    assert private == [entry.pool_id for entry in simulator.trace if entry.action == "alloc"]
