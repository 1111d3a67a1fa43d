"""A batch while it is filled, and many as one. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from allocscope.proto.v1 import identity_pb2, sample_pb2
from allocscope.proto.v1.collector_service_pb2 import Batch, Dropped


class OpenBatch:
    """A batch that is still being filled."""

    def __init__(self) -> None:
        """Empty."""
        self.batch = Batch()
        self.bytes = 0
        self.processes: dict[str, identity_pb2.Process] = {}
        self.dropped: Counter[tuple[str, str]] = Counter()
        """By what and why."""
        self._last_chunks: dict[tuple[str, str], tuple[sample_pb2.SampleChunk, frozenset[str]]] = {}

    @property
    def is_empty(self) -> bool:
        """Whether nothing was added."""
        return not self.processes and not self.batch.ByteSize()

    def add_chunk(self, chunk: sample_pb2.SampleChunk) -> None:
        """Joined to the allocator's last ones where the same figures are known, so that columns are long."""
        allocator = (chunk.allocator.process_id, chunk.allocator.device_uuid)
        known = frozenset(field.name for field, _ in chunk.ListFields())
        last, last_known = self._last_chunks.get(allocator, (None, None))
        if last is not None and known == last_known and last.sequence[-1] < chunk.sequence[0]:
            last.MergeFrom(chunk)
        else:
            self.batch.samples.append(chunk)
            self._last_chunks[allocator] = (self.batch.samples[-1], known)

    def add_process(self, process: identity_pb2.Process) -> None:
        """The last description of a process counts."""
        if process.process_id not in self.processes:
            self.bytes += process.ByteSize()
        self.processes[process.process_id] = process

    def add_batch(self, batch: Batch) -> None:
        """What a later batch tells."""
        for process in batch.processes:
            self.add_process(process)
        for chunk in batch.samples:
            self.add_chunk(chunk)
        self.batch.block_maps.extend(batch.block_maps)
        self.batch.events.extend(batch.events)
        self.batch.devices.extend(batch.devices)
        for dropped in batch.dropped:
            self.dropped[dropped.what, dropped.reason] += dropped.count
        self.batch.sequence, self.batch.closed_us = batch.sequence, batch.closed_us

    def whole(self) -> Batch:
        """All of it, and the processes that it names."""
        self.batch.processes.extend(self.processes.values())
        self.batch.dropped.extend(
            Dropped(what=what, reason=reason, count=count) for (what, reason), count in self.dropped.items()
        )
        return self.batch


def merged(batches: Iterable[Batch]) -> Batch:
    """Batches that follow each other as one, with the last one's number: of each allocator long columns, of each process one description."""
    found = OpenBatch()
    for batch in batches:
        found.add_batch(batch)
    return found.whole()
