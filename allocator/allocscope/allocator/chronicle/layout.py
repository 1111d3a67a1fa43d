"""Which block lies where: no two overlap, and those beside each other are found at once."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from typing import NamedTuple

from allocscope.allocator.chronicle.events import Pool
from allocscope.allocator.simulator.blocks import FREE


class Span:
    """A segment; of expandable ones, all that a pool has for a stream."""

    __slots__ = ("expandable", "least_rest", "pool", "size")

    def __init__(self, pool: Pool, size: int, *, expandable: bool, least_rest: int) -> None:
        self.pool, self.expandable = pool, expandable
        self.size = -1 if expandable else size
        """What a block that is all of it has; no block is all of the expandable ones."""
        self.least_rest = least_rest
        """From how much left over a block is split."""


class Block:
    """A run of bytes in one state."""

    __slots__ = ("address", "entry", "guessed", "requested", "since_us", "size", "span", "state")

    def __init__(self, address: int, size: int, span: Span, entry: int) -> None:
        self.address, self.size, self.span = address, size, span
        self.requested, self.state = 0, FREE
        self.entry = entry
        """Which made it so; -1: it was there before."""
        self.guessed = False
        """Whether it was there before, and may have slack."""
        self.since_us = 0
        """Waiting: since when."""

    @property
    def end(self) -> int:
        """The address behind it."""
        return self.address + self.size


class Joined(NamedTuple):
    """What a block that became free was joined with."""

    address: int
    size: int
    before_bytes: int
    behind_bytes: int


class Layout:
    """The blocks of one device."""

    def __init__(self) -> None:
        self.blocks: dict[int, Block] = {}
        """By address."""
        self._by_end: dict[int, Block] = {}
        self._segments: list[int] = []
        """Addresses of those that are not expandable, sorted."""
        self._order: list[int] | None = None
        """Addresses of all blocks, sorted; None: nobody has asked yet, so that they need not be kept up."""

    def put(self, block: Block) -> None:
        """A block where nothing is."""
        self.blocks[block.address] = block
        self._by_end[block.address + block.size] = block
        if self._order is not None:
            insort(self._order, block.address)

    def put_segment(self, block: Block) -> None:
        """A new segment, whole."""
        insort(self._segments, block.address)
        self.put(block)

    def take(self, block: Block) -> None:
        """A block is there no more."""
        del self.blocks[block.address]
        del self._by_end[block.address + block.size]
        if self._order is not None:
            del self._order[bisect_left(self._order, block.address)]

    def take_segment(self, block: Block) -> None:
        """A segment is there no more."""
        del self._segments[bisect_left(self._segments, block.address)]
        self.take(block)

    def cut(self, block: Block, size: int, entry: int) -> Block:
        """Cut a block in two after so many bytes: the second, free."""
        second = Block(block.address + size, block.size - size, block.span, entry)
        block.size = size
        self.put(second)
        self._by_end[second.address] = block
        return second

    def grow_over(self, hole: Block) -> None:
        """Give a free block to the one before it."""
        owner = self._by_end.pop(hole.address)
        self.take(hole)
        owner.size += hole.size
        self._by_end[owner.end] = owner

    def before(self, block: Block) -> Block | None:
        """The block that ends where this one begins."""
        return self._by_end.get(block.address)

    def join(self, block: Block) -> Joined | None:
        """Let a free block absorb its free neighbours."""
        before_bytes = behind_bytes = 0
        span, end = block.span, block.address + block.size
        behind = self.blocks.get(end)
        if behind is not None and behind.state == FREE and behind.span is span:
            self.take(behind)
            behind_bytes = behind.size
            del self._by_end[end]
            block.size += behind_bytes
            self._by_end[end + behind_bytes] = block
        before = self._by_end.get(block.address)
        if before is not None and before.state == FREE and before.span is span:
            self.take(block)
            before_bytes = before.size
            del self._by_end[block.address]
            before.size += block.size
            before.entry = block.entry
            self._by_end[before.address + before.size] = block = before
        if before_bytes or behind_bytes:
            return Joined(block.address, block.size, before_bytes, behind_bytes)
        return None

    # by place

    def keep_order(self) -> list[int]:
        """Addresses of all blocks, sorted, from now on kept up."""
        if self._order is None:
            self._order = sorted(self.blocks)
        return self._order

    def is_empty(self, address: int, size: int) -> bool:
        """Whether nothing is there."""
        if self._order is not None:
            return not self.touching(address, size)
        at = bisect_right(self._segments, address)
        if at < len(self._segments) and self._segments[at] < address + size:
            return False
        if not at:
            return True
        before = self._segments[at - 1]
        return before + self.blocks[before].span.size <= address

    def touching(self, address: int, size: int) -> list[Block]:
        """The blocks that have bytes there, by address."""
        order = self.keep_order()
        at = bisect_right(order, address) - 1
        if at < 0 or self.blocks[order[at]].end <= address:
            at += 1
        return [self.blocks[start] for start in order[at : bisect_left(order, address + size)]]

    def clear(self, address: int, size: int, entry: int) -> None:
        """Nothing is there any more; what lies partly there keeps the rest."""
        end = address + size
        for block in self.touching(address, size):
            if block.end > end:
                tail = self.cut(block, end - block.address, entry)
                tail.state, tail.requested = block.state, block.requested
            if block.address < address:
                self.take(self.cut(block, address - block.address, entry))
            else:
                self.take(block)
        del self._segments[bisect_left(self._segments, address) : bisect_left(self._segments, end)]
