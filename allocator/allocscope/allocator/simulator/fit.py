"""Which free block a request is given (ALLOCATOR.md 2.3)."""

from __future__ import annotations

from allocscope.allocator.settings import AllocatorSettings
from allocscope.allocator.simulator.blocks import UNMAPPED, Block, FreeSet


def best_fit(free_set: FreeSet, size: int, settings: AllocatorSettings) -> Block | None:
    """The block for a rounded request, still in its set; None: there is none, or max_split_size forbids it."""
    block = _first(free_set, size, expandable=settings.expandable)
    limit = settings.max_split_bytes
    if block is None or limit is None:
        return block
    if size < limit:
        return block if block.size < limit else None
    return block if block.size < size + settings.non_split_rounding_bytes else None


def _first(free_set: FreeSet, size: int, *, expandable: bool) -> Block | None:
    """The smallest that is large enough; but rather one that does not touch addresses into which it could grow."""
    candidates = free_set.ascending(size)
    block = next(candidates, None)
    if block is None or not block.segment.expandable:
        return block
    if not expandable:
        return next((each for each in candidates if not each.segment.expandable), None)
    reach = _reach(block)
    while reach > block.size:
        following = next(candidates, None)
        if following is None or _reach(following) >= reach:
            break
        block, reach = following, _reach(following)
        if not block.segment.expandable:
            break
    return block


def _reach(block: Block) -> int:
    """What a block could come to with the addresses behind it."""
    following = block.next
    return block.size + (following.size if following is not None and following.state == UNMAPPED else 0)
