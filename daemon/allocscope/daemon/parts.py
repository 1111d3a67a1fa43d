"""A batch that is too large for one message, as several that are not, each whole in itself. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from allocscope.proto.v1 import block_map_pb2, device_pb2, event_pb2, identity_pb2, sample_pb2
from allocscope.proto.v1.collector_service_pb2 import Batch

_Item = sample_pb2.SampleChunk | block_map_pb2.BlockMap | event_pb2.Event | device_pb2.DeviceReading

_FRAMING_BYTES = 16
"""Most that a message costs beside itself where it stands in a batch; a batch's two numbers cost no more than two such."""


@dataclass(slots=True)
class Parts:
    """What a batch became."""

    batches: list[Batch]
    """Not numbered yet; there is at least one."""
    too_large: Counter[str] = field(default_factory=Counter)
    """How many samples, block maps, events and readings are in none, as they would fill more than one alone."""


def parts(batch: Batch, limit_bytes: int) -> Parts:
    """In as many batches as needed, none of which is larger; each describes the processes that it names."""
    if batch.ByteSize() <= limit_bytes:
        return Parts([batch])
    found = Parts([])
    known = {process.process_id: process for process in batch.processes}
    part = _Part(limit_bytes)
    for what, item, names in _items(batch):
        processes = [known[name] for name in dict.fromkeys(names) if name in known]
        if not part.has_room(item, processes):
            if not _Part(limit_bytes).has_room(item, processes):
                found.too_large[what] += len(item.sequence) if isinstance(item, sample_pb2.SampleChunk) else 1
                continue
            found.batches.append(part.batch)
            part = _Part(limit_bytes)
        part.add(item, processes)
    found.batches.append(part.batch)
    found.batches[0].dropped.extend(batch.dropped)
    for process in _left_out(batch, found.batches):
        if not part.has_room(None, [process]):
            part = _Part(limit_bytes)
            found.batches.append(part.batch)
        part.add(None, [process])
    return found


def _left_out(batch: Batch, found: Iterable[Batch]) -> list[identity_pb2.Process]:
    """Processes of which there is nothing else to tell."""
    described = {process.process_id for one in found for process in one.processes}
    return [process for process in batch.processes if process.process_id not in described]


def _items(batch: Batch) -> Iterator[tuple[str, _Item, Iterable[str]]]:
    """Everything that it tells, by what it is, with the processes that it names."""
    for chunk in batch.samples:
        yield "samples", chunk, [chunk.allocator.process_id]
    for block_map in batch.block_maps:
        yield "block_maps", block_map, [block_map.allocator.process_id]
    for event in batch.events:
        yield "events", event, [event.process_id]
    for reading in batch.devices:
        yield "readings", reading, [*(p.process_id for p in reading.processes), *(l.process_id for l in reading.bill)]


class _Part:
    """A batch that is still being filled."""

    def __init__(self, limit_bytes: int) -> None:
        self.batch = Batch()
        self._left_bytes = limit_bytes - 2 * _FRAMING_BYTES
        self._described: set[str] = set()

    def has_room(self, item: _Item | None, processes: Iterable[identity_pb2.Process]) -> bool:
        return self._cost(item, processes) <= self._left_bytes

    def add(self, item: _Item | None, processes: Iterable[identity_pb2.Process]) -> None:
        self._left_bytes -= self._cost(item, processes)
        self.batch.processes.extend(p for p in processes if p.process_id not in self._described)
        self._described.update(p.process_id for p in processes)
        match item:
            case sample_pb2.SampleChunk():
                self.batch.samples.append(item)
            case block_map_pb2.BlockMap():
                self.batch.block_maps.append(item)
            case event_pb2.Event():
                self.batch.events.append(item)
            case device_pb2.DeviceReading():
                self.batch.devices.append(item)

    def _cost(self, item: _Item | None, processes: Iterable[identity_pb2.Process]) -> int:
        new = [process for process in processes if process.process_id not in self._described]
        return sum(one.ByteSize() + _FRAMING_BYTES for one in (*new, *([item] if item else [])))
