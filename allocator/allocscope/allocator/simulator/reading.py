"""One reading of a history: what was asked for, and, beside it, a simulator that is asked for the same."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import groupby, islice, takewhile
from operator import attrgetter, itemgetter
from typing import Any

from allocscope.allocator.errors import OutOfMemoryError, UndefinedStateError
from allocscope.allocator.settings import SMALL_MAX_BYTES
from allocscope.allocator.simulator.asked import Asked, OtherUsed
from allocscope.allocator.simulator.beginning import GAINS, RELEASES, growth_bytes
from allocscope.allocator.simulator.blocks import AWAITING, FREE, LIVE, STATES
from allocscope.allocator.simulator.seed import adopt_segments
from allocscope.allocator.simulator.simulator import Simulator
from allocscope.allocator.simulator.ties import Ties
from allocscope.allocator.simulator.told_addresses import Maps, ToldAddresses
from allocscope.allocator.snapshot import DEFAULT_POOL, TraceEntry
from allocscope.allocator.ways import Way

_OF_A_MISS = (*GAINS, *RELEASES, "free_completed")
_LOOK_BACK = 100_000
_action = attrgetter("action")
_pool_id = itemgetter(4)
_LOST = (UndefinedStateError, KeyError, IndexError)


class BehindError(Exception):
    """No more is explained than by another reading; there is no use in going on."""


class Reading:
    """A history gone through once.

    As long as the simulator does what was recorded it has the recorded addresses, and nothing need be kept of which is which.
    From the first difference on it is astray; it is asked all the same, since it knows better than nobody what a request does.
    """

    def __init__(
        self,
        simulator: Simulator,
        other_used: OtherUsed,
        trace: Sequence[TraceEntry],
        before: Sequence[Mapping[str, Any]],
        *,
        at_least: int = 0,
    ) -> None:
        """`before` is what was there, in the form of torch.cuda.memory_snapshot(); `at_least` so many entries are to be explained."""
        self.simulator, self._other_used, self._trace, self._at_least = simulator, other_used, trace, at_least
        settings = simulator.settings
        self._is_plain = not settings.expandable and settings.max_split_bytes is None and not settings.gc_threshold
        """Whether segments are given back by an allocation only for want of memory, and all of them then."""
        self.asked: list[Asked] = []
        self.failed_at: int | None = None
        self.astray_at: int | None = None
        """The first entry that is not explained; None: all are."""
        self._keys: dict[int, int] = {}
        """By the recorded addresses of what is live."""
        self._waiting: dict[int, int] = {}
        """Of what was freed and waits."""
        self._flushed: list[int] = []
        """Keys of what waited until a flush. Nobody knows when it would have been done without: it is taken to be with the next that is."""
        self._since: list[TraceEntry] = []
        """Entries right before the present one that are not explained yet."""
        self._count = 0
        """Allocations so far, which is the last one's key."""
        self._maps = Maps(trace)
        self._moved: dict[int, int] = {}
        """Once astray: where the simulator has what was recorded elsewhere."""
        self._is_lost = False
        """Whether the simulator cannot go on."""
        self._reserved: int = sum(segment["total_size"] for segment in before)
        """As the history tells it, before `_since`."""
        self.is_whole = not before
        self._ties: Ties | None = None
        if before:
            self._begin(before, trace[0].time_us if trace else 0)
            self._ties = Ties(simulator)

    @property
    def ties(self) -> int:
        """How often a choice was taken from the history."""
        return 0 if self._ties is None else self._ties.count

    def read(self) -> None:
        """From how it stood before the first entry on. BehindError: it went astray before `at_least`."""
        trace, keys, asked, since = self._trace, self._keys, self.asked, self._since
        simulator, new, last = self.simulator, tuple.__new__, len(self._trace) - 1
        malloc, free = simulator.malloc, simulator.free
        many_streams = len({entry.stream for entry in trace}) > 1
        completes = -1
        for at, entry in enumerate(trace):
            action, address, size, stream, time_us, pool_id, _, _ = entry
            if action == "alloc":
                if since or self.astray_at is not None or pool_id != DEFAULT_POOL:
                    self._allocated(at, entry)
                    continue
                self._survive()
                self._count = key = self._count + 1
                asked.append(new(Asked, ("malloc", time_us, key, size, stream, pool_id, False)))
                keys[address] = key
                calls, found = simulator.num_driver_calls, 0
                try:
                    found = malloc(size, stream)
                except OutOfMemoryError:
                    pass
                except _LOST:
                    self._is_lost = True
                if found != address or simulator.num_driver_calls != calls:
                    self._found_elsewhere(at, entry, found, hit=simulator.num_driver_calls == calls)
            elif action == "free_requested":
                following = trace[at + 1] if at < last else None
                at_once = following is not None and following[1] == address and following[0] == "free_completed"
                completes = at + 1 if at_once else -1
                if at_once and many_streams and self._has_waited(at, entry):
                    at_once, completes = False, -1
                if at_once and not since and self.astray_at is None and address in keys:
                    asked.append(new(Asked, ("free", time_us, keys.pop(address), 0, 0, DEFAULT_POOL, False)))
                    try:
                        free(address)
                    except KeyError:  # the snapshot is not of this history, and told blocks where there was no room
                        self._go_astray(at)
                else:
                    self._freed(at, entry, at_once=at_once)
            elif action == "oom":
                self._allocated(at, entry)
            elif action != "free_completed" or at != completes:
                since.append(entry)
        self._by_program(len(trace))

    # what was there before

    def _begin(self, segments: Sequence[Mapping[str, Any]], time_us: int) -> None:
        """To be asked for first; in this simulator it is simply there."""
        live = [{**segment, "blocks": [_live(block) for block in segment["blocks"]]} for segment in segments]
        adopt_segments(self.simulator, live)
        holes, waiting, is_split = [], [], False
        for segment in segments:
            stream, pool_id = segment["stream"], segment["segment_pool_id"]
            if _is_split(segment):  # its blocks are asked for in its place, or holes would be segments of their own
                is_split = True
                self._count = key = self._count + 1
                self.asked.append(Asked("hole", time_us, key, segment["total_size"], stream, pool_id))
                self.asked.append(Asked("free", time_us, key, 0, 0, DEFAULT_POOL))
            for block in segment["blocks"]:
                self._count = key = self._count + 1
                if block["state"] == STATES[FREE]:
                    self.asked.append(Asked("hole", time_us, key, block["size"], stream, pool_id))
                    holes.append(key)
                    continue
                self.asked.append(Asked("malloc", time_us, key, block["requested_size"], stream, pool_id))
                self._keys[block["address"]] = key
                if block["state"] == STATES[AWAITING]:
                    waiting.append(block["address"])
        if is_split:  # what other settings do not split is not there
            self.asked.append(Asked("empty_cache", time_us, 0, 0, 0, DEFAULT_POOL))
        self.asked += (Asked("free", time_us, key, 0, 0, DEFAULT_POOL) for key in holes)
        for address in waiting:
            self._wait_and_free(address, time_us)
        self.asked.append(Asked("began", time_us, 0, 0, 0, DEFAULT_POOL))
        self.simulator.forget_past()

    # allocations

    def _allocated(self, at: int, entry: TraceEntry) -> None:
        self._survive()
        self._count += 1
        failed = entry.action == "oom"
        size = self._failed_size(entry) if failed else entry.size
        malloc = Asked("malloc", entry.time_us, self._count, size, entry.stream, entry.pool_id)
        self.simulator.keep_trace(keep=self.astray_at is None)
        self._prepare(at, malloc, entry)
        found = 0
        if not self._is_lost:
            self._tell(self.simulator, malloc, at, entry)
            found = self._serve(self.simulator, malloc)
        if failed:
            self.failed_at = len(self.asked)
        else:
            self._keys[entry.address] = self._count
        self.asked.append(malloc)
        self._check(at, [*self._since, entry], found)
        self._reserved += growth_bytes(self._since)
        self._since.clear()

    def _serve(self, simulator: Simulator, malloc: Asked) -> int:
        """The address; 0 for none."""
        try:
            return simulator.malloc_in(malloc.pool_id, malloc.size, malloc.stream)
        except OutOfMemoryError:
            return 0
        except _LOST:
            self._is_lost = True
            return 0

    def _survive(self) -> None:
        """The program asks for more: what failed last did not end it."""
        failed = self.failed_at
        if failed is not None and not self.asked[failed].survived:
            self.asked[failed] = self.asked[failed]._replace(survived=True)

    def _failed_size(self, entry: TraceEntry) -> int:
        """An entry of a failure tells the rounded size: the last request that is rounded to as much is likely the same."""
        settings = self.simulator.settings
        before = (each.size for each in islice(reversed(self.asked), _LOOK_BACK) if each.what == "malloc")
        return next((size for size in before if settings.round(size) == entry.size), entry.size)

    def _prepare(self, at: int, malloc: Asked, entry: TraceEntry) -> None:
        """What came before an allocation: by its own doing, or other streams', or the program's."""
        before = self._end_pools(malloc.pool_id)
        completed = [each for each in before if each.action == "free_completed"]
        released = any(each.action in RELEASES for each in before)
        if not completed and not released:
            return
        missed = entry.action == "oom" or any(each.action in GAINS for each in before)
        if missed and not self._is_plain and self.astray_at is None:
            self._explain(at, completed, malloc, entry, released=released)
        elif not missed or not self._lacked(entry) or self._is_cached(malloc):
            if released:
                self._empty_cache(before)
            else:
                self._streams_done(completed)
        elif completed and self.astray_at is None:
            self._explain(at, completed, malloc, entry, released=released)
        else:
            self._streams_done(completed)

    def _end_pools(self, pool_asked: tuple[int, int]) -> list[TraceEntry]:
        """Private pools that gave memory back are not in use any more: by their own end, or freed with everybody's cache.

        But not the one that is asked now. Gives what else there is of the entries that are not explained yet.
        """
        ended: set[tuple[int, int]] = set()
        is_flushed = False
        for entry in self._since:
            pool_id = entry.pool_id
            if entry.action == "free_completed":
                is_flushed |= pool_id == DEFAULT_POOL  # a pool's end waits for its own frees alone
                continue
            if entry.action not in RELEASES or pool_id in ended:
                continue
            if self._is_lost or pool_id in (DEFAULT_POOL, pool_asked) or not self.simulator.uses_pool(pool_id):
                is_flushed = True
                continue
            self.asked.append(Asked("free_pool" if is_flushed else "end_pool", entry.time_us, 0, 0, 0, pool_id))
            with self._unless_lost():
                self.simulator.end_pool_if_known(pool_id, empty=not is_flushed)
            if not is_flushed:
                ended.add(pool_id)
        before = []
        for entry in self._since:
            if entry.pool_id not in ended or entry.action in GAINS:
                before.append(entry)
            elif entry.action == "free_completed":
                self._waiting.pop(entry.address, None)  # it was waited for
        return before

    def _lacked(self, entry: TraceEntry) -> bool:
        """Whether there was too little memory for what an allocation got, before anything was given back."""
        if entry.action == "oom":
            return True
        wanted = self._reserved + sum(each.size for each in self._since if each.action in GAINS)
        simulator = self.simulator
        allowed = simulator.allowed_bytes
        total = simulator.device.total_bytes
        return wanted > total - self._other_used(entry.time_us) or (allowed is not None and wanted > allowed)

    def _is_cached(self, malloc: Asked) -> bool:
        """Whether a free block would have served it, had nothing been given back: then that was the program's doing."""
        if self.astray_at is not None or malloc.pool_id != DEFAULT_POOL:
            return False
        with suppress(*_LOST):
            return self.simulator.way(malloc.size, malloc.stream) is Way.CACHE
        return False

    def _explain(
        self, at: int, completed: Sequence[TraceEntry], malloc: Asked, entry: TraceEntry, *, released: bool
    ) -> None:
        """The allocation may have flushed, once so many of the frees had completed; or else it was the program."""
        for count in dict.fromkeys((len(completed), *range(len(completed)))):
            if self._explains(at, completed[:count], malloc, entry):
                self._streams_done(completed[:count])
                for each in completed[count:]:
                    key = self._waiting.pop(each.address, None)
                    if key is not None:
                        self._flushed.append(key)
                return
        if released:
            self._empty_cache(completed)
        else:
            self._streams_done(completed)

    def _explains(self, at: int, done: Iterable[TraceEntry], malloc: Asked, entry: TraceEntry) -> bool:
        """Whether the allocation by itself does what was done."""
        try:
            copy = self.simulator.copy(trace=True)
        except KeyError:  # the snapshot is not of this history, and told blocks that lie in each other
            return False
        for each in done:
            copy.finish_stream(-1 - self._waiting.get(each.address, 0))
        self._tell(copy, malloc, at, entry)
        self._serve(copy, malloc)
        self._is_lost = False
        return self._together([*self.simulator.trace, *copy.trace]) == self._together([*self._since, entry])

    def _tell(self, simulator: Simulator, malloc: Asked, at: int, entry: TraceEntry) -> None:
        """What the device has for an allocation: how much, and where.

        A new expandable segment begins where memory is first mapped for its stream and pool, now or later.
        """
        device = simulator.device
        device.other_bytes = self._other_used_then(simulator, entry)
        if isinstance(device.segments, ToldAddresses):
            device.segments.next = [each.address for each in self._since if each.action == "segment_alloc"]
        if isinstance(device.reservations, ToldAddresses) and simulator.settings.expandable:
            small = simulator.settings.round(malloc.size) <= SMALL_MAX_BYTES
            stream, pool_id = malloc.stream, malloc.pool_id
            device.reservations.owner = stream, pool_id, small
            since = at - len(self._since)
            device.reservations.next = self._maps.addresses(stream, pool_id, small=small, since=since)

    def _other_used_then(self, simulator: Simulator, entry: TraceEntry) -> int:
        """What others used, as far as the history does not show otherwise: what an allocation got at once was there."""
        total = simulator.device.total_bytes
        free: int | None = entry.device_free
        if free is not None:
            return total - (self._reserved + growth_bytes(self._since)) - free
        told = self._other_used(entry.time_us)
        if any(each.action in RELEASES for each in self._since):
            return told
        got = sum(each.size for each in self._since if each.action in GAINS)
        return min(told, total - simulator.device.used_bytes - got)

    # frees, and what is given back

    def _freed(self, at: int, entry: TraceEntry, *, at_once: bool) -> None:
        self._by_program(at)
        if entry.address not in self._keys:
            self._go_astray(at)  # it is from before the history
        elif at_once:
            key = self._keys.pop(entry.address)
            self.asked.append(Asked("free", entry.time_us, key, 0, 0, DEFAULT_POOL))
            self._free(entry.address)
        else:
            self._wait_and_free(entry.address, entry.time_us)

    def _has_waited(self, at: int, entry: TraceEntry) -> bool:
        """Whether a free that completes at once did so by the flush of the next allocation, which it would have served otherwise."""
        group = list(
            takewhile(lambda each: each.action in _OF_A_MISS, islice(self._trace, at + 2, at + 2 + _LOOK_BACK))
        )
        end = at + 2 + len(group)
        if not group or end == len(self._trace) or self.astray_at is not None:
            return False
        missed = self._trace[end]
        if missed.action not in ("alloc", "oom") or (missed.stream, missed.pool_id) != (entry.stream, entry.pool_id):
            return False
        if not any(each.pool_id == DEFAULT_POOL or not self.simulator.uses_pool(each.pool_id) for each in group):
            return False  # private pools ended, which is no flush
        size = self.simulator.settings.round(missed.size)
        return self.simulator.would_serve(entry.address, size)

    def _wait_and_free(self, address: int, time_us: int) -> None:
        self._waiting[address] = key = self._keys.pop(address)
        self.asked.append(Asked("wait", time_us, key, 0, 0, DEFAULT_POOL))
        self.asked.append(Asked("free", time_us, key, 0, 0, DEFAULT_POOL))
        if self._moved.get(address, address) and not self._is_lost:
            with suppress(KeyError):
                self.simulator.record_stream(self._moved.get(address, address), -1 - key)
        self._free(address)

    def _free(self, address: int) -> None:
        if not self._is_lost:
            with suppress(KeyError):
                self.simulator.free(self._moved.pop(address, address))

    def _streams_done(self, completed: Iterable[TraceEntry]) -> None:
        for entry in completed:
            key = self._waiting.pop(entry.address, None)
            if key is not None:
                self.asked += (Asked("done", entry.time_us, each, 0, 0, DEFAULT_POOL) for each in (*self._flushed, key))
                self._flushed.clear()
                self.simulator.finish_stream(-1 - key)

    def _by_program(self, at: int) -> None:
        """Segments were given back, or frees completed, and by no allocation."""
        if not self._since:
            return
        self.simulator.keep_trace(keep=self.astray_at is None)
        before = self._end_pools(DEFAULT_POOL)
        if before:
            self._empty_cache(before)
        self._check(at - 1, self._since, 0)
        self._reserved += growth_bytes(self._since)
        self._since.clear()

    def _empty_cache(self, before: Sequence[TraceEntry]) -> None:
        for entry in before:
            if entry.action == "free_completed":
                self._waiting.pop(entry.address, None)  # it was waited for
        self.asked.append(Asked("empty_cache", self._since[0].time_us, 0, 0, 0, DEFAULT_POOL))
        if not self._is_lost:
            with self._unless_lost():
                self.simulator.empty_cache()

    @contextmanager
    def _unless_lost(self) -> Iterator[None]:
        try:
            yield
        except _LOST:
            self._is_lost = True

    # whether the simulator does the same

    def _check(self, at: int, recorded: Sequence[TraceEntry], found: int) -> None:
        """These entries, the last one `at`, against what the simulator wrote of them; and where it has the allocation."""
        last = recorded[-1]
        if self.astray_at is None:
            written, wanted = self._together(self.simulator.trace), self._together(recorded)
            self.simulator.keep_trace(keep=False)
            if written == wanted:
                return
            if written[:-1] == wanted[:-1] and last.action == "alloc" and found:
                self._found_elsewhere(at, last, found, hit=True)
                return
            same = next((i for i, (a, b) in enumerate(zip(written, wanted, strict=False)) if a != b), None)
            self._go_astray(at + 1 - len(recorded) + (min(len(written), len(wanted)) if same is None else same))
        if last.action == "alloc":
            self._moved[last.address] = found

    def _together(self, trace: Sequence[TraceEntry]) -> list[tuple[object, ...]]:
        """What is to be compared. Frees that complete together may do so in any order, so may pools that are given back together, and
        segments where it is not known which of equally large ones is older.
        """
        loose = ("free_completed",) if self._ties is None else ("free_completed", "segment_free")
        ordered: list[tuple[object, ...]] = []
        for action, entries in groupby(trace, key=_action):
            told = [(*entry[:4], entry.pool_id, entry.device_free) for entry in entries]
            if action in loose:
                told.sort(key=repr)
            elif action in RELEASES:
                told.sort(key=_pool_id)
            ordered += told
        return ordered

    def _found_elsewhere(self, at: int, entry: TraceEntry, found: int, *, hit: bool) -> None:
        """The simulator chose another block. If it is as good as the recorded one, that is taken; or else it is astray."""
        if found and hit and self._ties is not None and entry.size:
            simulator = self.simulator
            free_set = simulator.free_set_of(found)
            simulator.free(found)
            chosen = self._ties.choose(free_set, simulator.settings.round(entry.size), found, entry.address)
            found = simulator.malloc_in(entry.pool_id, entry.size, entry.stream)
            if chosen and found == entry.address:
                return
        self._go_astray(at)
        self._moved[entry.address] = found

    def _go_astray(self, at: int) -> None:
        if self.astray_at is None:
            self.astray_at = at
            self.simulator.keep_trace(keep=False)
            if 0 < at <= self._at_least:
                raise BehindError


def _is_split(segment: Mapping[str, Any]) -> bool:
    """Whether it is a large one in several pieces, which nothing but their being asked for one after the other puts there."""
    return len(segment["blocks"]) > 1 and segment["segment_type"] != "small" and not segment["is_expandable"]


def _live(block: Mapping[str, Any]) -> Mapping[str, Any]:
    """What waits is live at first, to be freed then."""
    return {**block, "state": STATES[LIVE]} if block["state"] == STATES[AWAITING] else block
