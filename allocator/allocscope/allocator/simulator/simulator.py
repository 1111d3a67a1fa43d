"""The caching allocator itself: what is done with each request (ALLOCATOR.md 2, 3, 5)."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Any

from allocscope.allocator.errors import OutOfMemoryError, UndefinedStateError
from allocscope.allocator.settings import SMALL_MAX_BYTES, AllocatorSettings
from allocscope.allocator.simulator import oom_text
from allocscope.allocator.simulator.blocks import (
    AWAITING,
    FREE,
    LIVE,
    STATES,
    UNMAPPED,
    Block,
    FreeSet,
    Pool,
    PoolId,
    PrivatePool,
    Segment,
)
from allocscope.allocator.simulator.device import Device
from allocscope.allocator.simulator.driver import Driver, no_limit
from allocscope.allocator.simulator.ledger import Ledger, pool_id_of
from allocscope.allocator.simulator.rules import NEWEST, Order, rules_of
from allocscope.allocator.simulator.twins import Twins
from allocscope.allocator.snapshot import DEFAULT_POOL, TraceEntry
from allocscope.allocator.ways import Way

LEAST_SMALL_REMAINDER = 512
LEAST_LARGE_REMAINDER = SMALL_MAX_BYTES + 512
"""More than 1 MiB, and blocks are multiples of 512 bytes."""
NEVER = 1 << 62
MOST_BYTES = 1 << 60

_turn = attrgetter("counter", "address")
_address = attrgetter("address")


_VALUES = (
    "_allowed",
    "_capturing",
    "_caught_up",
    "_clock",
    "_collecting",
    "_expandable",
    "_limit",
    "_order_is_block",
    "_picky",
    "_plain",
    "_rules",
    "_way",
    "device_index",
    "events_ready",
    "settings",
    "version",
)
"""What a copy of a simulator takes over as it is."""


Piece = tuple[int, int, int]
"""A block's size, what it was asked for, and its state (FREE, LIVE, AWAITING, UNMAPPED)."""
UNKNOWN_STREAM = -1
"""Whom an adopted block waits for; nobody says that it is ready."""


