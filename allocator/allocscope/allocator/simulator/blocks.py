"""Blocks, segments, and the free blocks of a pool in the order in which the allocator looks through them."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from operator import attrgetter

from allocscope.allocator.simulator.tallies import Tally

FREE, LIVE, AWAITING, UNMAPPED = 0, 1, 2, 3
"""A block's state: in the free set; handed out; freed, and waiting for other streams; addresses without memory."""
STATES = ("inactive", "active_allocated", "active_pending_free")

PoolId = tuple[int, int]


class Block:
    """A run of bytes of a segment in one state. `state`, `prev` and `next` are only kept up by the simulator."""

    __slots__ = ("address", "counter", "gc_base", "next", "prev", "requested", "segment", "size", "state")

    segment: Segment
    address: int
    size: int
    requested: int
    """As asked for; of a free block what its last user asked for, as PyTorch leaves it."""
    state: int
    prev: Block | None
    next: Block | None
    counter: int
    """Decides, before the address, between equal free blocks: the segment's (2.13 on), the block's own (2.12), or 0."""
    gc_base: int
    """The pool's searches when it became free."""


class Segment:
    """Memory got from the driver in one piece, or the addresses reserved for an expandable segment."""

    __slots__ = ("address", "expandable", "free_set", "page", "size")

    def __init__(self, address: int, size: int, free_set: FreeSet, *, page: int = 0) -> None:
        self.address, self.size, self.free_set = address, size, free_set
        self.expandable, self.page = page > 0, page
        """Bytes of a page of an expandable one, from its address on."""


_turn = attrgetter("counter", "address")
_address = attrgetter("address")


class FreeSet:
    """The free blocks of one pool that serve one stream: by size, then by counter and address."""

    __slots__ = ("by_size", "least_remainder", "pool", "sizes", "stream", "tally", "unmapped")

    def __init__(self, pool: Pool, stream: int, least_remainder: int) -> None:
        self.pool, self.stream, self.tally = pool, stream, pool.tally
        self.least_remainder = least_remainder
        """From how much left over a block is split."""
        self.sizes: list[int] = []
        """Sizes that occur, ascending."""
        self.by_size: dict[int, list[Block]] = {}
        """Blocks of each, in their order."""
        self.unmapped: list[Block] = []
        """Addresses without memory of expandable segments, ascending."""

    def add(self, block: Block) -> None:
        """A block has become free."""
        block.state = FREE
        block.gc_base = self.pool.searches
        size = block.size
        equals = self.by_size.get(size)
        if equals is None:
            self.by_size[size] = [block]
            insort(self.sizes, size)
        else:
            insort(equals, block, key=_turn)

    def remove(self, block: Block) -> None:
        """A block is no longer free."""
        size = block.size
        equals = self.by_size[size]
        if len(equals) == 1:
            del self.by_size[size]
            del self.sizes[bisect_left(self.sizes, size)]
        else:
            del equals[bisect_left(equals, _turn(block), key=_turn)]

    def ascending(self, size: int = 0) -> Iterator[Block]:
        """Blocks from that size on, in their order."""
        for at in range(bisect_left(self.sizes, size), len(self.sizes)):
            yield from self.by_size[self.sizes[at]]

    def descending(self, size: int) -> Iterator[Block]:
        """Blocks below that size, in reverse order."""
        for at in range(bisect_left(self.sizes, size) - 1, -1, -1):
            yield from reversed(self.by_size[self.sizes[at]])

    def add_unmapped(self, block: Block) -> None:
        """Addresses have no memory any more, or not yet."""
        block.state = UNMAPPED
        insort(self.unmapped, block, key=_address)

    def remove_unmapped(self, block: Block) -> None:
        """They have."""
        del self.unmapped[bisect_left(self.unmapped, block.address, key=_address)]


class Pool:
    """The small or the large pool, of everybody or of a private pool."""

    __slots__ = ("free_sets", "owner", "searches", "small", "tally")

    def __init__(self, tally: Tally, *, small: bool, owner: PrivatePool | None = None) -> None:
        self.tally, self.small, self.owner = tally, small, owner
        self.free_sets: dict[int, FreeSet] = {}
        """By stream."""
        self.searches = 0
        """How often a free block was looked for while garbage collection was armed; the clock of blocks' ages."""

    def in_order(self) -> list[Block]:
        """All free blocks, by stream and then in their order."""
        return [block for stream in sorted(self.free_sets) for block in self.free_sets[stream].ascending()]


class PrivatePool:
    """Memory apart, of a MemPool or of CUDA graphs."""

    __slots__ = ("large", "no_split", "pool_id", "segment_count", "small", "use_count", "use_on_oom")

    def __init__(
        self, pool_id: PoolId, small: Tally, large: Tally, *, no_split: bool = False, use_on_oom: bool = False
    ) -> None:
        self.pool_id, self.no_split, self.use_on_oom = pool_id, no_split, use_on_oom
        self.small, self.large = Pool(small, small=True, owner=self), Pool(large, small=False, owner=self)
        self.use_count = 1
        self.segment_count = 0
        """As PyTorch counts: one up a segment or grown request, one down a segment freed or range unmapped."""
