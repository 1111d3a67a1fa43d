"""Private pools: apart from everybody's memory, kept while in use, and given back when nobody uses them (ALLOCATOR.md 5)."""

import pytest

from allocscope.allocator.errors import OutOfMemoryError, UndefinedStateError
from allocscope.allocator.settings import parse_settings
from allocscope.allocator.simulator import Device, Simulator

MIB = 1 << 20
POOL, GRAPH = (0, 1), (1, 0)


def made(conf="", *, total=200, version="2.14.1", **device):
    return Simulator(parse_settings(conf), Device(total * MIB, **device), version=version, trace=True)


def reserved(simulator):
    return simulator.reserved_bytes // MIB


def test_neither_takes_from_the_other():
    simulator = made()
    simulator.free(simulator.malloc(30 * MIB))
    simulator.begin_pool(POOL)
    inside = simulator.malloc(30 * MIB)
    assert reserved(simulator) == 60
    simulator.free(inside)
    simulator.end_pool(POOL)
    simulator.malloc(30 * MIB)
    assert reserved(simulator) == 60
    simulator.malloc(30 * MIB)
    assert reserved(simulator) == 90
    assert [segment["segment_pool_id"] for segment in simulator.segments()] == [(0, 0), (0, 1), (0, 0)]
    assert [entry.pool_id for entry in simulator.trace if entry.action == "alloc"] == [(0, 0), (0, 1), (0, 0), (0, 0)]


def test_only_the_streams_of_a_capture_are_routed():
    simulator = made()
    simulator.begin_pool(GRAPH, streams={7})
    simulator.malloc(1000, 7)
    simulator.malloc(1000, 0)
    assert [(s["segment_pool_id"], s["stream"]) for s in simulator.segments()] == [((1, 0), 7), ((0, 0), 0)]


def test_a_pool_in_use_is_not_emptied_and_then_it_is():
    simulator = made()
    simulator.create_pool(POOL)
    simulator.begin_pool(POOL)
    kept, freed = simulator.malloc(30 * MIB), simulator.malloc(40 * MIB)
    simulator.free(freed)
    simulator.end_pool(POOL)
    simulator.release_pool(POOL)
    simulator.empty_cache()
    assert reserved(simulator) == 70
    syncs = simulator.stats()["num_sync_all_streams"]
    simulator.release_pool(POOL, empty=True)
    assert simulator.stats()["num_sync_all_streams"] == syncs + 1
    assert reserved(simulator) == 30
    simulator.free(kept)
    assert reserved(simulator) == 30
    simulator.empty_cache()
    assert reserved(simulator) == 0
    stats = simulator.stats()
    assert stats["reserved_bytes_by_private_pools.0_1.all.current"] == 0
    assert stats["reserved_bytes_by_private_pools.0_1.all.peak"] == 70 * MIB


def test_a_graph_s_pool_goes_back_at_the_next_flush():
    simulator = made()
    simulator.begin_pool(GRAPH)
    simulator.free(simulator.malloc(30 * MIB))
    simulator.end_pool(GRAPH)
    simulator.release_pool(GRAPH)
    assert reserved(simulator) == 30
    simulator.malloc(180 * MIB)
    assert reserved(simulator) == 180
    assert simulator.stats()["num_alloc_retries"] == 1


def test_no_split_takes_whole_segments():
    simulator = made()
    simulator.create_pool(POOL, no_split=True)
    simulator.begin_pool(POOL)
    simulator.malloc(1000)
    assert simulator.stats()["allocated_bytes.all.current"] == 2 * MIB
    assert simulator.stats()["requested_bytes.all.current"] == 1000
    simulator.free(simulator.malloc(1000))
    assert simulator.stats()["inactive_split.all.current"] == 0


def test_an_overflow_pool_helps_before_a_flush():
    simulator = made(total=100)
    simulator.create_pool(POOL, use_on_oom=True)
    simulator.begin_pool(POOL)
    simulator.free(simulator.malloc(60 * MIB))
    simulator.end_pool(POOL)
    simulator.malloc(50 * MIB)
    assert reserved(simulator) == 60
    assert simulator.stats()["num_alloc_retries"] == 0
    assert simulator.trace[-1].pool_id == POOL


