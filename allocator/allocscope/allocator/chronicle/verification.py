"""Whether what a history came to is what the snapshot says: every segment and block, to the byte."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from allocscope.allocator.chronicle.layout import Block
from allocscope.allocator.simulator.blocks import FREE, STATES
from allocscope.allocator.snapshot import SnapshotSegment


@dataclass(frozen=True, slots=True)
class Difference:
    """How it differs."""

    blocks: int
    """How many that are in the snapshot are not, or are otherwise, in what the history came to, or the other way round."""
    address: int
    """The lowest one's."""
    from_entry: int
    """The first entry that has to do with any of them: from there on what is told is an estimate; 0: from the beginning."""


def difference_of(blocks: Iterable[Block], segments: Iterable[SnapshotSegment]) -> Difference | None:
    """None where they are the same. What the snapshot does not tell (requested sizes before PyTorch 2.0) is not compared."""
    mine = {block.address: block for block in blocks}
    odd: list[int] = []
    seen: set[int] = set()
    for segment in segments:
        small = segment.segment_type == "small"
        for told in segment.blocks:
            block = mine.get(told.address)
            seen.add(told.address)
            if block is None:
                odd.append(told.address)
                continue
            pool = block.span.pool
            same = block.size == told.size and STATES[block.state] == told.state
            same = same and (pool.stream, pool.small, pool.private) == (segment.stream, small, segment.pool_id)
            if block.state != FREE and told.requested_size is not None:
                same = same and block.requested == told.requested_size
            if not same or block.span.expandable != segment.is_expandable:
                odd.append(told.address)
    odd += mine.keys() - seen
    if not odd:
        return None
    concerned = [mine[address].entry for address in odd if address in mine]
    return Difference(len(odd), min(odd), max(min(concerned, default=0), 0))
