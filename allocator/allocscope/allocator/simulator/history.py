"""What a program asked for, read off an allocator's own history, to be asked again under other settings (ALLOCATOR.md 13).

A history tells allocations and frees. What else was asked follows: a free that does not complete at once waited for another
stream; segments given back by no allocation were an empty_cache, or a private pool's end. To tell whose doing it was the
requests are simulated under the settings they were made with, with the addresses that the history tells, and the simulator's own
history is held against the recorded one: where they are the same, what it says of other settings is to be trusted.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, NamedTuple

from allocscope.allocator.errors import OutOfMemoryError, UndefinedStateError
from allocscope.allocator.settings import SMALL_MAX_BYTES, SMALL_SEGMENT_BYTES, AllocatorSettings
from allocscope.allocator.simulator.beginning import beginning_of
from allocscope.allocator.simulator.blocks import AWAITING, FREE, LIVE, STATES
from allocscope.allocator.simulator.device import Addresses, Device, LowestGap
from allocscope.allocator.simulator.rules import NEWEST
from allocscope.allocator.simulator.seed import adopt_segments
from allocscope.allocator.simulator.simulator import Simulator
from allocscope.allocator.snapshot import DEFAULT_POOL, TraceEntry

_RELEASES = ("segment_free", "segment_unmap")
_KNOWN = frozenset((*_RELEASES, "segment_alloc", "segment_map", "alloc", "free_requested", "free_completed", "oom"))
_LOOK_AHEAD = 100
_VERSIONS = (NEWEST, "2.12.1", "2.11.0")


class Asked(NamedTuple):
    """One thing that a program asked for, or that came about."""

    what: str
    """malloc; free; wait: another stream uses it, and so its free will wait; done: the stream does not any more; empty_cache;
    end_pool."""
    time_us: int
    key: int
    """Of the allocation, in order; of the others 0."""
    size: int
    """malloc: bytes as asked for."""
    stream: int
    pool_id: tuple[int, int]


@dataclass(frozen=True, slots=True)
class History:
    """The requests of a history, and how well they explain it."""

    asked: tuple[Asked, ...]
    version: str
    """Of PyTorch, whose rules explain it best."""
    entries: int
    """How many there are that a request explains."""
    explained: int
    """How many the simulator wrote too, from the first on; all of them: the simulation is exact."""
    failed_at: int | None
    """The last request, of `asked`, that ended in an OutOfMemoryError; None: none did."""

    @property
    def exact(self) -> bool:
        """Whether the simulator does exactly what was recorded."""
        return self.explained == self.entries


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the same requests come to under some settings; bytes and counts."""

    failed_at: int | None
    """The request, of `asked`, that ends in an OutOfMemoryError; None: none does."""
    failed_us: int | None
    message: str | None
    reserved_peak_bytes: int
    allocated_peak_bytes: int
    reserved_bytes: int
    """At the end."""
    num_alloc_retries: int
    num_device_alloc: int
    num_device_free: int


OtherUsed = Callable[[int], int]
"""Bytes of the device in use at a moment (unix microseconds) that are not this allocator's."""


def read_history(
    trace: Sequence[TraceEntry],
    settings: AllocatorSettings,
    *,
    device_total_bytes: int,
    other_used: OtherUsed,
    allowed_bytes: int | None = None,
    version: str | None = None,
    segments: Iterable[Mapping[str, Any]] = (),
) -> History:
    """The requests of one device's history.

    `segments` are those after its last entry, as torch.cuda.memory_snapshot() gives them: where the history begins in the middle
    of a run, what is walked back from them is there before, and is asked for first. Without them it must begin with the first
    allocation to be explained in full. A snapshot does not tell PyTorch's version: where `version` is None, it is the one whose
    order of equal blocks explains most.
    """
    before = beginning_of(trace, segments, settings) if segments else []
    best: History | None = None
    for candidate in _VERSIONS if version is None else (version,):
        simulator = Simulator(settings, _told_device(device_total_bytes), version=candidate, trace=True)
        if allowed_bytes is not None:
            simulator.set_allowed(allowed_bytes)
        found = _Reading(simulator, other_used).read(trace, before)
        if best is None or found.explained > best.explained:
            best = found
        if best.exact:
            break
    assert best is not None
    return best


