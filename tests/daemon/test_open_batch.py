"""Many batches as one say the same as one after the other."""

from __future__ import annotations

from allocscope.daemon.open_batch import merged
from allocscope.model import AllocatorRef, Device, Process, Sample
from allocscope.model.sample import chunks
from allocscope.model.wire import chunk_to_wire, process_to_wire
from allocscope.proto.v1.block_map_pb2 import BlockMap
from allocscope.proto.v1.collector_service_pb2 import Batch, Dropped
from allocscope.proto.v1.device_pb2 import DeviceReading
from allocscope.proto.v1.event_pb2 import Event


def batch(sequence: int, rank: int | None = None, **more) -> Batch:
    """Of one process, with one sample."""
    process = Process("a" * 32, "train", 7, "host", 1, rank=rank, devices=(Device("GPU-1", 0),))
    sample = Sample(sequence * 10, sequence * 100, reserved_bytes=sequence)
    return Batch(
        sequence=sequence,
        closed_us=sequence * 1000,
        processes=[process_to_wire(process)],
        samples=[chunk_to_wire(chunk) for chunk in chunks(AllocatorRef("a" * 32, "GPU-1"), [sample])],
        **more,
    )


def test_columns_are_joined_and_all_the_rest_is_there_in_its_order():
    dropped = Dropped(what="samples", reason="spool_full", count=3)
    whole = merged(
        [
            batch(4, events=[Event(sequence=41)], devices=[DeviceReading(time_us=4)], dropped=[dropped]),
            batch(5, rank=1, block_maps=[BlockMap(sequence=51)], dropped=[dropped]),
            batch(6, rank=2, events=[Event(sequence=61)], devices=[DeviceReading(time_us=6)]),
        ]
    )
    assert (whole.sequence, whole.closed_us) == (6, 6000)
    assert [(list(c.sequence), list(c.time_us), list(c.reserved_bytes)) for c in whole.samples] == [
        ([40, 50, 60], [400, 500, 600], [4, 5, 6])
    ]
    assert [process.rank for process in whole.processes] == [2]
    assert [event.sequence for event in whole.events] == [41, 61]
    assert [block_map.sequence for block_map in whole.block_maps] == [51]
    assert [reading.time_us for reading in whole.devices] == [4, 6]
    assert list(whole.dropped) == [Dropped(what="samples", reason="spool_full", count=6)]


def test_one_batch_stays_as_it_is():
    assert merged([batch(4)]) == batch(4)
