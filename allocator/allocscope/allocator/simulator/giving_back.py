"""Which segments the allocator gives back by itself before, or instead of, flushing all (ALLOCATOR.md 2.5, 2.7)."""

from __future__ import annotations

from allocscope.allocator.errors import UndefinedStateError
from allocscope.allocator.simulator.blocks import Block, FreeSet, Pool
from allocscope.allocator.simulator.driver import Driver


def collect_garbage(driver: Driver, pool: Pool, target_bytes: int) -> None:
    """Whole free segments older than the average, until so much is reclaimed; a pass is not stopped in the middle."""
    searches = pool.searches
    whole = [block for block in pool.in_order() if block.prev is None and block.next is None]
    ages, count = sum(searches - block.gc_base for block in whole), len(whole)
    whole = [block for block in whole if not block.segment.expandable]
    reclaimed, freed = 0, True
    while reclaimed < target_bytes and freed and count > 0:
        limit, freed, kept = ages / count, False, []
        for block in whole:
            age = searches - block.gc_base
            if age < limit:
                kept.append(block)
                continue
            freed = True
            reclaimed += block.size
            ages -= age
            count -= 1
            driver.release(block)
        whole = kept


def release_oversize(driver: Driver, free_set: FreeSet, size: int, limit: int) -> bool:
    """One block that would be large enough, or the largest ones from `limit` on until they come to it; whether they do.

    UndefinedStateError: one of them is a piece of a segment, which PyTorch would free as if it were whole.
    """
    wanted = max(size, limit)
    large_enough = next(free_set.ascending(wanted), None)
    if large_enough is not None and not large_enough.segment.expandable:
        _release_whole(driver, large_enough)
        return True
    released = 0
    for block in list(free_set.descending(wanted)):
        if released >= wanted or block.size < limit:
            break
        if not block.segment.expandable:
            _release_whole(driver, block)
            released += block.size
    return released >= wanted


def _release_whole(driver: Driver, block: Block) -> None:
    """Blocks from max_split_size on are never split, unless it was larger then, or is less than a large segment."""
    if block.prev is not None or block.next is not None:
        raise UndefinedStateError(
            f"a free block of {block.size} bytes, from max_split_size on, is part of a segment, and PyTorch frees it as a"
            " whole one (max_split_size_mb was lowered at run time, or is below large_segment_size_mb)"
        )
    driver.release(block)
