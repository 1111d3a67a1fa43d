"""The caching allocator itself: what is done with each request (ALLOCATOR.md 2 and 3)."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Iterator, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any

from allocscope.allocator.errors import OutOfMemoryError
from allocscope.allocator.settings import SMALL_MAX_BYTES, AllocatorSettings
from allocscope.allocator.simulator.blocks import AWAITING, FREE, LIVE, UNMAPPED, Block, FreeSet, PoolId
from allocscope.allocator.simulator.device import Device
from allocscope.allocator.simulator.driver import Driver, no_limit
from allocscope.allocator.simulator.fit import best_fit
from allocscope.allocator.simulator.ledger import Ledger, pool_id_of
from allocscope.allocator.simulator.pools import Pools
from allocscope.allocator.simulator.rules import NEWEST, Order, rules_of
from allocscope.allocator.simulator.snapshots import segments_of
from allocscope.allocator.simulator.supply import Supply
from allocscope.allocator.simulator.twins import Twins
from allocscope.allocator.simulator.waiting import Waiting
from allocscope.allocator.snapshot import DEFAULT_POOL, TraceEntry
from allocscope.allocator.ways import Way

UNKNOWN_STREAM = -1
"""Whom an adopted block waits for; nobody says that it is ready."""

Piece = tuple[int, int, int]
"""A block's size, what it was asked for, and its state (FREE, LIVE, AWAITING, UNMAPPED)."""

_turn = attrgetter("counter", "address")
_VALUES = (
    "_collecting",
    "_limit",
    "_order_is_block",
    "_picky",
    "_plain",
    "settings",
    "version",
)
"""What a copy of a simulator takes over as it is."""


