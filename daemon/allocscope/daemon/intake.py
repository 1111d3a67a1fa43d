"""The open batch: gathers what comes in until it is closed, and who is owed an acknowledgement for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from allocscope.daemon.spool import Counts
from allocscope.model.node import DeviceReading
from allocscope.model.wire import reading_to_wire
from allocscope.proto.v1 import block_map_pb2, collector_service_pb2, event_pb2, identity_pb2, sample_pb2

LARGEST_BATCH_BYTES = 1 << 20
"""A batch is closed early at this size; with one message on top (2 MiB) it is far below gRPC's limit of 4 MiB."""


class Owed(Protocol):
    """Somebody who waits for an acknowledgement."""

    def acknowledge(self, sequence: int) -> None:
        """Everything up to this number is on disk, or refused."""


class ClosedBatch:
    """A batch, and whom to tell once it is on disk."""

    def __init__(self, batch: collector_service_pb2.Batch, counts: Counts, owed: dict[Owed, int]) -> None:
        self.batch, self.counts, self.owed = batch, counts, owed

    def acknowledge(self) -> None:
        """It is on disk."""
        for stream, sequence in self.owed.items():
            stream.acknowledge(sequence)


class Intake:
    """Gathers one batch after the other."""

    def __init__(self, on_full: Callable[[], None]) -> None:
        self._on_full = on_full
        self._reset()

    def _reset(self) -> None:
        self._batch = collector_service_pb2.Batch()
        self._bytes = 0
        self._samples = 0
        self._processes: dict[str, identity_pb2.Process] = {}
        self._owed: dict[Owed, int] = {}
        self._last_chunk: dict[str, tuple[sample_pb2.SampleChunk, frozenset[str]]] = {}

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to write and nobody to tell."""
        return not self._owed and not self._batch.ByteSize()

    def add_chunk(self, process: identity_pb2.Process, chunk: sample_pb2.SampleChunk) -> None:
        """Samples; joined to the allocator's last ones where the same figures are known."""
        known = frozenset(field.name for field, _ in chunk.ListFields())
        device = chunk.allocator.device_uuid
        last = self._last_chunk.get(process.process_id)
        if (
            last
            and last[1] == known
            and last[0].allocator.device_uuid == device
            and last[0].sequence[-1] < chunk.sequence[0]
        ):
            last[0].MergeFrom(chunk)
        else:
            self._batch.samples.append(chunk)
            self._last_chunk[process.process_id] = (self._batch.samples[-1], known)
        self._samples += len(chunk.sequence)
        self._took(process, chunk.ByteSize())

    def add_block_map(self, process: identity_pb2.Process, block_map: block_map_pb2.BlockMap) -> None:
        """A block map."""
        self._batch.block_maps.append(block_map)
        self._took(process, block_map.ByteSize())

    def add_event(self, process: identity_pb2.Process, event: event_pb2.Event) -> None:
        """An event."""
        self._batch.events.append(event)
        self._took(process, event.ByteSize())

    def add_process(self, process: identity_pb2.Process) -> None:
        """A process that says hello, whether it has figures yet or not."""
        self._took(process, 0)

    def add_readings(self, readings: Iterable[DeviceReading], processes: Iterable[identity_pb2.Process]) -> None:
        """The node's devices, and every process that their bills name."""
        self._batch.devices.extend(map(reading_to_wire, readings))
        for process in processes:
            self._processes[process.process_id] = process

    def owe(self, stream: Owed, sequence: int) -> None:
        """`stream` is to be told when everything up to here is on disk, or refused."""
        self._owed[stream] = max(self._owed.get(stream, 0), sequence)

    def inherit(self, lost: ClosedBatch) -> None:
        """A batch was given up before it was on disk: nobody need wait for it, once the next one is."""
        for stream, sequence in lost.owed.items():
            self.owe(stream, sequence)

    def close(self, sequence: int, closed_us: int) -> ClosedBatch:
        """The batch so far, numbered; the next one is open."""
        batch = self._batch
        batch.sequence, batch.closed_us = sequence, closed_us
        batch.processes.extend(self._processes.values())
        closed = ClosedBatch(batch, Counts(self._samples, len(batch.block_maps), len(batch.events)), self._owed)
        self._reset()
        return closed

    def _took(self, process: identity_pb2.Process, size: int) -> None:
        if process.process_id not in self._processes:
            self._bytes += process.ByteSize()
        self._processes[process.process_id] = process
        self._bytes += size
        if self._bytes >= LARGEST_BATCH_BYTES:
            self._on_full()
