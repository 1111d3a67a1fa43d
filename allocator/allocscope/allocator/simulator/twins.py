"""Copies of pools, segments and blocks, and of the ties between them."""

from __future__ import annotations

from collections.abc import Iterable

from allocscope.allocator.simulator.blocks import FREE, Block, FreeSet, Pool, PoolId, PrivatePool, Segment
from allocscope.allocator.simulator.ledger import Ledger


class Twins:
    """The twin of each; whoever asks twice gets the same."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._free_sets: dict[FreeSet, FreeSet] = {}
        self._blocks: dict[Block, Block] = {}

    def pool(self, pool: Pool, owner: PrivatePool | None = None) -> Pool:
        """A pool with its free sets, still empty."""
        tally = self._ledger.small if pool.small else self._ledger.large
        twin = Pool(tally, small=pool.small, owner=owner)
        twin.searches = pool.searches
        for stream, free_set in pool.free_sets.items():
            other = twin.free_sets[stream] = FreeSet(twin, stream, free_set.least_remainder)
            self._free_sets[free_set] = other
        return twin

    def private(self, pools: dict[PoolId, PrivatePool]) -> dict[PoolId, PrivatePool]:
        """Private pools likewise."""
        twins = {}
        for pool_id, pool in pools.items():
            twin = twins[pool_id] = PrivatePool(
                pool_id, self._ledger.small, self._ledger.large, no_split=pool.no_split, use_on_oom=pool.use_on_oom
            )
            twin.use_count, twin.segment_count = pool.use_count, pool.segment_count
            twin.small, twin.large = self.pool(pool.small, twin), self.pool(pool.large, twin)
        return twins

    def tie(self, blocks: Iterable[Block]) -> None:
        """Make the twins of all blocks, and put the free ones into their sets."""
        segments: dict[Segment, Segment] = {}
        twins = self._blocks
        for block in blocks:
            segment = block.segment
            other = segments.get(segment)
            if other is None:
                free_set = self._free_sets[segment.free_set]
                other = segments[segment] = Segment(segment.address, segment.size, free_set, page=segment.page)
            twins[block] = twin = Block()
            twin.segment, twin.address, twin.size = other, block.address, block.size
            twin.requested, twin.state, twin.counter = block.requested, block.state, block.counter
            twin.gc_base = block.gc_base if block.state == FREE else 0
        for block, twin in twins.items():
            twin.prev = None if block.prev is None else twins[block.prev]
            twin.next = None if block.next is None else twins[block.next]
        for free_set, other_set in self._free_sets.items():
            other_set.sizes = free_set.sizes.copy()
            other_set.by_size = {size: [twins[b] for b in equals] for size, equals in free_set.by_size.items()}
            other_set.unmapped = [twins[block] for block in free_set.unmapped]

    def __getitem__(self, block: Block) -> Block:
        """The twin of a block that was tied."""
        return self._blocks[block]