def ask_again(asked: Iterable[Asked], simulator: Simulator, other_used: OtherUsed) -> Outcome:
    """Ask a simulator for the same, until a request ends in an OutOfMemoryError."""
    asking = _Asking(simulator, other_used)
    failed_at = failed_us = message = None
    for at, each in enumerate(asked):
        try:
            asking.ask(each)
        except OutOfMemoryError as error:
            failed_at, failed_us, message = at, each.time_us, str(error)
            break
    stats = simulator.stats()
    return Outcome(
        failed_at=failed_at,
        failed_us=failed_us,
        message=message,
        reserved_peak_bytes=stats["reserved_bytes.all.peak"],
        allocated_peak_bytes=stats["allocated_bytes.all.peak"],
        reserved_bytes=stats["reserved_bytes.all.current"],
        num_alloc_retries=stats["num_alloc_retries"],
        num_device_alloc=stats["num_device_alloc"],
        num_device_free=stats["num_device_free"],
    )


class _Asking:
    """A simulator that is asked, and the addresses it gave."""

    def __init__(self, simulator: Simulator, other_used: OtherUsed) -> None:
        self.simulator, self._other_used = simulator, other_used
        self.addresses: dict[int, int] = {}

    def ask(self, asked: Asked) -> None:
        simulator, key = self.simulator, asked.key
        match asked.what:
            case "malloc":
                simulator.device.other_bytes = self._other_used(asked.time_us)
                self.addresses[key] = simulator.malloc_in(asked.pool_id, asked.size, asked.stream)
            case "free":
                if key in self.addresses:
                    simulator.free(self.addresses[key])
            case "wait":
                # each waits by itself: which streams it was is not told, only when they were done
                if key in self.addresses:
                    simulator.record_stream(self.addresses[key], -1 - key)
            case "done":
                simulator.finish_stream(-1 - key)
            case "empty_cache":
                simulator.empty_cache()
            case "end_pool":
                simulator.end_pool_if_known(asked.pool_id)


class _ToldAddresses:
    """Addresses as a history tells them; where it does not, from above all that it knows."""

    def __init__(self, start: int) -> None:
        self.next: list[int] = []
        """Where the next range may begin; the first that is not in one of the same owner is taken."""
        self.owner: object = None
        self._taken: dict[int, tuple[int, object]] = {}
        self._others = LowestGap(start)

    def take(self, size: int) -> int:
        """The next one told."""
        own = [(start, end) for start, (end, owner) in self._taken.items() if owner == self.owner]
        for at, address in enumerate(self.next):
            if not any(start <= address < end for start, end in own):
                del self.next[at]
                break
        else:
            address = self._others.take(size)
        self._taken[address] = (address + size, self.owner)
        return address

    def give_back(self, address: int, size: int) -> None:
        """Nobody has that range any more."""
        self._taken.pop(address, None)

    def copy(self) -> _ToldAddresses:
        """The same, to go on apart."""
        other = _ToldAddresses(0)
        other.next, other.owner, other._taken = self.next.copy(), self.owner, self._taken.copy()
        other._others = self._others.copy()
        return other


def _told_device(total_bytes: int) -> Device:
    segments: Addresses = _ToldAddresses(1 << 60)
    return Device(total_bytes, segments=segments, reservations=_ToldAddresses(1 << 61))