class Simulator:
    """One allocator: one process on one device. Sizes and addresses are bytes, streams any numbers, 0 the default one.

    Exact for PyTorch 2.11 to 2.14 (backend native, CUDA). Left out: reuse of memory within a graph's capture
    (graph_capture_record_stream_reuse), allocation at a given address, checkpoints of graph pools.
    """

    __slots__ = (
        *_VALUES,
        "_driver",
        "_ledger",
        "_live",
        "_pools",
        "_routes",
        "_spare",
        "_supply",
        "_uses",
        "_waiting",
        "device",
    )

    _collecting: bool
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
        """`memory_fraction` is what set_per_process_memory_fraction was called with; None: the settings' own.

        ValueError: `version` is no version of PyTorch.
        """
        rules = rules_of(version)
        limit = settings.max_split_bytes
        self.settings, self.device, self.version = settings, device, version
        self._ledger = ledger = Ledger(rules, max_split_size=-1 if limit is None else limit, trace=trace)
        self._driver = Driver(device, ledger, settings)
        self._pools = pools = Pools(ledger, rules, settings)
        self._routes = pools.routes
        self._waiting = Waiting(ledger, self._complete)
        self._supply = Supply(device, self._driver, ledger, pools, self._waiting, settings, device_index)
        self._order_is_block = rules.order is Order.BLOCK
        self._live: dict[int, Block] = {}
        self._uses: dict[int, dict[int, None]] = {}
        """By a live block's address, the other streams that use it."""
        self._spare: list[Block] = []
        """Blocks that were merged away, to be used again: making new ones takes long."""
        self.set_memory_fraction(settings.memory_fraction if memory_fraction is None else memory_fraction)

    # what a program asks for

    def malloc(self, request_bytes: int, stream: int = 0) -> int:
        """Allocate so many bytes; gives the address, 0 for a request of 0 bytes. OutOfMemoryError: as PyTorch would.

        In one piece, for speed: what a free block serves by the plain rules is done here, the rest in `_malloc_slowly`.
        """
        ledger = self._ledger
        if ledger.waiting_count:
            self.reap()
        size = (request_bytes + 511) & -512 if self._plain else self.settings.round(request_bytes)
        if request_bytes <= 0:
            return 0
        pools = self._pools
        pool = pools.small if size <= SMALL_MAX_BYTES else pools.large
        if self._routes:
            pool = pools.routed(pool, stream)
        free_set = pool.free_sets.get(stream)
        if free_set is None:
            free_set = pools.free_set(pool, stream)
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
        tally = free_set.tally
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
            self._waiting.add(block, tuple(self._uses.pop(address)), capturing=self._pools.captures > 0)
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
        """The allocation is used on another stream too: once freed it waits for that one. KeyError: there is no such."""
        block = self._live[address]
        if stream != block.segment.free_set.stream:
            self._uses.setdefault(address, {})[stream] = None

    def empty_cache(self) -> None:
        """torch.cuda.empty_cache() on this device."""
        self._supply.release_cached()

    # when other streams are done

    @property
    def events_ready(self) -> bool:
        """Whether other streams are done as soon as it is asked; otherwise only what `catch_up` or `finish_stream` say."""
        return self._waiting.ready_at_once

    @events_ready.setter
    def events_ready(self, ready: bool) -> None:
        self._waiting.ready_at_once = ready

    def catch_up(self) -> None:
        """Every stream has finished what was asked of it until now; this is found at the next `malloc`."""
        self._waiting.catch_up()

    def finish_stream(self, stream: int) -> None:
        """One stream has."""
        self._waiting.finish_stream(stream)

    def reap(self) -> None:
        """Complete the frees whose streams are done; each `malloc` begins so, but within a capture."""
        if not self._pools.captures:
            self._waiting.reap()

    # settings at run time

    def set_memory_fraction(self, fraction: float) -> None:
        """torch.cuda.set_per_process_memory_fraction(): how much of the device may be reserved; 1: no such limit."""
        self.set_allowed(int(fraction * self.device.total_bytes) if fraction < 1 else None)

    def set_allowed(self, allowed_bytes: int | None) -> None:
        """How many bytes may be reserved; None: no such limit."""
        self._settle(allowed_bytes)

    @property
    def allowed_bytes(self) -> int | None:
        """What a memory fraction lets be reserved; None: no such limit."""
        return self._supply.allowed

    def change_settings(self, settings: AllocatorSettings) -> None:
        """From now on these; memory_stats()' max_split_size and the memory fraction's limit stay as they were."""
        self.settings = self._driver.settings = settings
        self._driver.limit = no_limit(settings)
        self._settle(self.allowed_bytes)

    def _settle(self, allowed_bytes: int | None) -> None:
        """What follows from the settings, so that `malloc` need not ask them."""
        settings = self.settings
        self._supply.settle(settings, allowed_bytes)
        self._pools.settle(settings)
        self._plain = settings.rounds_plainly
        self._collecting = self._supply.collecting
        self._limit = self._driver.limit
        self._picky = not settings.expandable and self._driver.expandable_segments > 0

    # private pools

    def create_pool(self, pool_id: PoolId, *, no_split: bool = False, use_on_oom: bool = False) -> None:
        """A MemPool, or a graph's pool, is made; or it has one user more."""
        self._pools.create(pool_id, no_split=no_split, use_on_oom=use_on_oom)

    def begin_pool(self, pool_id: PoolId, streams: Collection[int] | None = None) -> None:
        """Requests (of these streams, if given) go there: entering torch.cuda.use_mem_pool, or a capture. One user more."""
        self._pools.begin(pool_id, streams)

    def end_pool(self, pool_id: PoolId) -> None:
        """Requests do not go there any more; what `begin_pool` counted as a user stays one until `release_pool`."""
        self._pools.end(pool_id)

    def release_pool(self, pool_id: PoolId, *, empty: bool = False) -> None:
        """One user less; `empty`: it was a MemPool object, whose end gives back what is whole and free. KeyError: no such.

        UndefinedStateError: PyTorch would free a pool of expandable segments that still has memory (ALLOCATOR.md 5.4).
        """
        self._pools.release(pool_id)
        if empty:
            self._supply.release_cached(pool_id)

    def malloc_in(self, pool_id: PoolId, request_bytes: int, stream: int = 0) -> int:
        """`malloc` from a private pool, which is made where there is none yet; from everybody's where it is (0, 0)."""
        if pool_id == DEFAULT_POOL:
            return self.malloc(request_bytes, stream)
        self._pools.pool(pool_id, small=True)
        self.begin_pool(pool_id)
        try:
            return self.malloc(request_bytes, stream)
        finally:
            self.end_pool(pool_id)
            self._pools.private[pool_id].use_count -= 1

    def uses_pool(self, pool_id: PoolId) -> bool:
        """Whether there is such a private pool, and somebody uses it."""
        private = self._pools.private.get(pool_id)
        return private is not None and private.use_count > 0

    def end_pool_if_known(self, pool_id: PoolId, *, empty: bool) -> None:
        """Nobody uses the private pool any more; `empty`: its whole free segments go back now, else when the cache is emptied."""
        if self.uses_pool(pool_id):
            self._pools.private[pool_id].use_count = 1
            self.release_pool(pool_id, empty=empty)

    def begin_capture(self) -> None:
        """A CUDA graph is captured: no reaping, no flushing."""
        self._pools.captures += 1

    def end_capture(self) -> None:
        """It is not any more."""
        self._pools.captures -= 1

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
        free_set = self._pools.free_set(self._pools.pool(pool_id, small=small), stream)
        for block in self._driver.adopt(free_set, address, pieces, page):
            if block.state in (LIVE, AWAITING):
                self._live[block.address] = block
                self._book(free_set, block)
            if block.state == AWAITING:
                self.record_stream(block.address, UNKNOWN_STREAM)
                self.free(block.address)
        self._settle(self.allowed_bytes)

    def forget_past(self) -> None:
        """What was adopted is where the figures and the history begin."""
        self.reset_accumulated_stats()
        self.reset_peak_stats()
        self.trace.clear()

    # a request that the plain way does not serve

    def _malloc_slowly(self, free_set: FreeSet, size: int, request_bytes: int) -> int:
        block = self._supply.find(free_set, size)
        if block is None:
            free_set, block = self._supply.get(free_set, size, request_bytes)
        return self._hand_out(free_set, block, size, request_bytes)

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
        return free_set.pool.small or self.settings.expandable or size < self._limit

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
        if block.size >= self._limit:
            ledger.oversize_allocations.add(1)
        ledger.note("alloc", block.address, block.requested, free_set.stream, pool_id_of(free_set.pool.owner))

    # what is told

    @property
    def reserved_bytes(self) -> int:
        """reserved_bytes.all.current."""
        return self._ledger.reserved.current

    @property
    def trace(self) -> list[TraceEntry]:
        """The history since the beginning; empty where it is not kept."""
        return self._ledger.trace or []

    def keep_trace(self, *, keep: bool) -> None:
        """From now on keep a history, from its beginning; or none."""
        self._ledger.trace = [] if keep else None

    @property
    def num_driver_calls(self) -> int:
        """How often memory was got from the driver or given back."""
        return self._ledger.num_device_alloc + self._ledger.num_device_free

    @property
    def order(self) -> Order:
        """Which of equally large free blocks is taken first."""
        return self._ledger.rules.order

    def stats(self) -> dict[str, int]:
        """What torch.cuda.memory_stats() tells in this version: flat names, sorted; bytes, and counts.

        Where frees of several streams complete at one moment, PyTorch's order is that of a hash map, and the cumulative
        inactive_split figures and their peaks may differ by it.
        """
        return self._ledger.stats()

    def reset_peak_stats(self) -> None:
        """torch.cuda.reset_peak_memory_stats()."""
        self._ledger.reset_peaks()

    def reset_accumulated_stats(self) -> None:
        """torch.cuda.reset_accumulated_memory_stats()."""
        self._ledger.reset_accumulated()

    def segments(self) -> list[dict[str, Any]]:
        """What torch.cuda.memory_snapshot() tells, without frames: by address; of an expandable segment each mapped range."""
        return segments_of(self.blocks(), self._supply.device_index)

    def free_set(self, *, small: bool, stream: int = 0) -> FreeSet:
        """The free blocks that requests of that size and stream would be served from now; to be looked at only."""
        pool = self._pools.small if small else self._pools.large
        return self._pools.free_set(self._pools.routed(pool, stream), stream)

    def free_set_of(self, address: int) -> FreeSet:
        """The free blocks that requests like the one of this live block are served from. KeyError: there is no such."""
        return self._live[address].segment.free_set

    def would_serve(self, address: int, size: int) -> bool:
        """Whether this live block, once it is free and has joined its neighbours, is large enough for a rounded request of its kind."""
        block = self._live.get(address)
        if block is None or block.segment.free_set.pool.small is not (size <= SMALL_MAX_BYTES):
            return False
        free = (each.size for each in (block.prev, block.next) if each is not None and each.state == FREE)
        return block.size + sum(free) >= size

    def free_blocks(self) -> Iterator[Block]:
        """Those of everybody's pools; to be looked at only."""
        return chain(self._pools.small.in_order(), self._pools.large.in_order())

    def kept_bytes(self, block: Block) -> int:
        """What of a free block cannot be given back."""
        return self._driver.kept_bytes(block)

    @property
    def split_bytes_peak(self) -> int:
        """inactive_split_bytes.all.peak."""
        return self._ledger.split_bytes_peak

    @property
    def counts_stranded(self) -> bool:
        """Whether inactive_split_bytes is all that is stranded: no segment is expandable, and no private pool was ever used."""
        return not (self.settings.expandable or self._driver.expandable_segments or self._ledger.private)

    def blocks(self) -> Iterator[Block]:
        """All, and addresses without memory, in no order; to be looked at only."""
        return chain(self._live.values(), self._waiting.blocks(), self._pools.blocks())

    # what would be

    def way(self, request_bytes: int, stream: int = 0) -> Way:
        """The way in which a request would be served now; nothing changes. Costs a copy, unless a free block serves it."""
        if request_bytes <= 0:
            return Way.CACHE
        if not self._ledger.waiting_count:
            size = self.settings.round(request_bytes)
            free_set = self.free_set(small=size <= SMALL_MAX_BYTES, stream=stream)
            if best_fit(free_set, size, self.settings) is not None:
                return Way.CACHE
        return self.copy().try_malloc(request_bytes, stream)

    def try_malloc(self, request_bytes: int, stream: int = 0) -> Way:
        """Allocate, and tell the way; what a failed request changes (cached segments given back) stays changed."""
        self._supply.way = Way.CACHE
        try:
            self.malloc(request_bytes, stream)
        except OutOfMemoryError:
            return Way.NONE
        return self._supply.way

    def copy(self, *, trace: bool = False) -> Simulator:
        """The same, to go on apart, its history empty; takes about a microsecond a block."""
        other = Simulator.__new__(Simulator)
        for name in _VALUES:
            setattr(other, name, getattr(self, name))
        other.device = self.device.copy()
        other._ledger = ledger = self._ledger.copy(trace=trace)
        other._driver = self._driver.copy(other.device, ledger)
        twins = Twins(ledger)
        other._pools = self._pools.copy(ledger, twins)
        other._routes = other._pools.routes
        twins.tie(self.blocks())
        other._waiting = self._waiting.copy(ledger, other._complete, twins)
        other._supply = self._supply.copy(other.device, other._driver, ledger, other._pools, other._waiting)
        other._live = {address: twins[block] for address, block in self._live.items()}
        other._uses = {address: streams.copy() for address, streams in self._uses.items()}
        other._spare = []
        return other
