"""One device's allocator at a moment: its segments, condensed and billed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce
from math import gcd
from operator import attrgetter
from typing import Any

from allocscope.allocator.bill import lines_from_map
from allocscope.allocator.settings import MIB, MIN_LARGE_BYTES, AllocatorSettings
from allocscope.allocator.snapshot import INACTIVE, LIVE, SnapshotBlock, SnapshotSegment
from allocscope.model import BillEntry, BlockGroup, BlockMap, Line, condense


@dataclass(frozen=True, slots=True)
class Moment:
    """One device's allocator at a moment."""

    segments: tuple[SnapshotSegment, ...]
    """By address; their blocks fill them."""
    groups: tuple[BlockGroup, ...]
    lines: tuple[BillEntry, ...]
    """requested, rounding, awaiting_free, stranded, releasable, private; they add up to `reserved_bytes`.

    Inexact are the first two where PyTorch (before 2.0) does not tell what was asked for.
    """

    @property
    def reserved_bytes(self) -> int:
        """All that was got from the driver."""
        return sum(entry.bytes for entry in self.lines)

    @property
    def allocated_bytes(self) -> int:
        """Live blocks, whole."""
        return self.bytes_of(Line.REQUESTED) + self.bytes_of(Line.ROUNDING)

    @property
    def block_count(self) -> int:
        return sum(len(segment.blocks) for segment in self.segments)

    @property
    def largest_free_block_bytes(self) -> int:
        """0: no block is free."""
        return max((group.largest_free_block_bytes or 0 for group in self.groups), default=0)

    @property
    def block_map(self) -> BlockMap:
        return BlockMap(0, 0, self.groups)

    def bytes_of(self, line: Line) -> int:
        """The bytes of one line."""
        return next(entry.bytes for entry in self.lines if entry.line is line)

    def known_bytes_of(self, line: Line) -> int | None:
        """The same; None where the line is not exact."""
        entry = next(entry for entry in self.lines if entry.line is line)
        return entry.bytes if entry.exact else None


def moment_of(segments: Iterable[SnapshotSegment], settings: AllocatorSettings) -> Moment:
    """One device's segments, billed. PyTorch 1.13 to 2.14.

    A segment whose blocks do not fill it is filled up: what no block covers counts as free; where there are no blocks at all,
    by the sums that the segment tells of itself. One whose blocks are more than it counts as large as they are; a block that was
    asked for more than it has counts as asked for in whole.
    """
    whole = tuple(sorted(map(_filled, segments), key=attrgetter("address")))
    groups = condense(map(_told, whole), large_page_bytes(whole, settings))
    return Moment(whole, groups, lines_from_map("", BlockMap(0, 0, groups)))


def large_page_bytes(segments: Iterable[SnapshotSegment], settings: AllocatorSettings) -> int:
    """The page of large expandable segments: by the settings, unless mapped ranges are no multiples of it.

    large_segment_size_mb outlives a later settings string that does not repeat it (ALLOCATOR.md 9), and the snapshot tells the
    last string only.
    """
    sizes = [s.total_size for s in segments if s.is_expandable and s.segment_type != "small"]
    page = settings.large_segment_bytes
    if all(size % page == 0 for size in sizes):
        return page
    seen = reduce(gcd, sizes)
    return seen if seen > MIN_LARGE_BYTES and seen % MIB == 0 else page


def _filled(segment: SnapshotSegment) -> SnapshotSegment:
    covered = sum(block.size for block in segment.blocks)
    if covered == segment.total_size and segment.segment_type in ("small", "large"):
        return segment
    blocks = segment.blocks
    if not blocks:
        blocks = _blocks_from_sums(segment)
        covered = sum(block.size for block in blocks)
    if covered < segment.total_size:
        rest = SnapshotBlock(segment.address + covered, segment.total_size - covered, 0, INACTIVE)
        blocks = (*blocks, rest)
    return SnapshotSegment(
        device=segment.device,
        address=segment.address,
        total_size=max(covered, segment.total_size),
        stream=segment.stream,
        segment_type=segment.segment_type if segment.segment_type == "small" else "large",
        pool_id=segment.pool_id,
        is_expandable=segment.is_expandable,
        blocks=blocks,
    )


def _blocks_from_sums(segment: SnapshotSegment) -> tuple[SnapshotBlock, ...]:
    active = min(max(segment.active_size or 0, 0), segment.total_size)
    allocated = min(max(segment.allocated_size or 0, 0), active)
    requested = segment.requested_size if active == allocated else None
    blocks = []
    if allocated:
        blocks.append(SnapshotBlock(segment.address, allocated, requested, LIVE))
    if active > allocated:
        blocks.append(SnapshotBlock(segment.address + allocated, active - allocated, None, "active_pending_free"))
    return tuple(blocks)


def _told(segment: SnapshotSegment) -> dict[str, Any]:
    return {
        "address": segment.address,
        "total_size": segment.total_size,
        "stream": segment.stream,
        "segment_type": segment.segment_type,
        "segment_pool_id": segment.pool_id,
        "is_expandable": segment.is_expandable,
        "blocks": [
            {"size": block.size, "state": block.state, "requested_size": _believable(block)} for block in segment.blocks
        ],
    }


def _believable(block: SnapshotBlock) -> int | None:
    """What a block was asked for is no more than it has."""
    return None if block.requested_size is None else min(block.requested_size, block.size)
