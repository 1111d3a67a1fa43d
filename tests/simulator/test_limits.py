"""A memory fraction, throw_on_cudamalloc_oom, garbage collection, oversize blocks, settings at run time."""

import pytest

from allocscope.allocator.errors import OutOfMemoryError, UndefinedStateError
from allocscope.allocator.settings import parse_settings
from allocscope.allocator.simulator import Device, Simulator
from allocscope.allocator.ways import Way

MIB = 1 << 20


def made(conf="", *, total=200, **more):
    return Simulator(parse_settings(conf), Device(total * MIB), trace=True, **more)


def actions(simulator):
    return [entry.action for entry in simulator.trace]


def test_a_memory_fraction_counts_as_a_retry_without_asking_the_driver():
    simulator = made(memory_fraction=0.5)
    assert simulator.allowed_bytes == 100 * MIB
    simulator.free(simulator.malloc(60 * MIB))
    assert simulator.way(70 * MIB) is Way.AFTER_RELEASE
    simulator.malloc(70 * MIB)
    assert simulator.stats()["num_alloc_retries"] == 1
    with pytest.raises(OutOfMemoryError, match=r"100\.00 MiB allowed; "):
        simulator.malloc(40 * MIB)
    simulator.set_memory_fraction(1)
    assert simulator.malloc(40 * MIB)


def test_a_refused_request_leaves_no_trace_but_a_count():
    """The limit was lifted through the API, the option still refuses."""
    simulator = made("throw_on_cudamalloc_oom:True,per_process_memory_fraction:0.5", memory_fraction=1.0)
    simulator.free(simulator.malloc(60 * MIB))
    simulator.free(simulator.malloc(30 * MIB))
    before = actions(simulator)
    with pytest.raises(OutOfMemoryError, match="preemptively rejected") as caught:
        simulator.malloc(70 * MIB)
    assert caught.value.rejected
    assert simulator.way(70 * MIB) is Way.NONE
    stats = simulator.stats()
    assert (stats["num_oom_rejections"], stats["num_ooms"], stats["num_alloc_retries"]) == (1, 0, 0)
    assert actions(simulator) == before


def test_garbage_collection_needs_a_memory_fraction():
    for fraction, reserved in ((1.0, 160), (0.9, 80)):
        simulator = made("garbage_collection_threshold:0.5", memory_fraction=fraction)
        for address in [simulator.malloc(40 * MIB) for _ in range(3)]:
            simulator.free(address)
        simulator.malloc(40 * MIB)
        simulator.malloc(44 * MIB - 1)
        assert simulator.stats()["num_alloc_retries"] == 0
        assert simulator.reserved_bytes == (reserved + 4) * MIB


def test_oversize_blocks_serve_only_oversize_requests_that_nearly_fill_them():
    simulator = made("max_split_size_mb:40")
    simulator.free(simulator.malloc(60 * MIB))
    assert simulator.way(30 * MIB) is Way.DEVICE
    assert simulator.way(41 * MIB) is Way.CACHE
    assert simulator.way(40 * MIB) is Way.DEVICE
    simulator.malloc(50 * MIB)
    stats = simulator.stats()
    assert stats["allocated_bytes.all.current"] == 60 * MIB
    assert stats["oversize_allocations.current"] == stats["oversize_segments.current"] == 1
    assert stats["max_split_size"] == 40 * MIB


def test_oversize_blocks_go_first_and_it_is_no_retry():
    simulator = made("max_split_size_mb:40")
    for address in [simulator.malloc(size * MIB) for size in (50, 60, 70)]:
        simulator.free(address)
    assert simulator.way(90 * MIB) is Way.AFTER_RELEASE
    simulator.malloc(90 * MIB)
    assert simulator.stats()["num_alloc_retries"] == 0
    assert [entry.size // MIB for entry in simulator.trace if entry.action == "segment_free"] == [70, 60]


def test_settings_at_run_time_hold_for_new_requests():
    simulator = made("expandable_segments:True")
    simulator.free(simulator.malloc(30 * MIB))
    simulator.change_settings(parse_settings("max_split_size_mb:40"))
    assert simulator.way(30 * MIB) is Way.DEVICE, "what is free in an expandable segment serves no more"
    simulator.malloc(30 * MIB)
    assert [entry.action for entry in simulator.trace if "segment" in entry.action] == ["segment_map", "segment_alloc"]
    assert simulator.stats()["max_split_size"] == -1
    simulator.empty_cache()
    assert simulator.reserved_bytes == 30 * MIB


def test_a_piece_that_a_lowered_max_split_size_makes_oversize_is_not_freed_as_a_segment():
    """PyTorch would call cudaFree in the middle of a segment, whose other piece is in use."""
    simulator = made(total=100)
    address = simulator.malloc(64 * MIB)
    simulator.malloc(8 * MIB)
    simulator.free(address)
    simulator.malloc(20 * MIB)
    simulator.change_settings(parse_settings("max_split_size_mb:20"))
    with pytest.raises(UndefinedStateError, match="a free block of 46137344 bytes, from max_split_size on, is part of"):
        simulator.malloc(21 * MIB)


def test_nothing_costs_nothing_and_too_much_is_refused():
    simulator = made()
    before = simulator.stats()
    assert simulator.malloc(0) == 0
    simulator.free(0)
    assert simulator.stats() == before
    with pytest.raises(OutOfMemoryError, match="more than 1EB memory"):
        simulator.malloc(1 << 60)
    with pytest.raises(KeyError):
        simulator.free(512)
    with pytest.raises(KeyError):
        simulator.record_stream(512, 1)
