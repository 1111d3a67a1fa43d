"""Headroom: the largest single request that would succeed now, and by which way.

The rules are ALLOCATOR.md 8's: a cached block that fits, then the driver, then cached segments given back and the driver
again. Blocks come condensed (a block map), which loses nothing where no max_split_size is set: there only the largest block
counts. Where condensing or holes in expandable segments leave a doubt the answer is the lower one. Nothing is counted on that
may not come: blocks that wait for another stream, private pools that nobody uses any more.

Where the blocks themselves are known, `simulator.headroom.largest_request` and `Simulator.way` are exact in every mode.

Success is not monotone in size: between 1 and 10 MiB a request needs a whole large segment (20 MiB), a larger one only
itself. The figure is the largest that succeeds; ask `would_succeed` about a smaller one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from allocscope.allocator.settings import (
    MIN_LARGE_BYTES,
    ROUND_LARGE_BYTES,
    SMALL_MAX_BYTES,
    SMALL_SEGMENT_BYTES,
    AllocatorSettings,
)
from allocscope.allocator.ways import Way
from allocscope.model import BlockGroup, BlockMap, Pool, PrivatePool, Sample, SizeClass

__all__ = [
    "Headroom",
    "HeadroomBounds",
    "Way",
    "bounds_from_counters",
    "headroom",
    "headrooms",
    "main_stream",
    "would_succeed",
]


@dataclass(frozen=True, slots=True)
class Headroom:
    """The largest request that would succeed, of one pool and stream."""

    pool: Pool
    stream: int
    private_pool: PrivatePool | None
    request_bytes: int
    """0: none would."""
    way: Way


@dataclass(frozen=True, slots=True)
class HeadroomBounds:
    """What the largest request that would succeed lies between."""

    lower_bytes: int
    upper_bytes: int | None
    """None: not known."""


def would_succeed(
    request_bytes: int,
    block_map: BlockMap,
    settings: AllocatorSettings,
    *,
    device_free_bytes: int,
    allowed_bytes: int | None = None,
    device_total_bytes: int | None = None,
    stream: int = 0,
    private_pool: PrivatePool | None = None,
) -> Way:
    """The way in which a request would be served now; `allowed_bytes` is what a memory fraction lets the allocator reserve.

    Sizes in bytes. Exact for PyTorch 2.11 to 2.14 where nothing waits and no max_split_size is set; otherwise never better than
    what the allocator would do. `device_total_bytes` only matters to throw_on_cudamalloc_oom.
    """
    rounded = settings.round(request_bytes)
    pool = Pool.SMALL if rounded <= SMALL_MAX_BYTES else Pool.LARGE
    room = _Room(block_map.groups, settings, device_free_bytes, allowed_bytes, device_total_bytes)
    return _way(rounded, _Blocks(block_map.groups, pool, stream, private_pool, settings), room, settings)


def headroom(
    block_map: BlockMap,
    settings: AllocatorSettings,
    *,
    device_free_bytes: int,
    allowed_bytes: int | None = None,
    device_total_bytes: int | None = None,
    stream: int | None = None,
) -> Headroom:
    """The largest request that would succeed in the default large pool, of `stream` or of the stream that has most of it.

    Sizes in bytes. Exact, or a lower bound, for the versions of PyTorch and in the way that `would_succeed` is. Raises nothing.
    """
    if stream is None:
        stream = main_stream(block_map)
    room = _Room(block_map.groups, settings, device_free_bytes, allowed_bytes, device_total_bytes)
    return _largest(_Blocks(block_map.groups, Pool.LARGE, stream, None, settings), room, settings)


def headrooms(
    block_map: BlockMap,
    settings: AllocatorSettings,
    *,
    device_free_bytes: int,
    allowed_bytes: int | None = None,
    device_total_bytes: int | None = None,
) -> tuple[Headroom, ...]:
    """The same for each pool, stream and private pool of the map.

    Sizes in bytes; the versions are `would_succeed`'s. Raises nothing.
    """
    room = _Room(block_map.groups, settings, device_free_bytes, allowed_bytes, device_total_bytes)
    places = dict.fromkeys((group.pool, group.stream, group.private_pool) for group in block_map.groups)
    return tuple(_largest(_Blocks(block_map.groups, *place, settings), room, settings) for place in places)


def main_stream(block_map: BlockMap) -> int:
    """The stream that has most bytes of the default large pool, the lowest of equals; the default one (0) where that is empty.

    For every version of PyTorch that a map can be made of. Raises nothing.
    """
    reserved: dict[int, int] = {}
    for group in block_map.groups:
        if group.pool is Pool.LARGE and group.private_pool is None:
            reserved[group.stream] = reserved.get(group.stream, 0) + group.reserved_bytes
    return max(sorted(reserved), key=reserved.__getitem__, default=0)


def bounds_from_counters(
    sample: Sample, settings: AllocatorSettings, *, device_free_bytes: int | None, allowed_bytes: int | None = None
) -> HeadroomBounds:
    """Bounds of the default large pool's headroom between two maps.

    Lower: what the driver would give, with what a flush certainly adds (free segments, where there are no private pools and no
    expandable segments). Upper: as if all that is free inside, or waits, lay in one piece, and the larger of what that is by
    itself and what a flush and the driver would make of the releasable part.

    Bytes. By the rules of PyTorch 2.11 to 2.14; before 2.13 counters do not tell private pools, and no flush is counted on. Raises
    nothing: what is not known is None, or 0 below.
    """
    if device_free_bytes is None or sample.reserved_bytes is None:
        return HeadroomBounds(0, None)
    reserved = sample.reserved_bytes
    driver = max(device_free_bytes, 0)
    if allowed_bytes is not None:
        driver = max(min(driver, allowed_bytes - reserved), 0)
    if sample.active_bytes is None or sample.allocated_bytes is None:
        return HeadroomBounds(settings.floor(_largest_segment(driver)), driver + reserved)
    free = max(reserved - sample.active_bytes, 0)
    waiting = max(sample.active_bytes - sample.allocated_bytes, 0)
    split = sample.inactive_split_bytes
    if settings.expandable or split is None or sample.private_pools_reserved_bytes != 0:
        page = settings.page_bytes(small=False) if settings.expandable else ROUND_LARGE_BYTES
        return HeadroomBounds(settings.floor(_large_only(driver // page * page)), driver + free + waiting)
    releasable = max(free - split, 0)
    return HeadroomBounds(
        settings.floor(_largest_segment(driver + releasable)), max(split, driver + releasable) + waiting
    )


class _Room:
    """What the driver could give now, and after a flush of the cache."""

    def __init__(
        self,
        groups: Iterable[BlockGroup],
        settings: AllocatorSettings,
        device_free_bytes: int,
        allowed_bytes: int | None,
        device_total_bytes: int | None,
    ) -> None:
        reserved = sum(group.reserved_bytes for group in groups)
        self.free = max(device_free_bytes, 0)
        self.allowed = max(allowed_bytes - reserved, 0) if allowed_bytes is not None else None
        self.released = sum(group.releasable_bytes for group in groups if group.private_pool is None)
        self.accepted: int | None = None
        """The largest segment that throw_on_cudamalloc_oom does not refuse, where the memory fraction has not before."""
        if settings.throw_on_oom:
            total = reserved + self.free if device_total_bytes is None else device_total_bytes
            limit = int(settings.memory_fraction * total)
            if allowed_bytes is None or allowed_bytes > limit:
                self.accepted = max(limit - reserved, 0)

    def segment(self, after_release: bool) -> int:
        """The largest segment that cudaMalloc would give."""
        limit = self.free if self.allowed is None else min(self.free, self.allowed)
        return limit + (self.released if after_release else 0)

    def pages(self, after_release: bool) -> int:
        """How many bytes could be mapped."""
        return self.free + (self.released if after_release else 0)

    def accepts(self, segment_bytes: int) -> bool:
        """Whether throw_on_cudamalloc_oom lets it be tried at all; once refused nothing is given back for it."""
        return self.accepted is None or segment_bytes <= self.accepted

    def permits(self, segment_bytes: int, after_release: bool) -> bool:
        """Whether a memory fraction lets so much be reserved."""
        return self.allowed is None or segment_bytes <= self.allowed + (self.released if after_release else 0)

    def permitted(self, after_release: bool) -> int | None:
        """The largest segment that a memory fraction allows, and throw_on_cudamalloc_oom does not refuse."""
        allowed = None if self.allowed is None else self.allowed + (self.released if after_release else 0)
        return min((limit for limit in (allowed, self.accepted) if limit is not None), default=None)


class _Blocks:
    """The free blocks that requests of one pool and stream could take."""

    def __init__(
        self,
        groups: Iterable[BlockGroup],
        pool: Pool,
        stream: int,
        private_pool: PrivatePool | None,
        settings: AllocatorSettings,
    ) -> None:
        self.pool, self.stream, self.private_pool = pool, stream, private_pool
        own = [g for g in groups if (g.pool, g.stream, g.private_pool) == (pool, stream, private_pool)]
        usable = [g for g in own if settings.expandable or not g.expandable]
        self.classes = sorted(
            (c for g in usable for c in (*g.free_stranded, *g.free_releasable)), key=_largest_of_class
        )
        self.largest = self.classes[-1].largest_bytes if self.classes else 0
        # the free block at the mapped end can grow; with several mapped ranges another place may be chosen, and none is counted on
        growing = [g for g in own if g.expandable]
        whole = len(growing) == 1 and growing[0].segment_count == 1
        self.tail = (growing[0].tail_bytes or 0) if whole else 0
        self.tail_kept = (growing[0].tail_kept_bytes or 0) if whole else 0

    def fits(self, rounded: int, settings: AllocatorSettings) -> bool:
        """Whether the best fit exists and may be used; with a max_split_size, and in doubt which block of a class it is, no."""
        if rounded > self.largest:
            return False
        limit = settings.max_split_bytes
        if limit is None:
            return True
        largest = next(c for c in self.classes if c.largest_bytes >= rounded).largest_bytes
        if rounded < limit:
            return largest < limit
        return largest < rounded + settings.non_split_rounding_bytes


def _largest_of_class(size_class: SizeClass) -> int:
    return size_class.largest_bytes


def _way(rounded: int, blocks: _Blocks, room: _Room, settings: AllocatorSettings) -> Way:
    if blocks.fits(rounded, settings):
        return Way.CACHE
    segment = settings.segment_bytes(rounded)
    if not room.accepts(segment):
        return Way.NONE
    page = settings.page_bytes(small=blocks.pool is Pool.SMALL)
    for way, after_release, tail in ((Way.DEVICE, False, blocks.tail), (Way.AFTER_RELEASE, True, blocks.tail_kept)):
        if settings.expandable:
            mapped = -(-max(rounded - tail, 0) // page) * page
            if mapped <= room.pages(after_release) and room.permits(segment, after_release):
                return way
        elif segment <= room.segment(after_release):
            return way
    return Way.NONE


def _largest(blocks: _Blocks, room: _Room, settings: AllocatorSettings) -> Headroom:
    """The best of the three ways; of equal ones the first, as the allocator tries them."""
    candidates = [(_capped(blocks.largest, blocks.pool), Way.CACHE)]
    for way, after_release, tail in ((Way.DEVICE, False, blocks.tail), (Way.AFTER_RELEASE, True, blocks.tail_kept)):
        if settings.expandable:
            candidates.append((_largest_mapped(blocks.pool, room, settings, tail, after_release), way))
        else:
            segment, accepted = room.segment(after_release), room.accepted
            candidates.append(
                (_largest_from(blocks.pool, segment if accepted is None else min(segment, accepted)), way)
            )
    size, way = max(candidates, key=lambda candidate: settings.floor(candidate[0]))
    request = settings.floor(size)
    return Headroom(blocks.pool, blocks.stream, blocks.private_pool, request, way if request else Way.NONE)


def _capped(size: int, pool: Pool) -> int:
    return min(size, SMALL_MAX_BYTES) if pool is Pool.SMALL else size


def _largest_from(pool: Pool, segment_bytes: int) -> int:
    if pool is Pool.SMALL:
        return SMALL_MAX_BYTES if segment_bytes >= SMALL_SEGMENT_BYTES else 0
    return _largest_segment(segment_bytes)


def _largest_segment(driver_bytes: int) -> int:
    """The largest request that a segment of at most so much could serve."""
    return _large_only(driver_bytes // ROUND_LARGE_BYTES * ROUND_LARGE_BYTES)


def _large_only(size: int) -> int:
    """A smaller one needs a large segment, which is larger than MIN_LARGE_BYTES: there is no room for that either."""
    return size if size >= MIN_LARGE_BYTES else 0


def _largest_mapped(pool: Pool, room: _Room, settings: AllocatorSettings, tail: int, after_release: bool) -> int:
    page = settings.page_bytes(small=pool is Pool.SMALL)
    size = _capped(tail + room.pages(after_release) // page * page, pool)
    permitted = room.permitted(after_release)
    return size if permitted is None else min(size, _largest_from(pool, permitted))