class _Reading:
    """A history gone through once, simulated as it is read."""

    def __init__(self, simulator: Simulator, other_used: OtherUsed) -> None:
        self._simulator, self._other_used = simulator, other_used
        self._asking = _Asking(simulator, self._other_used_then)
        self._asked: list[Asked] = []
        self._keys: dict[int, int] = {}
        self._waiting: dict[int, int] = {}
        self._since: list[TraceEntry] = []
        """Entries since the last allocation or free."""
        self._mallocs = 0
        self._failed_at: int | None = None
        self._entry: TraceEntry | None = None
        self._index = 0
        self._maps: _Maps = {}

    def read(self, trace: Sequence[TraceEntry], before: Sequence[Mapping[str, Any]]) -> History:
        """From how it stood before the first entry on."""
        known = [entry for entry in trace if entry.action in _KNOWN]
        self._maps = _maps(known)
        if before:
            self._begin(before, known[0].time_us if known else 0)
        try:
            for self._index, (entry, following) in enumerate(zip_longest(known, known[1:])):
                self._take(entry, following)
            self._released_by_program()
        except (UndefinedStateError, KeyError, IndexError):
            pass  # the simulation has gone astray, and cannot go on: so much is explained, and no more
        return History(
            asked=tuple(self._asked),
            version=self._simulator.version,
            entries=len(known),
            explained=_same_until(known, self._simulator.trace),
            failed_at=self._failed_at,
        )

    def _take(self, entry: TraceEntry, following: TraceEntry | None) -> None:
        match entry.action:
            case "alloc" | "oom":
                self._allocated(entry)
            case "free_requested":
                self._released_by_program()
                at_once = following is not None and following[:2] == ("free_completed", entry.address)
                self._freed(entry, at_once=at_once)
            case "free_completed" if entry.address not in self._waiting:
                pass  # of the free right before
            case _:
                self._since.append(entry)

    def _begin(self, segments: Sequence[Mapping[str, Any]], time_us: int) -> None:
        """What is live is asked for first; here it is simply there."""
        simulator, waiting = self._simulator, []
        live = [{**segment, "blocks": [_live(block) for block in segment["blocks"]]} for segment in segments]
        adopt_segments(simulator, live)
        for segment in segments:
            for block in segment["blocks"]:
                if block["state"] == STATES[FREE]:
                    continue
                self._mallocs += 1
                key, address, size = self._mallocs, block["address"], block["requested_size"]
                pool_id = segment["segment_pool_id"]
                self._asked.append(Asked("malloc", time_us, key, size, segment["stream"], pool_id))
                self._keys[address] = key
                self._asking.addresses[key] = address
                if block["state"] == STATES[AWAITING]:
                    waiting.append(
                        TraceEntry("free_requested", address, size, segment["stream"], time_us, pool_id, None)
                    )
        for entry in waiting:
            self._freed(entry, at_once=False)
        simulator.forget_past()

    # allocations

    def _allocated(self, entry: TraceEntry) -> None:
        self._mallocs += 1
        self._entry = entry
        malloc = Asked("malloc", entry.time_us, self._mallocs, entry.size, entry.stream, entry.pool_id)
        if self._released() or (self._completed() and self._missed()):
            self._explain(malloc)
        else:
            self._streams_done(self._completed())
        self._tell_addresses(self._simulator, malloc)
        if entry.action == "alloc":
            self._keys[entry.address] = self._mallocs
        else:
            self._failed_at = len(self._asked)
        self._ask(malloc)
        self._since.clear()

    def _explain(self, malloc: Asked) -> None:
        """Segments were given back before an allocation: by it, once so many of the frees had completed, or by the program."""
        completed = self._completed()
        for count in dict.fromkeys((len(completed), *range(len(completed)))):
            if self._explains(completed[:count], malloc):
                self._streams_done(completed[:count])
                for entry in completed[count:]:
                    self._waiting.pop(entry.address, None)
                return
        self._released_by_program()

    def _explains(self, done: Sequence[TraceEntry], malloc: Asked) -> bool:
        """Whether the allocation by itself does what was done."""
        copy = self._simulator.copy(trace=True)
        asking = _Asking(copy, self._other_used_then)
        asking.addresses = self._asking.addresses.copy()
        for entry in done:
            asking.ask(self._done(entry))
        self._tell_addresses(copy, malloc)
        with suppress(OutOfMemoryError):
            asking.ask(malloc)
        outcome = [] if self._entry is None else [self._entry]
        return _together(copy.trace) == _together([*self._since, *outcome])

    def _tell_addresses(self, simulator: Simulator, malloc: Asked) -> None:
        """Where the segments lie that the next allocation will get.

        A new expandable segment begins where memory is first mapped for its stream and pool, now or later.
        """
        segments, reservations = simulator.device.segments, simulator.device.reservations
        if isinstance(segments, _ToldAddresses):
            segments.next = [entry.address for entry in self._since if entry.action == "segment_alloc"]
        if isinstance(reservations, _ToldAddresses):
            small = simulator.settings.round(malloc.size) <= SMALL_MAX_BYTES
            reservations.owner = key = (malloc.stream, malloc.pool_id, small)
            positions, addresses = self._maps.get(key, ((), ()))
            at = bisect_left(positions, self._index - len(self._since))
            reservations.next = list(addresses[at : at + _LOOK_AHEAD])

    def _other_used_then(self, time_us: int) -> int:
        """What others used, as far as the history does not show otherwise: what an allocation got at once was there."""
        told, device, entry = self._other_used(time_us), self._simulator.device, self._entry
        left = device.total_bytes - device.used_bytes
        if entry is not None and entry.device_free is not None and not self._released():
            return left - entry.device_free
        got = sum(e.size for e in self._since if e.action in ("segment_alloc", "segment_map"))
        return told if self._released() else min(told, left - got)

    # frees, and what is given back

    def _freed(self, entry: TraceEntry, *, at_once: bool) -> None:
        key = self._keys.pop(entry.address, None)
        if key is None:
            return  # from before the history
        if not at_once:
            self._waiting[entry.address] = key
            self._ask(Asked("wait", entry.time_us, key, 0, 0, DEFAULT_POOL))
        self._ask(Asked("free", entry.time_us, key, 0, 0, DEFAULT_POOL))

    def _completed(self) -> list[TraceEntry]:
        return [entry for entry in self._since if entry.action == "free_completed"]

    def _missed(self) -> bool:
        """Whether no free block served the allocation, which may have flushed then, and waited for what waited."""
        failed = self._entry is not None and self._entry.action == "oom"
        return failed or any(entry.action in ("segment_alloc", "segment_map") for entry in self._since)

    def _released(self) -> list[TraceEntry]:
        return [entry for entry in self._since if entry.action in _RELEASES]

    def _done(self, entry: TraceEntry) -> Asked:
        return Asked("done", entry.time_us, self._waiting[entry.address], 0, 0, DEFAULT_POOL)

    def _streams_done(self, completed: Iterable[TraceEntry]) -> None:
        for entry in completed:
            self._ask(self._done(entry))
            del self._waiting[entry.address]

    def _released_by_program(self) -> None:
        """Segments were given back, or frees completed, and not by an allocation."""
        released = self._released()
        if not released and not self._completed():
            return
        time_us = self._since[0].time_us
        for entry in self._completed():
            del self._waiting[entry.address]  # it was waited for
        self._since = [entry for entry in self._since if entry.action not in (*_RELEASES, "free_completed")]
        for pool_id in dict.fromkeys(entry.pool_id for entry in released):
            if pool_id != DEFAULT_POOL:
                self._ask(Asked("end_pool", time_us, 0, 0, 0, pool_id))
        if not released or any(entry.pool_id == DEFAULT_POOL for entry in released):
            self._ask(Asked("empty_cache", time_us, 0, 0, 0, DEFAULT_POOL))

    def _ask(self, asked: Asked) -> None:
        self._asked.append(asked)
        with suppress(OutOfMemoryError):  # as it was recorded, or the histories will differ
            self._asking.ask(asked)


