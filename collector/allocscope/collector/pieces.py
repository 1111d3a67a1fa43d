"""A batch in pieces that can be stored each by itself, so that what the database cannot keep costs itself only. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from allocscope.model import Process
from allocscope.storage.records import NodeBatch


def pieces(batch: NodeBatch) -> list[NodeBatch]:
    """One for each process, chunk, map, event and reading, the middle three with the process that they name.

    They bear the number before the batch's own: were the process killed amid them, the batch is still to be sent again.
    """
    bare = replace(batch, sequence=batch.sequence - 1, processes=(), chunks=(), block_maps=(), events=(), readings=())
    known = {process.process_id: process for process in batch.processes}

    def named(process_id: str) -> tuple[Process, ...]:
        return (known[process_id],) if process_id in known else ()

    return [
        *(replace(bare, processes=(process,)) for process in batch.processes),
        *(replace(bare, processes=named(c.allocator.process_id), chunks=(c,)) for c in batch.chunks),
        *(replace(bare, processes=named(m[0].process_id), block_maps=(m,)) for m in batch.block_maps),
        *(replace(bare, processes=named(event.process_id), events=(event,)) for event in batch.events),
        *(replace(bare, readings=(reading,)) for reading in batch.readings),
    ]


def joined(batch: NodeBatch, kept: Sequence[NodeBatch]) -> NodeBatch:
    """The batch, of those pieces only."""
    return replace(
        batch,
        processes=tuple({process.process_id: process for piece in kept for process in piece.processes}.values()),
        chunks=tuple(chunk for piece in kept for chunk in piece.chunks),
        block_maps=tuple(block_map for piece in kept for block_map in piece.block_maps),
        events=tuple(event for piece in kept for event in piece.events),
        readings=tuple(reading for piece in kept for reading in piece.readings),
    )


def size(batches: Iterable[NodeBatch]) -> int:
    """How many samples, maps and events."""
    return sum(sum(map(len, batch.chunks)) + len(batch.block_maps) + len(batch.events) for batch in batches)
