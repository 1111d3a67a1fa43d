"""What a history and the snapshot after it tell of the whole, before the first entry is gone through."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from allocscope.allocator.settings import MIN_BLOCK_BYTES, SMALL_MAX_BYTES, AllocatorSettings
from allocscope.allocator.simulator.beginning import GAINS, RELEASES
from allocscope.allocator.snapshot import DEFAULT_POOL, INACTIVE, SnapshotSegment, TraceEntry


def reserved_peak(reserved: int, trace: Iterable[TraceEntry]) -> int:
    """What was reserved at most; `reserved`: before the first entry; bytes."""
    peak = reserved
    for entry in trace:
        if entry.action in GAINS:
            reserved += entry.size
            peak = max(peak, reserved)
        elif entry.action in RELEASES:
            reserved -= entry.size
    return peak


def never_split(segments: Iterable[SnapshotSegment], settings: AllocatorSettings) -> frozenset[tuple[int, int]]:
    """Private pools that give each allocation a whole segment, as their blocks show (MemPool(no_split=True))."""
    splits: set[tuple[int, int]] = set()
    whole: set[tuple[int, int]] = set()
    for segment in segments:
        if segment.pool_id == DEFAULT_POOL:
            continue
        if len(segment.blocks) != 1:
            splits.add(segment.pool_id)
        for block in segment.blocks:
            least = MIN_BLOCK_BYTES if segment.segment_type == "small" else SMALL_MAX_BYTES + 1
            requested = block.size if block.requested_size is None else block.requested_size
            if block.state != INACTIVE and block.size - settings.round(requested) >= least:
                whole.add(segment.pool_id)
    return frozenset(whole - splits)


def privates_not_told(trace: Sequence[TraceEntry], segments: Iterable[SnapshotSegment]) -> dict[int, tuple[int, int]]:
    """Which entries got segments of private pools that the snapshot still has; before PyTorch 2.12 entries do not say."""
    private = {segment.address: segment.pool_id for segment in segments if segment.pool_id != DEFAULT_POOL}
    if not private or any(entry.pool_id != DEFAULT_POOL for entry in trace):
        return {}
    last = {entry.address: index for index, entry in enumerate(trace) if entry.action == "segment_alloc"}
    return {last[address]: pool_id for address, pool_id in private.items() if address in last}
