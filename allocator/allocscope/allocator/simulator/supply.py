"""Memory for requests that no free block serves, and what is given back for it (ALLOCATOR.md 2.4 to 2.8)."""

from __future__ import annotations

from allocscope.allocator.errors import OutOfMemoryError, UndefinedStateError
from allocscope.allocator.settings import AllocatorSettings
from allocscope.allocator.simulator import oom_text
from allocscope.allocator.simulator.blocks import Block, FreeSet, PoolId, PrivatePool
from allocscope.allocator.simulator.device import Device
from allocscope.allocator.simulator.driver import Driver
from allocscope.allocator.simulator.fit import best_fit
from allocscope.allocator.simulator.giving_back import collect_garbage, release_oversize
from allocscope.allocator.simulator.ledger import Ledger, pool_id_of
from allocscope.allocator.simulator.pools import Pools
from allocscope.allocator.simulator.waiting import Waiting
from allocscope.allocator.ways import Way

MOST_BYTES = 1 << 60


class Supply:
    """All that the allocator tries, in its order."""

    __slots__ = (
        "_device",
        "_driver",
        "_ledger",
        "_pools",
        "_waiting",
        "allowed",
        "collecting",
        "device_index",
        "settings",
        "way",
    )

    def __init__(
        self,
        device: Device,
        driver: Driver,
        ledger: Ledger,
        pools: Pools,
        waiting: Waiting,
        settings: AllocatorSettings,
        device_index: int,
    ) -> None:
        self._device, self._driver, self._ledger, self._pools, self._waiting = device, driver, ledger, pools, waiting
        self.device_index = device_index
        self.way = Way.CACHE
        """How the last request came to its memory."""
        self.settle(settings, None)

    def settle(self, settings: AllocatorSettings, allowed: int | None) -> None:
        """From now on by these settings, and with so much allowed to be reserved."""
        self.settings, self.allowed = settings, allowed
        self.collecting = settings.gc_threshold > 0 and allowed is not None

    def find(self, free_set: FreeSet, size: int) -> Block | None:
        """The best fit, out of its set."""
        if self.collecting:
            free_set.pool.searches += 1
        block = best_fit(free_set, size, self.settings)
        if block is not None:
            free_set.remove(block)
        return block

    def get(self, free_set: FreeSet, size: int, request_bytes: int) -> tuple[FreeSet, Block]:
        """A block of new memory that is in no set, and the set that it is of; OutOfMemoryError."""
        if size >= MOST_BYTES:
            text = f"CUDA out of memory. Tried to allocate more than 1EB memory. Requested size: {size}"
            raise OutOfMemoryError(text, requested_bytes=request_bytes, segment_bytes=size)
        if self.collecting:
            threshold = int(self.settings.gc_threshold * (self.allowed or 0))
            collect_garbage(self._driver, self._pools.large, self._reserved() - threshold)
        segment_bytes = self.settings.segment_bytes(size)
        self.way = Way.DEVICE
        block = self._from_driver(free_set, size, segment_bytes, request_bytes)
        if block is not None:
            return free_set, block
        if (found := self._from_overflow_pools(free_set, size)) is not None:
            self.way = Way.CACHE
            return found
        self.way = Way.AFTER_RELEASE
        limit = self.settings.max_split_bytes
        if limit is not None and release_oversize(self._driver, free_set, size, limit):
            block = self._from_driver(free_set, size, segment_bytes, request_bytes)
        if block is None and not self._pools.captures:
            self.release_cached()
            self._ledger.num_alloc_retries += 1
            block = self._from_driver(free_set, size, segment_bytes, request_bytes)
        if block is None:
            raise self._out_of_memory(free_set, size, segment_bytes, request_bytes)
        return free_set, block

    def _reserved(self) -> int:
        return self._ledger.reserved.current

    def _from_driver(self, free_set: FreeSet, size: int, segment_bytes: int, request_bytes: int) -> Block | None:
        """If a memory fraction allows, and throw_on_cudamalloc_oom does not refuse."""
        settings, wanted = self.settings, self._reserved() + segment_bytes
        if self.allowed is not None and wanted > self.allowed:
            return None
        if settings.throw_on_oom and wanted > settings.memory_fraction * self._device.total_bytes:
            self._ledger.num_oom_rejections += 1
            text = oom_text.rejected(request_bytes)
            raise OutOfMemoryError(text, requested_bytes=request_bytes, segment_bytes=segment_bytes, rejected=True)
        if settings.expandable:
            return self._driver.grow(free_set, size)
        return self._driver.get_segment(free_set, segment_bytes)

    def _from_overflow_pools(self, free_set: FreeSet, size: int) -> tuple[FreeSet, Block] | None:
        """From a MemPool(use_on_oom=True), unless the request is routed to a private pool already."""
        if free_set.pool.owner is not None:
            return None
        for private in self._pools.private.values():
            if private.use_on_oom:
                pool = private.small if free_set.pool.small else private.large
                overflow = self._pools.free_set(pool, free_set.stream)
                block = self.find(overflow, size)
                if block is not None:
                    return overflow, block
        return None

    def release_cached(self, pool_id: PoolId | None = None) -> None:
        """Give back all that is whole and free; of one private pool only, where one is given."""
        pools, driver = self._pools, self._driver
        if pool_id is None and not pools.captures:
            self._waiting.finish_all()
            driver.release_all(pools.large)
            driver.release_all(pools.small)
        for private in list(pools.freeable.values()):
            if pool_id is not None:
                if private.pool_id != pool_id:
                    continue
                self._waiting.finish_all(private)
            driver.release_all(private.small)
            driver.release_all(private.large)
            if private.segment_count == 0:
                self._drop(private)

    def _drop(self, private: PrivatePool) -> None:
        """A private pool that PyTorch takes for empty goes."""
        if self._ledger.reserved_in(private.pool_id):
            raise UndefinedStateError(
                f"private pool {private.pool_id} counts no segment any more, and has memory: PyTorch frees it under its"
                " blocks (expandable segments with a private pool)"
            )
        self._pools.drop(private.pool_id)

    def _out_of_memory(self, free_set: FreeSet, size: int, segment_bytes: int, request_bytes: int) -> OutOfMemoryError:
        device, ledger = self._device, self._ledger
        free, outside = device.free_bytes, device.outside_bytes
        ledger.note_oom(free, size, free_set.stream, pool_id_of(free_set.pool.owner))
        shortage = oom_text.Shortage(
            device_index=self.device_index,
            segment_bytes=segment_bytes,
            total_bytes=device.total_bytes,
            free_bytes=free,
            process_bytes=None if outside is None else device.used_bytes + outside,
            allowed_bytes=self.allowed,
            allocated_bytes=ledger.bytes,
            reserved_bytes=ledger.reserved.current,
            private_free_bytes=sum(b.size for pool in self._pools.all_private() for b in pool.in_order()),
        )
        hint = ledger.rules.hints_when_expandable or not self.settings.expandable
        text = oom_text.out_of_memory(shortage, hint=hint, documentation=ledger.rules.documentation)
        return OutOfMemoryError(text, requested_bytes=request_bytes, segment_bytes=segment_bytes)

    def copy(self, device: Device, driver: Driver, ledger: Ledger, pools: Pools, waiting: Waiting) -> Supply:
        """The same, to go on apart."""
        other = Supply(device, driver, ledger, pools, waiting, self.settings, self.device_index)
        other.settle(self.settings, self.allowed)
        return other