class Simulator:
    """One allocator: one process on one device."""

    __slots__ = (
        *_VALUES,
        "_awaiting",
        "_deferred",
        "_driver",
        "_events",
        "_freeable",
        "_large",
        "_ledger",
        "_live",
        "_private",
        "_routes",
        "_small",
        "_spare",
        "_uses",
        "device",
    )

    _allowed: int | None
    _collecting: bool
    _expandable: bool
    _limit: int
    _picky: bool
    _plain: bool

    def __init__(
        self,
        settings: AllocatorSettings,
        device: Device,
        *,
        version: str = NEWEST,
        memory_fraction: float | None = None,
        trace: bool = False,
        device_index: int = 0,
    ) -> None:
        """`memory_fraction` is what set_per_process_memory_fraction was called with; None: the settings' own."""
        self.settings, self.device, self.version, self.device_index = settings, device, version, device_index
        self._rules = rules_of(version)
        self._order_is_block = self._rules.order is Order.BLOCK
        limit = settings.max_split_bytes
        self._ledger = Ledger(self._rules, max_split_size=-1 if limit is None else limit, trace=trace)
        self._driver = Driver(device, self._ledger, settings)
        self._small, self._large = Pool(self._ledger.small, small=True), Pool(self._ledger.large, small=False)
        self._private: dict[PoolId, PrivatePool] = {}
        self._freeable: dict[PoolId, PrivatePool] = {}
        self._routes: list[tuple[PrivatePool, Collection[int] | None]] = []
        self._capturing = 0
        self._live: dict[int, Block] = {}
        self._uses: dict[int, dict[int, None]] = {}
        self._awaiting: dict[int, int] = {}
        self._events: dict[int, deque[tuple[int, Block]]] = {}
        self._deferred: list[tuple[Block, tuple[int, ...]]] = []
        self._clock = self._caught_up = 0
        self._spare: list[Block] = []
        self.events_ready = False
        """Whether an event is finished as soon as it is asked about; otherwise only after `catch_up`."""
        self._way = Way.CACHE
        self.set_memory_fraction(settings.memory_fraction if memory_fraction is None else memory_fraction)

    # what a program asks for

    def malloc(self, request_bytes: int, stream: int = 0) -> int:
        """Allocate so many bytes; gives the address, 0 for a request of 0 bytes; raises OutOfMemoryError."""
        if self._events or self._deferred:
            self.reap()
        size = (request_bytes + 511) & -512 if self._plain else self.settings.round(request_bytes)
        if request_bytes <= 0:
            return 0
        pool = self._small if size <= SMALL_MAX_BYTES else self._large
        if self._routes:
            pool = self._routed(pool, stream)
        free_set = pool.free_sets.get(stream)
        if free_set is None:
            free_set = self._new_free_set(pool, stream)
        sizes = free_set.sizes
        index = bisect_left(sizes, size)
        if index == len(sizes) or self._picky:
            return self._malloc_slowly(free_set, size, request_bytes)
        found = sizes[index]
        if found >= self._limit:
            return self._malloc_slowly(free_set, size, request_bytes)
        by_size = free_set.by_size
        equals = by_size[found]
        block = equals[0]
        segment, following = block.segment, block.next
        if following is not None and following.state == UNMAPPED:
            return self._malloc_slowly(free_set, size, request_bytes)
        if self._collecting:
            pool.searches += 1
        # out of the free set
        if len(equals) > 1:
            del equals[0]
            equals = [block]
        else:
            del by_size[found], sizes[index]
        address = block.address
        tally, ledger = free_set.tally, self._ledger
        rest = found - size
        if rest >= free_set.least_remainder:
            # the front is a new block; the rest keeps its identity, and goes back
            prev = block.prev
            front = self._spare.pop() if self._spare else Block()
            front.address, front.size, front.segment = address, size, segment
            front.prev, front.next = prev, block
            front.counter = self._driver.next_number() if self._order_is_block else block.counter
            if prev is not None:
                prev.next = front
            block.prev, block.address, block.size = front, address + size, rest
            others = by_size.get(rest)
            if others is None:
                by_size[rest] = equals
                insort(sizes, rest, 0, index)
            else:
                insort(others, block, key=_turn)
            if not segment.expandable:
                if prev is not None or following is not None:
                    tally.split_bytes -= size
                    ledger.split_bytes -= size
                else:
                    ledger.change_split(tally, 1, rest)
            block = front
        else:
            size = found
            if (following is not None or block.prev is not None) and not segment.expandable:
                tally.split_count -= 1
                ledger.split_count -= 1
                tally.split_bytes -= size
                ledger.split_bytes -= size
        block.state, block.requested = LIVE, request_bytes
        self._live[address] = block
        # the books
        tally.count_in = amount = tally.count_in + 1
        amount -= tally.count_out
        if amount > tally.count_peak:
            tally.count_peak = amount
        ledger.count = amount = ledger.count + 1
        if amount > ledger.count_peak:
            ledger.count_peak = amount
        tally.bytes_in = amount = tally.bytes_in + size
        amount -= tally.bytes_out
        if amount > tally.bytes_peak:
            tally.bytes_peak = amount
        ledger.bytes = amount = ledger.bytes + size
        if amount > ledger.bytes_peak:
            ledger.bytes_peak = amount
        tally.requested_in = amount = tally.requested_in + request_bytes
        amount -= tally.requested_out
        if amount > tally.requested_peak:
            tally.requested_peak = amount
        ledger.requested = amount = ledger.requested + request_bytes
        if amount > ledger.requested_peak:
            ledger.requested_peak = amount
        if ledger.waiting_count:
            ledger.mark_active(tally)
        if ledger.trace is not None:
            ledger.note("alloc", address, request_bytes, stream, pool_id_of(pool.owner))
        return address

    def free(self, address: int) -> None:
        """Free what `malloc` gave; nothing for 0. KeyError: there is no such allocation."""
        if not address:
            return
        block = self._live.pop(address)
        free_set = block.segment.free_set
        tally, ledger, size = free_set.tally, self._ledger, block.size
        tally.count_out += 1
        tally.bytes_out += size
        ledger.count -= 1
        ledger.bytes -= size
        if ledger.trace is not None:
            ledger.note("free_requested", address, block.requested, free_set.stream, pool_id_of(free_set.pool.owner))
        if size >= self._limit:
            ledger.oversize_allocations.take(1)
        if self._uses and address in self._uses:
            self._wait(block)
        else:
            self._complete(block)

    def _complete(self, block: Block) -> None:
        """A block is free: nobody waits for it any more."""
        segment, size, requested = block.segment, block.size, block.requested
        free_set = segment.free_set
        tally, ledger = free_set.tally, self._ledger
        if ledger.trace is not None:
            ledger.note("free_completed", block.address, requested, free_set.stream, pool_id_of(free_set.pool.owner))
        tally.requested_out += requested
        ledger.requested -= requested
        sizes, by_size = free_set.sizes, free_set.by_size
        count, absorbed, lowest = 0, 0, 0
        prev, following = block.prev, block.next
        if prev is not None and prev.state == FREE:
            other = prev.size
            equals = by_size[other]
            lowest = bisect_left(sizes, other)
            if len(equals) == 1:
                del by_size[other], sizes[lowest]
            else:
                del equals[bisect_left(equals, _turn(prev), key=_turn)]
            self._spare.append(prev)
            block.address = prev.address
            size += other
            block.prev = prev = prev.prev
            if prev is not None:
                prev.next = block
            count, absorbed = -1, -other
        if following is not None and following.state == FREE:
            other = following.size
            equals = by_size[other]
            lowest = bisect_left(sizes, other)
            if len(equals) == 1:
                del by_size[other], sizes[lowest]
            else:
                del equals[bisect_left(equals, _turn(following), key=_turn)]
            self._spare.append(following)
            size += other
            block.next = following = following.next
            if following is not None:
                following.prev = block
            count -= 1
            absorbed -= other
        block.size, block.state = size, FREE
        block.gc_base = free_set.pool.searches
        equals_now = by_size.get(size)
        if equals_now is None:
            by_size[size] = [block]
            insort(sizes, size, lowest)
        else:
            insort(equals_now, block, key=_turn)
        if not segment.expandable:
            if prev is not None or following is not None:
                ledger.change_split(tally, count + 1, absorbed + size)
            elif count:
                ledger.change_split(tally, count, absorbed)

    def record_stream(self, address: int, stream: int) -> None:
        """The allocation is used on another stream too: once freed it waits for that stream."""
        block = self._live[address]
        if stream != block.segment.free_set.stream:
            self._uses.setdefault(address, {})[stream] = None

    def catch_up(self) -> None:
        """Every stream has finished what was asked of it: events recorded until now are ready, and will be found so."""
        self._caught_up = self._clock

    def finish_stream(self, stream: int) -> None:
        """That stream has finished what was asked of it: its events recorded until now are ready."""
        queue = self._events.get(stream)
        if queue is not None:
            self._events[stream] = deque((0, block) for _, block in queue)

    def empty_cache(self) -> None:
        """torch.cuda.empty_cache() on this device."""
        self._release_cached()

    # settings at run time

    def set_memory_fraction(self, fraction: float) -> None:
        """torch.cuda.set_per_process_memory_fraction(): how much of the device may be reserved; 1: no such limit."""
        self.set_allowed(int(fraction * self.device.total_bytes) if fraction < 1 else None)

    def set_allowed(self, allowed_bytes: int | None) -> None:
        """How many bytes may be reserved; None: no such limit."""
        self._allowed = allowed_bytes
        self._settle()

    def change_settings(self, settings: AllocatorSettings) -> None:
        """From now on these; memory_stats()' max_split_size, and the memory fraction's limit, stay as they were."""
        self.settings = self._driver.settings = settings
        self._driver.limit = no_limit(settings)
        self._settle()

    def _settle(self) -> None:
        """What follows from the settings."""
        settings = self.settings
        self._plain = settings.rounds_plainly
        self._expandable = settings.expandable
        self._collecting = settings.gc_threshold > 0 and self._allowed is not None
        self._limit = self._driver.limit
        self._picky = not settings.expandable and self._driver.expandable_segments > 0
        for pool in self._pools():
            for free_set in pool.free_sets.values():
                free_set.least_remainder = self._least_remainder(pool)

    def _least_remainder(self, pool: Pool) -> int:
        if pool.owner is not None and pool.owner.no_split:
            return NEVER
        return LEAST_SMALL_REMAINDER if pool.small or self._expandable else LEAST_LARGE_REMAINDER

    @property
    def allowed_bytes(self) -> int | None:
        """What a memory fraction lets be reserved; None: no such limit."""
        return self._allowed

    # private pools

    def create_pool(self, pool_id: PoolId, *, no_split: bool = False, use_on_oom: bool = False) -> None:
        """A MemPool, or a graph's pool, is made; or it has one user more."""
        known = self._private.get(pool_id)
        if known is not None:
            known.use_count += 1
            self._freeable.pop(pool_id, None)
            return
        ledger = self._ledger
        self._private[pool_id] = PrivatePool(
            pool_id, ledger.small, ledger.large, no_split=no_split, use_on_oom=use_on_oom
        )

    def begin_pool(self, pool_id: PoolId, streams: Collection[int] | None = None) -> None:
        """From now on requests go there (of these streams only, if given): entering torch.cuda.use_mem_pool, or a capture."""
        self.create_pool(pool_id)
        self._routes.append((self._private[pool_id], streams))
        if self._rules.pool_context_captures:
            self._capturing += 1

    def end_pool(self, pool_id: PoolId) -> None:
        """Requests do not go there any more; what `begin_pool` counted as a user stays until `release_pool`."""
        at = max(i for i, (pool, _) in enumerate(self._routes) if pool.pool_id == pool_id)
        del self._routes[at]
        if self._rules.pool_context_captures:
            self._capturing -= 1

    def release_pool(self, pool_id: PoolId, *, empty: bool = False) -> None:
        """The pool has one user less; `empty`: it was a MemPool object, whose end gives its whole free segments back."""
        pool = self._private[pool_id]
        pool.use_count -= 1
        if pool.use_count == 0:
            self._freeable[pool_id] = pool
        if empty:
            self._release_cached(pool_id)

    def malloc_in(self, pool_id: PoolId, request_bytes: int, stream: int = 0) -> int:
        """`malloc` from a private pool, which is made where there is none yet; from everybody's where it is (0, 0)."""
        if pool_id == DEFAULT_POOL:
            return self.malloc(request_bytes, stream)
        if pool_id not in self._private:
            self.create_pool(pool_id)
        self.begin_pool(pool_id)
        try:
            return self.malloc(request_bytes, stream)
        finally:
            self.end_pool(pool_id)
            self._private[pool_id].use_count -= 1

    def end_pool_if_known(self, pool_id: PoolId) -> None:
        """Nobody uses the private pool any more: its whole free segments go back, and the rest when it is free."""
        private = self._private.get(pool_id)
        if private is not None and private.use_count:
            private.use_count = 1
            self.release_pool(pool_id, empty=True)

    def begin_capture(self) -> None:
        """A CUDA graph is captured: no reaping, no flushing."""
        self._capturing += 1

    def end_capture(self) -> None:
        """It is not any more."""
        self._capturing -= 1

    def _routed(self, pool: Pool, stream: int) -> Pool:
        for private, streams in reversed(self._routes):
            if streams is None or stream in streams:
                return private.small if pool.small else private.large
        return pool

    def _pools(self) -> Iterator[Pool]:
        yield self._large
        yield self._small
        for private in self._private.values():
            yield private.small
            yield private.large

    def _new_free_set(self, pool: Pool, stream: int) -> FreeSet:
        free_set = pool.free_sets[stream] = FreeSet(pool, stream, self._least_remainder(pool))
        return free_set

    # what was there before

    def adopt(
        self,
        address: int,
        pieces: Sequence[Piece],
        *,
        small: bool,
        stream: int = 0,
        pool_id: PoolId = DEFAULT_POOL,
        page: int = 0,
    ) -> None:
        """Go on with a segment that is there already: its blocks from its address on; `page` for an expandable one."""
        pool = self._small if small else self._large
        if pool_id != DEFAULT_POOL:
            if pool_id not in self._private:
                self.create_pool(pool_id)
            pool = self._private[pool_id].small if small else self._private[pool_id].large
        free_set = pool.free_sets.get(stream) or self._new_free_set(pool, stream)
        for block in self._driver.adopt(free_set, address, pieces, page):
            if block.state in (LIVE, AWAITING):
                self._live[block.address] = block
                self._book(free_set, block)
            if block.state == AWAITING:
                self.record_stream(block.address, UNKNOWN_STREAM)
                self.free(block.address)
        self._settle()

    def forget_past(self) -> None:
        """What was adopted is where the figures and the history begin."""
        self.reset_accumulated_stats()
        self.reset_peak_stats()
        self.trace.clear()

    # a request that the plain way does not serve

    def _malloc_slowly(self, free_set: FreeSet, size: int, request_bytes: int) -> int:
        block = self._search(free_set, size)
        if block is None:
            free_set, block = self._get(free_set, size, request_bytes)
        return self._hand_out(free_set, block, size, request_bytes)

    def _search(self, free_set: FreeSet, size: int) -> Block | None:
        """The best fit, out of its set (ALLOCATOR.md 2.3)."""
        if self._collecting:
            free_set.pool.searches += 1
        block = self._fitting(free_set, size)
        if block is not None:
            free_set.remove(block)
        return block

    def _fitting(self, free_set: FreeSet, size: int) -> Block | None:
        block = self._best_fit(free_set, size)
        limit = self.settings.max_split_bytes
        if block is None or limit is None:
            return block
        if size < limit:
            return block if block.size < limit else None
        return block if block.size < size + self.settings.non_split_rounding_bytes else None

    def _best_fit(self, free_set: FreeSet, size: int) -> Block | None:
        candidates = free_set.ascending(size)
        block = next(candidates, None)
        if block is None or not block.segment.expandable:
            return block
        if not self._expandable:
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

    def _get(self, free_set: FreeSet, size: int, request_bytes: int) -> tuple[FreeSet, Block]:
        """New memory for a request, with all that the allocator tries (ALLOCATOR.md 2.4)."""
        if size >= MOST_BYTES:
            raise OutOfMemoryError(
                f"CUDA out of memory. Tried to allocate more than 1EB memory. Requested size: {size}",
                requested_bytes=request_bytes,
                segment_bytes=size,
            )
        segment_bytes = self.settings.segment_bytes(size)
        if self._collecting:
            self._collect_garbage()
        self._way = Way.DEVICE
        block = self._new_memory(free_set, size, segment_bytes, request_bytes)
        if block is None and free_set.pool.owner is None:
            found = self._from_overflow_pools(free_set, size)
            if found is not None:
                self._way = Way.CACHE
                return found
        self._way = Way.DEVICE if block is not None else Way.AFTER_RELEASE
        if block is None and self._release_available(free_set, size):
            block = self._new_memory(free_set, size, segment_bytes, request_bytes)
        if block is None and not self._capturing:
            self._release_cached()
            self._ledger.num_alloc_retries += 1
            block = self._new_memory(free_set, size, segment_bytes, request_bytes)
        if block is None:
            raise self._out_of_memory(free_set, size, segment_bytes, request_bytes)
        return free_set, block

    def _new_memory(self, free_set: FreeSet, size: int, segment_bytes: int, request_bytes: int) -> Block | None:
        settings, reserved = self.settings, self._ledger.reserved.current
        if self._allowed is not None and reserved + segment_bytes > self._allowed:
            return None
        if settings.throw_on_oom and reserved + segment_bytes > settings.memory_fraction * self.device.total_bytes:
            self._ledger.num_oom_rejections += 1
            raise OutOfMemoryError(
                oom_text.rejected(request_bytes),
                requested_bytes=request_bytes,
                segment_bytes=segment_bytes,
                rejected=True,
            )
        if self._expandable:
            return self._driver.grow(free_set, size)
        return self._driver.get_segment(free_set, segment_bytes)

    def _from_overflow_pools(self, free_set: FreeSet, size: int) -> tuple[FreeSet, Block] | None:
        for private in self._private.values():
            if private.use_on_oom:
                pool = private.small if free_set.pool.small else private.large
                overflow = pool.free_sets.get(free_set.stream)
                block = overflow and self._search(overflow, size)
                if overflow and block:
                    return overflow, block
        return None

    def _collect_garbage(self) -> None:
        """Give back whole free segments of the large pool that are older than the rest (ALLOCATOR.md 2.5)."""
        threshold = int(self.settings.gc_threshold * (self._allowed or 0))
        target = self._ledger.reserved.current - threshold
        if target <= 0:
            return
        searches = self._large.searches
        whole = [b for b in self._large.in_order() if b.prev is None and b.next is None]
        ages, count, reclaimed, freed = sum(searches - b.gc_base for b in whole), len(whole), 0, True
        whole = [b for b in whole if not b.segment.expandable]
        while reclaimed < target and freed and count > 0:
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
                self._driver.release(block)
            whole = kept

    def _release_available(self, free_set: FreeSet, size: int) -> bool:
        """Give back oversize blocks of this very pool and stream (ALLOCATOR.md 2.7)."""
        limit = self.settings.max_split_bytes
        if limit is None:
            return False
        wanted = max(size, limit)
        large_enough = next(free_set.ascending(wanted), None)
        if large_enough is not None and not large_enough.segment.expandable:
            self._driver.release(large_enough)
            return True
        released = 0
        for block in list(free_set.descending(wanted)):
            if released >= wanted or block.size < limit:
                break
            if not block.segment.expandable:
                self._driver.release(block)
                released += block.size
        return released >= wanted

    def _release_cached(self, pool_id: PoolId | None = None) -> None:
        """Give back all that is whole and free; of one private pool only, where one is given."""
        if pool_id is None and not self._capturing:
            self._finish_events(None)
            self._driver.release_all(self._large)
            self._driver.release_all(self._small)
        for private in list(self._freeable.values()):
            if pool_id is not None:
                if private.pool_id != pool_id:
                    continue
                self._finish_events(private)
            self._driver.release_all(private.small)
            self._driver.release_all(private.large)
            if private.segment_count == 0:
                self._drop(private)

    def _drop(self, private: PrivatePool) -> None:
        """A private pool that PyTorch takes for empty goes."""
        blocks = [block for block in self._blocks() if block.segment.free_set.pool.owner is private]
        if any(block.state != UNMAPPED for block in blocks):
            raise UndefinedStateError(
                f"private pool {private.pool_id} counts no segment any more, and has memory: PyTorch frees it under its"
                " blocks (expandable segments with a private pool)"
            )
        del self._private[private.pool_id], self._freeable[private.pool_id]

    def _out_of_memory(self, free_set: FreeSet, size: int, segment_bytes: int, request_bytes: int) -> OutOfMemoryError:
        device, ledger = self.device, self._ledger
        free = device.free_bytes
        ledger.note_oom(free, size, free_set.stream, pool_id_of(free_set.pool.owner))
        outside = device.outside_bytes
        shortage = oom_text.Shortage(
            device_index=self.device_index,
            segment_bytes=segment_bytes,
            total_bytes=device.total_bytes,
            free_bytes=free,
            process_bytes=None if outside is None else device.used_bytes + outside,
            allowed_bytes=self._allowed,
            allocated_bytes=ledger.bytes,
            reserved_bytes=ledger.reserved.current,
            private_free_bytes=sum(
                block.size
                for private in self._private.values()
                for pool in (private.small, private.large)
                for block in pool.in_order()
            ),
        )
        hint = self._rules.hints_when_expandable or not self._expandable
        text = oom_text.out_of_memory(shortage, hint=hint, documentation=self._rules.documentation)
        return OutOfMemoryError(text, requested_bytes=request_bytes, segment_bytes=segment_bytes)

    def _hand_out(self, free_set: FreeSet, block: Block, size: int, request_bytes: int) -> int:
        """Give a block that is in no set to the program, split where the rules say so (ALLOCATOR.md 2.9)."""
        tally, ledger, driver = free_set.tally, self._ledger, self._driver
        rest = block.size - size
        was_split, expandable = block.prev is not None or block.next is not None, block.segment.expandable
        if self._splits(free_set, size, rest):
            front = driver.new_block(block.segment, block.address, size, block.counter)
            front.prev, front.next = block.prev, block
            if front.prev is not None:
                front.prev.next = front
            block.prev, block.address, block.size = front, block.address + size, rest
            free_set.add(block)
            if not expandable:
                ledger.change_split(tally, 0 if was_split else 1, -size if was_split else rest)
            block = front
        elif was_split and not expandable:
            ledger.change_split(tally, -1, -block.size)
        block.state, block.requested = LIVE, request_bytes
        self._live[block.address] = block
        self._book(free_set, block)
        return block.address

    def _splits(self, free_set: FreeSet, size: int, rest: int) -> bool:
        if rest < free_set.least_remainder:
            return False
        return free_set.pool.small or self._expandable or size < self._driver.limit

    def _book(self, free_set: FreeSet, block: Block) -> None:
        """As at the end of `malloc`, which does it in one piece for speed."""
        tally, ledger = free_set.tally, self._ledger
        tally.count_in += 1
        tally.bytes_in += block.size
        tally.requested_in += block.requested
        tally.count_peak = max(tally.count_peak, tally.count_in - tally.count_out)
        tally.bytes_peak = max(tally.bytes_peak, tally.bytes_in - tally.bytes_out)
        tally.requested_peak = max(tally.requested_peak, tally.requested_in - tally.requested_out)
        ledger.count += 1
        ledger.bytes += block.size
        ledger.requested += block.requested
        ledger.count_peak = max(ledger.count_peak, ledger.count)
        ledger.bytes_peak = max(ledger.bytes_peak, ledger.bytes)
        ledger.requested_peak = max(ledger.requested_peak, ledger.requested)
        if ledger.waiting_count:
            ledger.mark_active(tally)
        if block.size >= self._driver.limit:
            ledger.oversize_allocations.add(1)
        ledger.note("alloc", block.address, block.requested, free_set.stream, pool_id_of(free_set.pool.owner))

    # frees that wait for other streams

    def _wait(self, block: Block) -> None:
        streams = tuple(self._uses.pop(block.address))
        tally, ledger = block.segment.free_set.tally, self._ledger
        tally.waiting_count += 1
        ledger.waiting_count += 1
        tally.waiting_bytes += block.size
        ledger.waiting_bytes += block.size
        block.state = AWAITING
        if self._capturing:
            self._deferred.append((block, streams))
        else:
            self._record_events(block, streams)

    def _record_events(self, block: Block, streams: Iterable[int]) -> None:
        for stream in streams:
            self._clock += 1
            self._events.setdefault(stream, deque()).append((self._clock, block))
            self._awaiting[block.address] = self._awaiting.get(block.address, 0) + 1

    def _record_deferred(self) -> None:
        for block, streams in self._deferred:
            self._record_events(block, streams)
        self._deferred.clear()

    def reap(self) -> None:
        """Complete the frees whose events are ready, in each stream up to the first that is not; each `malloc` begins so."""
        if self._capturing:
            return
        self._record_deferred()
        for stream, queue in list(self._events.items()):
            while queue and (self.events_ready or queue[0][0] <= self._caught_up):
                self._finish(queue.popleft()[1])
            if not queue:
                del self._events[stream]

    def _finish(self, block: Block) -> None:
        """One event of a block is finished."""
        left = self._awaiting[block.address] = self._awaiting[block.address] - 1
        if left:
            return
        del self._awaiting[block.address]
        tally, ledger = block.segment.free_set.tally, self._ledger
        tally.waiting_count -= 1
        ledger.waiting_count -= 1
        tally.waiting_bytes -= block.size
        ledger.waiting_bytes -= block.size
        self._complete(block)

    def _finish_events(self, private: PrivatePool | None) -> None:
        """Wait for all events, or all of a private pool's."""
        self._ledger.num_sync_all_streams += 1
        self._record_deferred()
        for stream, queue in list(self._events.items()):
            kept: deque[tuple[int, Block]] = deque()
            for event in queue:
                if private is None or event[1].segment.free_set.pool.owner is private:
                    self._finish(event[1])
                else:
                    kept.append(event)
            if kept:
                self._events[stream] = kept
            else:
                del self._events[stream]

    # what is told

    @property
    def reserved_bytes(self) -> int:
        """reserved_bytes.all.current."""
        return self._ledger.reserved.current

    @property
    def trace(self) -> list[TraceEntry]:
        """The history since the beginning; empty where it is not kept."""
        return self._ledger.trace or []

    def stats(self) -> dict[str, int]:
        """What torch.cuda.memory_stats() tells in this version: flat names, sorted."""
        return self._ledger.stats()

    def reset_peak_stats(self) -> None:
        """torch.cuda.reset_peak_memory_stats()."""
        self._ledger.reset_peaks()

    def reset_accumulated_stats(self) -> None:
        """torch.cuda.reset_accumulated_memory_stats()."""
        self._ledger.reset_accumulated()

    def segments(self) -> list[dict[str, Any]]:
        """What torch.cuda.memory_snapshot() tells, without frames: by address; of an expandable segment each mapped range."""
        found: list[dict[str, Any]] = []
        owner: Segment | None = None
        end = -1
        for block in sorted(self._blocks(), key=_address):
            if block.state == UNMAPPED:
                continue
            if block.segment is not owner or block.address != end:
                owner = block.segment
                found.append(_told(owner, block.address, self.device_index))
            end = block.address + block.size
            _tell(found[-1], block)
        return found

    # what would be

    def way(self, request_bytes: int, stream: int = 0) -> Way:
        """The way in which a request would be served now; nothing changes. Costs a copy, unless a free block serves it."""
        if not self._events and not self._deferred and not self._routes and request_bytes > 0:
            size = self.settings.round(request_bytes)
            pool = self._small if size <= SMALL_MAX_BYTES else self._large
            free_set = pool.free_sets.get(stream)
            if free_set is not None and self._fitting(free_set, size) is not None:
                return Way.CACHE
        return self.copy().try_malloc(request_bytes, stream)

    def try_malloc(self, request_bytes: int, stream: int = 0) -> Way:
        """Allocate, and tell the way; what a failed request changes (cached segments given back) stays changed."""
        self._way = Way.CACHE
        try:
            self.malloc(request_bytes, stream)
        except OutOfMemoryError:
            return Way.NONE
        return self._way

    def copy(self, *, trace: bool = False) -> Simulator:
        """The same, to go on apart, its history empty; about a microsecond a block."""
        other = Simulator.__new__(Simulator)
        for name in _VALUES:
            setattr(other, name, getattr(self, name))
        other.device = self.device.copy()
        other._ledger = ledger = self._ledger.copy(trace=trace)
        other._driver = self._driver.copy(other.device, ledger)
        twins = Twins(ledger)
        other._small, other._large = twins.pool(self._small), twins.pool(self._large)
        other._private = private = twins.private(self._private)
        twins.tie(self._blocks())
        other._freeable = {pool_id: private[pool_id] for pool_id in self._freeable}
        other._routes = [(private[pool.pool_id], streams) for pool, streams in self._routes]
        other._live = {address: twins[block] for address, block in self._live.items()}
        other._uses = {address: streams.copy() for address, streams in self._uses.items()}
        other._awaiting = self._awaiting.copy()
        other._events = {s: deque((at, twins[block]) for at, block in queue) for s, queue in self._events.items()}
        other._deferred = [(twins[block], streams) for block, streams in self._deferred]
        other._spare = []
        return other

    def free_set(self, *, small: bool, stream: int = 0) -> FreeSet:
        """The free blocks that requests of that size and stream would be served from now; to be looked at only."""
        pool = self._small if small else self._large
        if self._routes:
            pool = self._routed(pool, stream)
        return pool.free_sets.get(stream) or self._new_free_set(pool, stream)

    def _blocks(self) -> Iterator[Block]:
        yield from self._live.values()
        yield from {id(block): block for queue in self._events.values() for _, block in queue}.values()
        yield from (block for block, _ in self._deferred)
        for pool in self._pools():
            for free_set in pool.free_sets.values():
                yield from free_set.ascending()
                yield from free_set.unmapped


def _reach(block: Block) -> int:
    """What an expandable block could come to with the addresses behind it."""
    following = block.next
    return block.size + (following.size if following is not None and following.state == UNMAPPED else 0)


def _told(segment: Segment, address: int, device_index: int) -> dict[str, Any]:
    free_set = segment.free_set
    return {
        "device": device_index,
        "address": address,
        "total_size": 0,
        "allocated_size": 0,
        "active_size": 0,
        "requested_size": 0,
        "stream": free_set.stream,
        "segment_type": "small" if free_set.pool.small else "large",
        "segment_pool_id": pool_id_of(free_set.pool.owner),
        "is_expandable": segment.expandable,
        "blocks": [],
    }


def _tell(segment: dict[str, Any], block: Block) -> None:
    size, state = block.size, block.state
    segment["total_size"] += size
    if state != FREE:
        segment["active_size"] += size
        segment["requested_size"] += block.requested
    if state == LIVE:
        segment["allocated_size"] += size
    segment["blocks"].append(
        {"address": block.address, "size": size, "requested_size": block.requested, "state": STATES[state]}
    )
