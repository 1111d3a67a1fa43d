"""What a job says of itself is judged: each lie is refused, by its reason and in words."""

from __future__ import annotations

from dataclasses import replace

import pytest

from allocscope.daemon import claims
from allocscope.model import (
    AllocatorRef,
    BlockGroup,
    BlockMap,
    Device,
    Event,
    EventKind,
    Pool,
    Process,
    SampleChunk,
    wire,
)
from allocscope.model.blocks import SizeClass
from allocscope.model.wire import WireError
from allocscope.proto.v1 import block_map_pb2, identity_pb2, sample_pb2

GIB = 1 << 30
ID = "0123456789abcdef" * 2
REF = AllocatorRef(ID, "GPU-1")
PROCESS = Process(ID, "train", 7, "host", 1, rank=0, world_size=2, devices=(Device("GPU-1", 0, total_bytes=80 * GIB),))


def chunk(count: int = 1, **columns: int) -> SampleChunk:
    values = {name: (value,) * count for name, value in columns.items()}
    return SampleChunk(REF, tuple(range(1, count + 1)), (1,) * count, values)


def block_map(count: int = 1, classes: int = 0, reserved: int = GIB) -> BlockMap:
    live = tuple(SizeClass(i, 1, i, i) for i in range(classes))
    group = BlockGroup(Pool.LARGE, 0, None, False, 1, reserved, reserved, 0, reserved, 0, 0, 0, 0, (), (), live)
    return BlockMap(1, 1, (group,) * count)


@pytest.mark.parametrize(
    ("lie", "reason"),
    [
        ({"process_id": "7"}, "process_id"),
        ({"process_id": "G" * 32}, "process_id"),
        ({"job": "x" * 257}, "too_long"),
        ({"job": "train\n"}, "unprintable"),
        ({"host": "\0"}, "unprintable"),
        ({"allocator_conf": "x" * 4097}, "too_long"),
        ({"rank": 2**22 + 1, "world_size": None}, "out_of_range"),
        ({"devices": (Device("GPU-1", 1024),)}, "device_out_of_range"),
        ({"devices": (Device("GPU-1", 0),) * 257}, "device_out_of_range"),
        ({"devices": (Device("GPU-1\t", 0),)}, "unprintable"),
        ({"devices": (Device("GPU-1", 0, total_bytes=2**46 + 1),)}, "out_of_range"),
    ],
)
def test_a_hello_that_cannot_be(lie, reason):
    claims.check_process(PROCESS)
    with pytest.raises(WireError) as caught:
        claims.check_process(replace(PROCESS, **lie))
    assert caught.value.reason == reason


def test_a_hello_is_small_whatever_a_newer_version_says_in_it():
    hello = identity_pb2.Process(job="x" * 12285)
    claims.check_size(hello)
    hello.job += "x"
    with pytest.raises(WireError, match=r"a hello of 12289 bytes \(at most 12288\)"):
        claims.check_size(hello)


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (identity_pb2.Process(devices=[identity_pb2.Device()] * 6_145), "too_long"),
        (sample_pb2.SampleChunk(sequence=range(1, 8_194)), "too_many_samples"),
        (block_map_pb2.BlockMap(groups=[block_map_pb2.BlockGroup()] * 4_097), "too_many_groups"),
        (wire.block_map_to_wire(REF, block_map(classes=513)), "too_many_classes"),
        (wire.block_map_to_wire(REF, block_map(65, classes=511)), "too_many_classes"),
    ],
)
def test_a_message_that_holds_too_much_is_refused_before_anything_is_made_of_it(message, reason):
    claims.check_size(wire.block_map_to_wire(REF, block_map(4_096, classes=1)))
    claims.check_size(wire.block_map_to_wire(REF, block_map(classes=512)))
    with pytest.raises(WireError) as caught:
        claims.check_size(message)
    assert caught.value.reason == reason


@pytest.mark.parametrize(
    ("ref", "reason"),
    [(AllocatorRef("f" * 32, "GPU-1"), "foreign_process"), (AllocatorRef(ID, "GPU-2"), "unknown_device")],
)
def test_figures_of_another_process_or_of_a_device_that_nobody_told_of(ref, reason):
    claims.check_allocator(REF, PROCESS)
    with pytest.raises(WireError) as caught:
        claims.check_allocator(ref, PROCESS)
    assert caught.value.reason == reason


@pytest.mark.parametrize(
    ("lie", "reason", "text"),
    [
        (
            chunk(reserved_bytes=81 * GIB),
            "out_of_range",
            "reserved_bytes is 86973087744, the device has 85899345920 bytes",
        ),
        (
            chunk(device_total_bytes=96 * GIB),
            "out_of_range",
            "device_total_bytes is 103079215104, the device has 85899345920 bytes",
        ),
        (
            chunk(3, allocated_bytes=3 * GIB, reserved_bytes=GIB),
            "does_not_add_up",
            "allocated_bytes is 3221225472, of 1073741824 reserved bytes",
        ),
    ],
)
def test_counters_that_cannot_be(lie, reason, text):
    with pytest.raises(WireError) as caught:
        claims.check_chunk(lie, 80 * GIB)
    assert (caught.value.reason, str(caught.value)) == (reason, text)


def test_counters_of_a_device_of_unknown_size_are_held_to_what_no_device_has():
    claims.check_chunk(chunk(reserved_bytes=2**46), None)
    with pytest.raises(WireError):
        claims.check_chunk(chunk(reserved_bytes=2**46 + 1), None)


def test_counters_a_little_apart_are_no_lie():
    """They are read one after the other, and a driver keeps some of the total for itself."""
    claims.check_chunk(chunk(allocated_bytes=GIB + (64 << 20), reserved_bytes=GIB), 80 * GIB)
    claims.check_chunk(chunk(device_total_bytes=80 * GIB + (64 << 20), reserved_bytes=80 * GIB), 80 * GIB)
    claims.check_chunk(chunk(reserved_bytes=0, allocated_bytes=0), 80 * GIB)


@pytest.mark.parametrize(
    ("lie", "reason"),
    [
        (block_map(2, reserved=41 * GIB), "out_of_range"),
    ],
)
def test_a_block_map_that_cannot_be(lie, reason):
    claims.check_block_map(block_map(2, classes=512, reserved=40 * GIB), 80 * GIB)
    with pytest.raises(WireError) as caught:
        claims.check_block_map(lie, 80 * GIB)
    assert caught.value.reason == reason


@pytest.mark.parametrize(
    ("lie", "reason"),
    [
        ({"process_id": "f" * 32}, "foreign_process"),
        ({"process_id": "f" * 32, "device_uuid": "GPU-1"}, "foreign_process"),
        ({"device_uuid": "GPU-2"}, "unknown_device"),
        ({"message": "x" * 16385}, "too_long"),
        ({"message": "a\0b"}, "unprintable"),
    ],
)
def test_an_event_that_cannot_be(lie, reason):
    event = Event(ID, 1, 1, EventKind.OOM, message="CUDA out of memory.\nTried to allocate …")
    claims.check_event(event, PROCESS)
    with pytest.raises(WireError) as caught:
        claims.check_event(replace(event, **lie), PROCESS)
    assert caught.value.reason == reason
