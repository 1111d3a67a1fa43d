"""What goes over the wire comes back the same; what cannot be is refused with a reason."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allocscope.model import (
    COLUMNS,
    AllocatorRef,
    BillEntry,
    BlockGroup,
    BlockMap,
    Capture,
    CaptureNote,
    CaptureOrder,
    CaptureReason,
    Device,
    DeviceBill,
    DeviceProcess,
    DeviceReading,
    Event,
    EventKind,
    Intervals,
    Line,
    Order,
    Owner,
    Pool,
    PrivatePool,
    Process,
    Sample,
    SizeClass,
    chunks,
    wire,
)
from allocscope.proto.v1 import block_map_pb2, capture_pb2, identity_pb2, orders_pb2, sample_pb2

REF = AllocatorRef("a" * 32, "GPU-1")
sizes = st.integers(0, wire.LARGEST_STORED)
maybe = st.none() | sizes
words = st.text(min_size=1, max_size=8)


@st.composite
def runs(draw: st.DrawFn) -> list[Sample]:
    """Samples in a row, each knowing what it happens to know."""
    numbers = sorted(draw(st.sets(st.integers(1, 1000), max_size=6)))
    return [Sample(n, draw(sizes), **draw(st.dictionaries(st.sampled_from(COLUMNS), maybe))) for n in numbers]


@given(runs())
def test_samples_come_back_as_they_were_and_what_was_unknown_stays_unknown(samples: list[Sample]) -> None:
    received = [wire.chunk_from_wire(wire.chunk_to_wire(chunk)) for chunk in chunks(REF, samples)]
    assert [s for chunk in received for s in chunk.samples()] == samples
    assert all(chunk.allocator == REF for chunk in received)


devices = st.builds(Device, words, st.integers(0, 2**32 - 1), st.none() | words, maybe, maybe)
processes = st.builds(
    Process, words, words, st.integers(0, 2**32 - 1), st.text(max_size=4), sizes,
    rank=st.none() | st.integers(0, 7), world_size=st.none() | st.just(8), torch_version=st.none() | st.text(max_size=4),
    allocator_conf=st.none() | st.text(max_size=4), devices=st.lists(devices, max_size=2).map(tuple),
)  # fmt: skip


@given(processes)
def test_a_process_comes_back_as_it_was(process: Process) -> None:
    assert wire.process_from_wire(wire.process_to_wire(process)) == process


GROUP = BlockGroup(
    pool=Pool.LARGE,
    stream=4112,
    private_pool=PrivatePool(0, 0),
    expandable=True,
    segment_count=1,
    reserved_bytes=100,
    requested_bytes=None,
    rounding_bytes=None,
    allocated_bytes=50,
    awaiting_free_bytes=20,
    stranded_bytes=10,
    releasable_bytes=0,
    private_bytes=20,
    free_stranded=(SizeClass(8, 1, 10, 10),),
    free_releasable=(),
    live=(SizeClass(24, 2, 50, 26),),
    largest_free_block_bytes=10,
    tail_bytes=10,
    tail_kept_bytes=0,
)


@pytest.mark.parametrize(
    "group",
    [
        GROUP,
        replace(GROUP, private_pool=None, requested_bytes=0, rounding_bytes=50, tail_bytes=None, tail_kept_bytes=None),
    ],
)
def test_a_block_map_comes_back_as_it_was(group: BlockGroup) -> None:
    block_map = BlockMap(3, 17, (group,), 250)
    assert wire.block_map_from_wire(wire.block_map_to_wire(REF, block_map)) == (REF, block_map)


OWNER = Owner("ann", "a8" * 32, "trainer", "llama-0", "team-a", "0c5d5f2a", "8812", "0")


def test_a_device_with_its_bill_comes_back_as_it_was() -> None:
    bill = DeviceBill(
        100,
        (BillEntry(Line.FREE, 40), BillEntry(Line.STRANDED, 0, False, "p"), BillEntry(Line.REQUESTED, 60, True, "p")),
    )
    processes = (
        DeviceProcess(7, "p", "python", None),
        DeviceProcess(8, owner=OWNER),
        DeviceProcess(9, owner=Owner("bob")),
    )
    reading = DeviceReading(Device("GPU-1", 0, "H200", 100), 5, True, 40, None, processes, bill, None)
    assert wire.reading_from_wire(wire.reading_to_wire(reading)) == reading


@pytest.mark.parametrize("kind", list(EventKind))
def test_an_event_comes_back_as_it_was(kind: EventKind) -> None:
    event = Event("p", 9, 5, kind, "GPU-1", 20, None, 0, None, "text")
    assert wire.event_from_wire(wire.event_to_wire(event)) == event


CAPTURE_ID = "0c" * 16
FULL_ORDER = CaptureOrder(CAPTURE_ID, "GPU-1", 10_000_000, 100_000, True, CaptureReason.FORECAST)


@pytest.mark.parametrize("order", [Intervals(sample_us=0), CaptureOrder(CAPTURE_ID), FULL_ORDER])
def test_an_order_comes_back_as_it_was(order: Order) -> None:
    assert wire.order_from_wire(wire.order_to_wire(order)) == order


def test_an_order_that_names_no_capture_is_refused() -> None:
    with pytest.raises(wire.WireError, match="32 hex digits"):
        wire.order_from_wire(wire.order_to_wire(CaptureOrder("../../etc/passwd")))


NOTED = Process("p", "train", 7, "host", 1)


def note_of(process_id: str = "p") -> CaptureNote:
    return CaptureNote(
        Capture(CAPTURE_ID, process_id, 5, CaptureReason.OOM, "GPU-1", 9, 0, False, "the disk was full"),
        NOTED,
        next(chunks(AllocatorRef("p", "GPU-1"), [Sample(1, 5, allocated_bytes=0)])),
        BlockMap(2, 5, (), 3),
        Event("p", 3, 5, EventKind.OOM, "GPU-1", 20, 100, 0),
    )


@pytest.mark.parametrize("note", [note_of(), CaptureNote(Capture(CAPTURE_ID, "p", 5, CaptureReason.ASKED), NOTED)])
def test_a_note_of_a_capture_comes_back_as_it_was(note: CaptureNote) -> None:
    packed = wire.note_to_wire(note).SerializeToString()
    assert wire.note_from_wire(capture_pb2.CaptureNote.FromString(packed)) == note


def test_a_note_that_speaks_of_another_process_is_refused() -> None:
    with pytest.raises(wire.WireError, match="speaks of"):
        wire.note_from_wire(wire.note_to_wire(note_of("q")))


def test_an_order_of_a_later_version_is_passed_over() -> None:
    assert wire.order_from_wire(orders_pb2.Order()) is None


def chunk_of(**columns: list[int]) -> sample_pb2.SampleChunk:
    return sample_pb2.SampleChunk(allocator=identity_pb2.AllocatorRef(process_id="p", device_uuid="d"), **columns)


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        pytest.param(
            chunk_of(sequence=[1, 2], time_us=[1, 2], active_bytes=[5]),
            "column_length",
            id="a column that is too short",
        ),
        pytest.param(chunk_of(sequence=[1, 2], time_us=[1]), "column_length", id="times missing"),
        pytest.param(chunk_of(sequence=[2, 2], time_us=[1, 2]), "sequence", id="a number given twice"),
        pytest.param(chunk_of(sequence=[0], time_us=[1]), "sequence", id="numbered from 0"),
        pytest.param(
            chunk_of(sequence=[1], time_us=[1], active_bytes=[2**64 - 1]), "out_of_range", id="a driver's N/A"
        ),
        pytest.param(sample_pb2.SampleChunk(sequence=[1], time_us=[1]), "unnamed_allocator", id="nobody's"),
    ],
)
def test_a_chunk_that_cannot_be_is_refused_with_its_reason(message: sample_pb2.SampleChunk, reason: str) -> None:
    with pytest.raises(wire.WireError) as refused:
        wire.chunk_from_wire(message)
    assert refused.value.reason == reason


def test_a_rank_outside_its_world_is_refused() -> None:
    with pytest.raises(wire.WireError, match="rank 8 of a world of 8"):
        wire.process_from_wire(identity_pb2.Process(process_id="p", job="j", rank=8, world_size=8))


def test_a_map_whose_lines_do_not_add_up_is_refused() -> None:
    message = wire.block_map_to_wire(REF, BlockMap(1, 1, (replace(GROUP, stranded_bytes=11),)))
    with pytest.raises(wire.WireError, match="come to 101 bytes, its segments to 100"):
        wire.block_map_from_wire(message)


def test_a_map_whose_live_blocks_do_not_add_up_is_refused() -> None:
    """A bill made of it would have a line below zero, and cost all devices of the node theirs."""
    known = replace(GROUP, requested_bytes=0, rounding_bytes=50)
    for lie in ({"requested_bytes": 1}, {"rounding_bytes": 49}, {"requested_bytes": 51, "rounding_bytes": None}):
        message = wire.block_map_to_wire(REF, BlockMap(1, 1, (replace(known, **lie),)))
        with pytest.raises(wire.WireError, match="live blocks have 50 bytes"):
            wire.block_map_from_wire(message)


@pytest.mark.parametrize("name", ["time_us", "call_us"])
def test_a_map_with_a_figure_that_no_database_keeps_is_refused(name: str) -> None:
    message = wire.block_map_to_wire(REF, BlockMap(1, 1, (), 1))
    setattr(message, name, 2**63)
    with pytest.raises(wire.WireError, match=f"BlockMap.{name} holds 9223372036854775808"):
        wire.block_map_from_wire(message)


def test_a_pool_that_there_is_not_is_refused() -> None:
    message = block_map_pb2.BlockMap(
        allocator=identity_pb2.AllocatorRef(process_id="p", device_uuid="d"),
        sequence=1,
        groups=[block_map_pb2.BlockGroup()],
    )
    with pytest.raises(wire.WireError, match="neither small nor large"):
        wire.block_map_from_wire(message)


def test_a_bill_that_does_not_add_up_to_its_device_is_refused() -> None:
    reading = DeviceReading(Device("GPU-1", 0, None, 100), 5, True, bill=DeviceBill(99, (BillEntry(Line.FREE, 99),)))
    with pytest.raises(wire.WireError, match="comes to 99 bytes, the device has 100"):
        wire.reading_from_wire(wire.reading_to_wire(reading))