def test_a_capture_does_not_flush_and_its_frees_wait_for_its_end():
    simulator = made(total=100)
    simulator.free(simulator.malloc(60 * MIB))
    simulator.begin_capture()
    with pytest.raises(OutOfMemoryError):
        simulator.malloc(70 * MIB)
    assert simulator.stats()["num_alloc_retries"] == 0
    used = simulator.malloc(512)
    simulator.record_stream(used, 3)
    simulator.free(used)
    simulator.empty_cache()
    assert reserved(simulator) == 62
    simulator.end_capture()
    simulator.catch_up()
    simulator.malloc(512)
    assert simulator.stats()["active.all.current"] == 2, "its event was recorded only now"
    simulator.catch_up()
    simulator.malloc(512)
    assert simulator.stats()["active.all.current"] == 2


@pytest.mark.parametrize(("version", "succeeds"), [("2.12.1", False), ("2.13.0", True), ("2.14.1", True)])
def test_up_to_2_12_a_pool_s_context_keeps_from_flushing(version, succeeds):
    simulator = made(total=100, version=version)
    simulator.free(simulator.malloc(60 * MIB))
    simulator.begin_pool(POOL)
    if succeeds:
        assert simulator.malloc(70 * MIB)
    else:
        with pytest.raises(OutOfMemoryError):
            simulator.malloc(70 * MIB)
    simulator.end_pool(POOL)
    assert simulator.malloc(25 * MIB)


@pytest.mark.parametrize(("version", "waiting"), [("2.12.1", 1), ("2.13.0", 0)])
def test_up_to_2_12_a_pool_s_context_keeps_from_reaping(version, waiting):
    simulator = made(version=version)
    used = simulator.malloc(30 * MIB)
    simulator.record_stream(used, 3)
    simulator.free(used)
    simulator.catch_up()
    simulator.begin_pool(POOL)
    simulator.malloc(512)
    stats = simulator.stats()
    assert stats["active.all.current"] - stats["allocation.all.current"] == waiting


def test_free_bytes_of_private_pools_are_what_the_error_calls_allocated_there():
    simulator = made(total=100, outside_bytes=10 * MIB, other_bytes=10 * MIB)
    simulator.begin_pool(POOL)
    simulator.free(simulator.malloc(30 * MIB))
    simulator.end_pool(POOL)
    simulator.malloc(20 * MIB)
    with pytest.raises(OutOfMemoryError) as caught:
        simulator.malloc(60 * MIB + 1)
    assert str(caught.value) == (
        "CUDA out of memory. Tried to allocate 62.00 MiB. GPU 0 has a total capacity of 100.00 MiB of which 40.00 MiB is "
        "free. Including non-PyTorch memory, this process has 60.00 MiB memory in use. Of the allocated memory 50.00 MiB "
        "is allocated by PyTorch, with 30.00 MiB allocated in private pools (e.g., CUDA Graphs), and 0 bytes is reserved by "
        "PyTorch but unallocated. If reserved but unallocated memory is large try setting "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See documentation for Memory Management  "
        "(https://docs.pytorch.org/docs/stable/notes/cuda.html#optimizing-memory-usage-with-pytorch-cuda-alloc-conf)"
    )
    assert caught.value.requested_bytes == 60 * MIB + 1
    assert caught.value.segment_bytes == 62 * MIB


def test_where_pytorch_would_free_a_pool_under_its_blocks_nothing_more_is_said():
    """Segments are counted up once a request that grew, and down once a range unmapped (ALLOCATOR.md 5.4)."""
    simulator = made("expandable_segments:True")
    simulator.begin_pool(POOL)
    addresses = [simulator.malloc(20 * MIB) for _ in range(4)]
    simulator.end_pool(POOL)
    simulator.release_pool(POOL)
    simulator._pools.private[POOL].segment_count = 1
    simulator.free(addresses[1])
    with pytest.raises(UndefinedStateError, match="private pool"):
        simulator.empty_cache()
