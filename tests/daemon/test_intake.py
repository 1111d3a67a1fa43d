"""Batches: whole in themselves, small enough for gRPC, and each tells whom to acknowledge."""

from __future__ import annotations

import asyncio

from allocscope.daemon.intake import LARGEST_BATCH_BYTES, Intake
from allocscope.daemon.spool_frames import Counts
from allocscope.model import AllocatorRef, Device, DeviceReading, Process, Sample
from allocscope.model.sample import chunks
from allocscope.model.wire import chunk_to_wire, process_to_wire
from allocscope.proto.v1.event_pb2 import Event
from allocscope.proto.v1.sample_pb2 import SampleChunk
from tests.daemon.fakes import acknowledge

A = process_to_wire(Process("a" * 32, "train", 7, "host", 1, devices=(Device("GPU-1", 0), Device("GPU-2", 1))))
B = process_to_wire(Process("b" * 32, "serve", 8, "host", 1))


class Waiting:
    """Somebody who waits for an acknowledgement."""

    def __init__(self) -> None:
        self.acknowledged = 0

    def acknowledge(self, sequence: int) -> None:
        self.acknowledged = sequence


def chunk(*sequences: int, device: str = "GPU-1", **columns: int) -> SampleChunk:
    samples = [Sample(sequence, sequence * 10, **columns) for sequence in sequences]
    (made,) = chunks(AllocatorRef("a" * 32, device), samples)
    return chunk_to_wire(made)


def test_samples_of_an_allocator_are_joined_while_the_same_figures_are_known():
    intake = Intake(lambda: None)
    intake.add_chunk(A, chunk(1, 3, reserved_bytes=5))
    intake.add_chunk(A, chunk(2, device="GPU-2", reserved_bytes=7))
    intake.add_chunk(A, chunk(4, reserved_bytes=6))
    intake.add_chunk(A, chunk(5, reserved_bytes=6, num_ooms=0))
    (closed,) = intake.close(9, 99)
    assert [
        (c.allocator.device_uuid, list(c.sequence), list(c.time_us), list(c.reserved_bytes))
        for c in closed.batch.samples
    ] == [
        ("GPU-1", [1, 3, 4], [10, 30, 40], [5, 5, 6]),
        ("GPU-2", [2], [20], [7]),
        ("GPU-1", [5], [50], [6]),
    ]
    assert (closed.batch.sequence, closed.batch.closed_us, closed.counts) == (9, 99, Counts(samples=5))
    assert list(closed.batch.processes) == [A]


def test_what_is_acknowledged_is_what_was_in_the_batch():
    intake, a, b = Intake(lambda: None), Waiting(), Waiting()
    intake.owe(a, 5)
    intake.owe(a, 3)
    (first,) = intake.close(1, 1)
    intake.owe(b, 7)
    acknowledge(first)
    assert (a.acknowledged, b.acknowledged) == (5, 0)
    assert not intake.is_empty
    (second,) = intake.close(2, 1)
    acknowledge(second)
    assert (a.acknowledged, b.acknowledged, intake.is_empty) == (5, 7, True)


def test_a_flood_between_two_rounds_becomes_batches_of_bounded_size_each_whole_in_itself():
    called = []
    intake = Intake(lambda: called.append(1))
    for first in range(1, 80_001, 1000):
        intake.add_chunk(A, chunk(*range(first, first + 1000), reserved_bytes=2**62, allocated_bytes=2**62))
    intake.add_process(B)
    batches = intake.close(5, 1)
    sizes = [closed.batch.ByteSize() for closed in batches]
    assert len(batches) == len(called) + 1 > 1
    assert max(sizes) < LARGEST_BATCH_BYTES + (1 << 16)
    assert [closed.batch.sequence for closed in batches] == list(range(5, 5 + len(batches)))
    assert all(A in closed.batch.processes for closed in batches)
    assert [s for closed in batches for c in closed.batch.samples for s in c.sequence] == list(range(1, 80_001))


def test_a_batch_above_the_limit_is_split_and_each_part_names_its_processes():
    intake, waiting = Intake(lambda: None, limit_bytes=3000), Waiting()
    for process_id in ("1" * 32, "2" * 32, "3" * 32):
        process = Process(process_id, "j" * 500, 7, "host", 1)
        intake.add_event(process_to_wire(process), Event(process_id=process_id, sequence=1, message="m" * 600))
    reading = DeviceReading(Device("GPU-1", 0), 1, from_nvml=False)
    intake.add_readings([reading], [process_to_wire(Process("4" * 32, "j" * 500, 9, "host", 1))])
    intake.owe(waiting, 5)
    closed = intake.close(7, 99)
    assert [(c.batch.sequence, c.batch.closed_us, c.counts.events) for c in closed] == [(7, 99, 2), (8, 99, 1)]
    assert [[event.process_id[0] for event in c.batch.events] for c in closed] == [["1", "2"], ["3"]]
    assert [[process.process_id[0] for process in c.batch.processes] for c in closed] == [["1", "2"], ["3", "4"]]
    assert [len(c.batch.devices) for c in closed] == [0, 1]
    assert max(c.batch.ByteSize() for c in closed) <= 3000
    acknowledge(closed[0])
    assert waiting.acknowledged == 0
    acknowledge(closed[1])
    assert (waiting.acknowledged, intake.take_too_large()) == (5, {})


def test_what_alone_is_above_the_limit_is_in_no_batch_and_told():
    intake, waiting = Intake(lambda: None, limit_bytes=3000), Waiting()
    intake.add_event(A, Event(process_id="a" * 32, sequence=1, message="m" * 3000))
    intake.add_chunk(A, chunk(*range(1, 1001), reserved_bytes=2**62))
    intake.add_chunk(A, chunk(2000, num_ooms=0))
    intake.owe(waiting, 2000)
    (closed,) = intake.close(1, 1)
    assert [list(c.sequence) for c in closed.batch.samples] == [[2000]]
    assert (closed.counts, list(closed.batch.processes)) == (Counts(samples=1), [A])
    assert intake.take_too_large() == {"events": 1, "samples": 1000}
    acknowledge(closed)
    assert waiting.acknowledged == 2000


async def test_who_sends_faster_than_the_disk_takes_it_waits():
    intake = Intake(lambda: None)
    flood = chunk(*range(1, 60_001), reserved_bytes=2**62, allocated_bytes=2**62)
    assert flood.ByteSize() > LARGEST_BATCH_BYTES
    for _ in range(8):
        await asyncio.wait_for(intake.wait_for_room(), 1)
        intake.add_chunk(A, flood)
    waiting = asyncio.create_task(intake.wait_for_room())
    await asyncio.wait([waiting], timeout=0.01)
    assert not waiting.done()
    intake.close(1, 1)
    await asyncio.wait_for(waiting, 1)