_Maps = dict[tuple[int, tuple[int, int], bool], tuple[list[int], list[int]]]
"""By stream, private pool and small or not: which entries map memory, and where."""


def _maps(known: Sequence[TraceEntry]) -> _Maps:
    found: _Maps = {}
    for position, entry in enumerate(known):
        if entry.action == "segment_map":
            key = (entry.stream, entry.pool_id, entry.size == SMALL_SEGMENT_BYTES)
            positions, addresses = found.setdefault(key, ([], []))
            positions.append(position)
            addresses.append(entry.address)
    return found


def _live(block: Mapping[str, Any]) -> Mapping[str, Any]:
    """What waits is live at first, to be freed then."""
    return {**block, "state": STATES[LIVE]} if block["state"] == STATES[AWAITING] else block


def _same_until(recorded: Sequence[TraceEntry], simulated: Sequence[TraceEntry]) -> int:
    """How many entries are the same from the first on; frees that complete together may do so in any order."""
    found = 0
    for mine, theirs in zip(_together(simulated), _together(recorded), strict=False):
        if mine != theirs:
            break
        found += 1
    return found


def _together(trace: Sequence[TraceEntry]) -> list[tuple[object, ...]]:
    ordered: list[tuple[object, ...]] = []
    completed: list[tuple[object, ...]] = []
    for entry in trace:
        told = (*entry[:4], entry.pool_id, entry.device_free)
        if entry.action == "free_completed":
            completed.append(told)
            continue
        ordered += sorted(completed, key=repr) if completed else ()
        completed.clear()
        ordered.append(told)
    return [*ordered, *sorted(completed, key=repr)]
