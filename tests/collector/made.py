"""Batches as the writer hands them on, cut from what a recorded process sent."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice

from allocscope.allocator.player import Player, Seen
from allocscope.allocator.recording import Recording
from allocscope.model import AllocatorRef, BlockMap, Device, Event, Process, Sample, chunks
from allocscope.storage.records import NodeBatch

SEED = 20
RECEIVED_US = 1_800_000_000_000_000
PROCESS_ID = "a" * 32
UUID = "GPU-a"
REF = AllocatorRef(PROCESS_ID, UUID)


def player(recording: Recording) -> Player:
    return Player(recording, SEED, allocator=REF)


def recorded_process(recording: Recording, **more) -> Process:
    given = {
        "rank": 0,
        "devices": (Device(UUID, 0, total_bytes=recording.device_total_bytes),),
        "allocator_conf": recording.conf,
        **more,
    }
    return Process(PROCESS_ID, recording.name, 4711, "host", recording.start_us, **given)


def batches(process: Process, seen: Iterable[Seen], size: int, first: int = 1, **more) -> Iterator[NodeBatch]:
    """`size` things a batch, and a batch each second."""
    items = iter(seen)
    sequence = first
    while part := list(islice(items, size)):
        yield batch(sequence, process, part, **more)
        sequence += 1


def batch(sequence: int, process: Process, items: Iterable[Seen], **more) -> NodeBatch:
    items = list(items)
    given = {
        "received_us": RECEIVED_US + sequence * 1_000_000,
        "processes": (process,),
        "chunks": tuple(chunks(REF, (item for item in items if isinstance(item, Sample)))),
        "block_maps": tuple((REF, item) for item in items if isinstance(item, BlockMap)),
        "events": tuple(replace(item, process_id=PROCESS_ID) for item in items if isinstance(item, Event)),
        **more,
    }
    return NodeBatch("n1", "d1", sequence, closed_us=RECEIVED_US, **given)
