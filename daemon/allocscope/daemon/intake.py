"""Gathers what comes in into batches, and remembers who is owed an acknowledgement for what."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from allocscope.daemon.open_batch import OpenBatch
from allocscope.daemon.parts import parts
from allocscope.daemon.spool_frames import Counts
from allocscope.model.node import DeviceReading
from allocscope.model.wire import reading_to_wire
from allocscope.proto.v1 import block_map_pb2, collector_service_pb2, event_pb2, identity_pb2, sample_pb2

LARGEST_BATCH_BYTES = 1 << 20
"""A batch is closed early at this size, which its readings and descriptions of processes are not counted into."""

LARGEST_SENT_BYTES = 15 << 20
"""A batch that is larger all the same is split: a collector takes no message of more than 16 MiB."""

MOST_FULL_BATCHES = 8
"""That wait to be written before the jobs must."""


class Owed(Protocol):
    """Somebody who waits for an acknowledgement."""

    def acknowledge(self, sequence: int) -> None:
        """Everything up to this number is on disk, or refused."""


class ClosedBatch:
    """A batch, and whom to tell once it is on disk."""

    def __init__(self, batch: collector_service_pb2.Batch, counts: Counts, owed: Mapping[Owed, int]) -> None:
        self.batch, self.counts, self.owed = batch, counts, owed


class _OpenBatch(OpenBatch):
    """With those who wait for it."""

    def __init__(self) -> None:
        super().__init__()
        self.owed: dict[Owed, int] = {}

    @property
    def is_empty(self) -> bool:
        return not self.owed and super().is_empty

    def close(self, limit_bytes: int) -> tuple[list[ClosedBatch], Counter[str]]:
        """In batches of at most that size, and what is in none of them. The last one on disk tells those who wait."""
        found = parts(self.whole(), limit_bytes)
        closed = [ClosedBatch(batch, _counts(batch), {}) for batch in found.batches]
        closed[-1].owed = self.owed
        return closed, found.too_large


def _counts(batch: collector_service_pb2.Batch) -> Counts:
    samples = sum(len(chunk.sequence) for chunk in batch.samples)
    return Counts(samples, len(batch.block_maps), len(batch.events))


class Intake:
    """Gathers batches; none is larger than LARGEST_SENT_BYTES."""

    def __init__(self, hasten: Callable[[], None], *, limit_bytes: int = LARGEST_SENT_BYTES) -> None:
        self.hasten = hasten
        """Asks for a round now: a batch is full, something happened, or somebody waits for an acknowledgement, as a process that ends."""
        self._too_large: Counter[str] = Counter()
        self._limit_bytes = limit_bytes
        self._open = _OpenBatch()
        self._full: list[_OpenBatch] = []
        self._room = asyncio.Event()
        self._room.set()

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to write and nobody to tell."""
        return not self._full and self._open.is_empty

    async def wait_for_room(self) -> None:
        """Until there is: whoever sends faster than the disk takes it must wait."""
        await self._room.wait()

    def add_chunk(self, process: identity_pb2.Process, chunk: sample_pb2.SampleChunk) -> None:
        """Samples."""
        self._open.add_chunk(chunk)
        self._took(process, chunk.ByteSize())

    def add_block_map(self, process: identity_pb2.Process, block_map: block_map_pb2.BlockMap) -> None:
        """A block map."""
        self._open.batch.block_maps.append(block_map)
        self._took(process, block_map.ByteSize())

    def add_event(self, process: identity_pb2.Process, event: event_pb2.Event) -> None:
        """An event, which is not to wait for the others."""
        self._open.batch.events.append(event)
        self._took(process, event.ByteSize())
        self.hasten()

    def add_process(self, process: identity_pb2.Process) -> None:
        """A process that says hello, whether it has figures yet or not."""
        self._took(process, 0)

    def add_readings(self, readings: Iterable[DeviceReading], processes: Iterable[identity_pb2.Process]) -> None:
        """The node's devices, and every process that their bills name."""
        self._open.batch.devices.extend(map(reading_to_wire, readings))
        for process in processes:
            self._open.add_process(process)

    def add_dropped(self, what: str, reason: str, count: int) -> None:
        """Something was lost, which the collector is told with the next batch; both are fixed words."""
        self._open.dropped[what, reason] += count

    def owe(self, stream: Owed, sequence: int) -> None:
        """`stream` is to be told when everything up to here is on disk, or refused."""
        owed = self._open.owed
        owed[stream] = max(owed.get(stream, 0), sequence)

    def inherit(self, lost: ClosedBatch) -> None:
        """A batch was given up before it was on disk: nobody need wait for it, once the next one is."""
        for stream, sequence in lost.owed.items():
            self.owe(stream, sequence)

    def close(self, sequence: int, closed_us: int) -> list[ClosedBatch]:
        """Everything so far, numbered from `sequence` on."""
        gathered = [*self._full, self._open]
        self._full, self._open = [], _OpenBatch()
        self._room.set()
        closed: list[ClosedBatch] = []
        for batch in gathered:
            batches, too_large = batch.close(self._limit_bytes)
            closed += batches
            self._too_large += too_large
        for number, one in enumerate(closed, sequence):
            one.batch.sequence, one.batch.closed_us = number, closed_us
        return closed

    def take_too_large(self) -> Counter[str]:
        """What is in no batch, as it fills more than one alone, since the last call."""
        taken, self._too_large = self._too_large, Counter()
        return taken

    def _took(self, process: identity_pb2.Process, size: int) -> None:
        self._open.add_process(process)
        self._open.bytes += size
        if self._open.bytes >= LARGEST_BATCH_BYTES:
            self._full.append(self._open)
            self._open = _OpenBatch()
            self.hasten()
            if len(self._full) >= MOST_FULL_BATCHES:
                self._room.clear()
