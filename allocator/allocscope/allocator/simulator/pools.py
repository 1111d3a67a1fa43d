"""Everybody's pools and private ones, and which of them a request goes to (ALLOCATOR.md 5)."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from allocscope.allocator.settings import MIN_BLOCK_BYTES, SMALL_MAX_BYTES, AllocatorSettings
from allocscope.allocator.simulator.blocks import Block, FreeSet, Pool, PoolId, PrivatePool
from allocscope.allocator.simulator.ledger import Ledger
from allocscope.allocator.simulator.rules import Rules
from allocscope.allocator.simulator.twins import Twins
from allocscope.allocator.snapshot import DEFAULT_POOL

LEAST_LARGE_REMAINDER = SMALL_MAX_BYTES + MIN_BLOCK_BYTES
"""More than 1 MiB, and blocks are multiples of 512 bytes."""
NEVER = 1 << 62


class Pools:
    """All pools of one allocator."""

    __slots__ = ("_ledger", "_rules", "_settings", "captures", "freeable", "large", "private", "routes", "small")

    def __init__(self, ledger: Ledger, rules: Rules, settings: AllocatorSettings) -> None:
        self._ledger, self._rules, self._settings = ledger, rules, settings
        self.small, self.large = Pool(ledger.small, small=True), Pool(ledger.large, small=False)
        self.private: dict[PoolId, PrivatePool] = {}
        self.freeable: dict[PoolId, PrivatePool] = {}
        """Private pools that nobody uses any more."""
        self.routes: list[tuple[PrivatePool, Collection[int] | None]] = []
        """Where requests go, the last begun first; None: of every stream."""
        self.captures = 0

    def create(self, pool_id: PoolId, *, no_split: bool = False, use_on_oom: bool = False) -> PrivatePool:
        """A private pool is made, or has one user more."""
        known = self.private.get(pool_id)
        if known is not None:
            known.use_count += 1
            self.freeable.pop(pool_id, None)
            return known
        small, large = self._ledger.small, self._ledger.large
        made = PrivatePool(pool_id, small, large, no_split=no_split, use_on_oom=use_on_oom)
        self.private[pool_id] = made
        return made

    def begin(self, pool_id: PoolId, streams: Collection[int] | None) -> None:
        """Requests go there from now on."""
        self.routes.append((self.create(pool_id), streams))
        if self._rules.pool_context_captures:
            self.captures += 1

    def end(self, pool_id: PoolId) -> None:
        """They do not any more."""
        at = max(i for i, (pool, _) in enumerate(self.routes) if pool.pool_id == pool_id)
        del self.routes[at]
        if self._rules.pool_context_captures:
            self.captures -= 1

    def release(self, pool_id: PoolId) -> None:
        """One user less."""
        pool = self.private[pool_id]
        pool.use_count -= 1
        if pool.use_count == 0:
            self.freeable[pool_id] = pool

    def drop(self, pool_id: PoolId) -> None:
        """The pool is no more."""
        del self.private[pool_id], self.freeable[pool_id]

    def routed(self, pool: Pool, stream: int) -> Pool:
        """The pool that a request for one of everybody's goes to."""
        for private, streams in reversed(self.routes):
            if streams is None or stream in streams:
                return private.small if pool.small else private.large
        return pool

    def pool(self, pool_id: PoolId, *, small: bool) -> Pool:
        """A pool by its id; a private one is made if there is none."""
        if pool_id == DEFAULT_POOL:
            return self.small if small else self.large
        private = self.private.get(pool_id) or self.create(pool_id)
        return private.small if small else private.large

    def free_set(self, pool: Pool, stream: int) -> FreeSet:
        """The pool's free blocks of a stream."""
        found = pool.free_sets.get(stream)
        if found is None:
            found = pool.free_sets[stream] = FreeSet(pool, stream, self._least_remainder(pool))
        return found

    def settle(self, settings: AllocatorSettings) -> None:
        """From now on blocks are split by these settings."""
        self._settings = settings
        for pool in self.all():
            for free_set in pool.free_sets.values():
                free_set.least_remainder = self._least_remainder(pool)

    def _least_remainder(self, pool: Pool) -> int:
        if pool.owner is not None and pool.owner.no_split:
            return NEVER
        return MIN_BLOCK_BYTES if pool.small or self._settings.expandable else LEAST_LARGE_REMAINDER

    def all(self) -> Iterator[Pool]:
        """Each, everybody's first."""
        yield self.large
        yield self.small
        yield from self.all_private()

    def all_private(self) -> Iterator[Pool]:
        """Each private one."""
        for private in self.private.values():
            yield private.small
            yield private.large

    def blocks(self) -> Iterator[Block]:
        """All that are free, and addresses without memory."""
        for pool in self.all():
            for free_set in pool.free_sets.values():
                yield from free_set.ascending()
                yield from free_set.unmapped

    def copy(self, ledger: Ledger, twins: Twins) -> Pools:
        """The same, to go on apart; their blocks come when the twins are tied."""
        other = Pools(ledger, self._rules, self._settings)
        other.small, other.large = twins.pool(self.small), twins.pool(self.large)
        other.private = private = twins.private(self.private)
        other.freeable = {pool_id: private[pool_id] for pool_id in self.freeable}
        other.routes = [(private[pool.pool_id], streams) for pool, streams in self.routes]
        other.captures = self.captures
        return other
