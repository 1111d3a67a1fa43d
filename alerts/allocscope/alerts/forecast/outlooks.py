"""The door: what was seen of allocators, a row each, and what follows from it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from allocscope.alerts.forecast import trends
from allocscope.alerts.forecast.constants import Constants
from allocscope.alerts.forecast.facts import Facts
from allocscope.alerts.forecast.flushes import Flushes
from allocscope.alerts.forecast.judgement import CAUSES, NO_CAUSE, OK, STATES, Judgement, Levels
from allocscope.alerts.forecast.requests import Requests, largest_live
from allocscope.alerts.forecast.rooms import Rooms
from allocscope.alerts.forecast.rows import (
    PAGE_BITS,
    UNKNOWN,
    Bools,
    Columns,
    Floats,
    Ints,
    Rows,
    Table,
    bounded,
    pages,
)
from allocscope.alerts.forecast.samples import Figures, of_chunk, of_samples
from allocscope.alerts.forecast.windows import Peaks, Windows
from allocscope.alerts.forecast.words import describe
from allocscope.allocator.errors import SettingsError
from allocscope.allocator.headroom import bounds_from_counters, headroom
from allocscope.allocator.settings import AllocatorSettings, parse_settings
from allocscope.model import BlockMap, DeviceReading, Event, EventKind, Forecast, Sample, SampleChunk, State

SCALES_US = (20_000_000, 100_000_000)
"""Windows of live memory, on two scales: the finer for jobs with steps of up to some ten seconds, the coarser for slower ones,
and for what grows slowly."""
SET_BACK_US = 60_000_000
"""Times that go back by no more than this are passed over until they are made up for; by more, the clock was set."""
READINGS = 5
"""Of so many readings of the device the middle one counts: each is of another moment than the counters."""
READING_APART_US = 2_000_000
"""A reading so far from the latest sample tells nothing about who uses what."""
MAP_HOLDS_US = 30_000_000
"""So long a map's headroom is told; then what the counters are sure of."""
FIRST_ROWS = 64


class _Latest(Table):
    """What each allocator said last, and what is known of its device. Bytes; -1: not known."""

    COLUMNS: ClassVar[Columns] = {
        "sequence": (np.int64, 1, UNKNOWN),
        "time_us": (np.int64, 1, UNKNOWN),
        "started_us": (np.int64, 1, UNKNOWN),
        "samples": (np.int32, 1, 0),
        "allocated": (np.int64, 1, UNKNOWN),
        "reserved": (np.int64, 1, UNKNOWN),
        "active": (np.int64, 1, UNKNOWN),
        "split": (np.int64, 1, UNKNOWN),
        "private": (np.int64, 1, UNKNOWN),
        "peak": (np.int64, 1, UNKNOWN),
        "retries": (np.int64, 1, UNKNOWN),
        "device_allocs": (np.int64, 1, UNKNOWN),
        "device_frees": (np.int64, 1, UNKNOWN),
        "free": (np.int64, 1, UNKNOWN),
        "holes": (np.int64, 1, UNKNOWN),
        "record": (np.int64, 1, 0),
        "total": (np.int64, 1, UNKNOWN),
        "allowed": (np.int64, 1, UNKNOWN),
        "room": (np.int64, 1, UNKNOWN),
        "stranded": (np.int64, 1, 0),
        "others": (np.int32, READINGS, UNKNOWN),
        "expandable": (np.bool_, 1, False),
        "map_us": (np.int64, 1, UNKNOWN),
        "map_headroom": (np.int64, 1, UNKNOWN),
        "stale": (np.bool_, 1, True),
        "growth_speed": (np.float32, 1, np.nan),
        "growth_unevenness": (np.float32, 1, 0),
        "leak_speed": (np.float32, 1, np.nan),
        "leak_unevenness": (np.float32, 1, 0),
        "troughs_speed": (np.float32, 1, np.nan),
    }
    sequence: Ints
    time_us: Ints
    started_us: Ints
    """Of the first sample."""
    samples: NDArray[np.int32]
    """Since then."""
    allocated: Ints
    reserved: Ints
    active: Ints
    split: Ints
    """Free pieces of partly used segments."""
    private: Ints
    """What private pools reserved."""
    peak: Ints
    """The allocator's own, of what was allocated."""
    retries: Ints
    device_allocs: Ints
    device_frees: Ints
    free: Ints
    """Of the device."""
    holes: Ints
    record: Ints
    """The highest peak of its life."""
    total: Ints
    """The device's."""
    allowed: Ints
    """What a memory fraction lets the allocator reserve."""
    room: Ints
    """What the others leave of the device, or a limit allows."""
    stranded: Ints
    others: NDArray[np.int32]
    """What the device's other users have, by the latest readings, pages."""
    expandable: Bools
    map_us: Ints
    map_headroom: Ints
    """By the latest map."""
    stale: Bools
    """Whether windows changed since trends were last looked for."""
    growth_speed: NDArray[np.float32]
    growth_unevenness: NDArray[np.float32]
    leak_speed: NDArray[np.float32]
    leak_unevenness: NDArray[np.float32]
    troughs_speed: NDArray[np.float32]


class _Unasked(NamedTuple):
    """A map, and what else was known at its moment."""

    block_map: BlockMap
    settings: AllocatorSettings
    free_bytes: int
    allowed_bytes: int | None

    def headroom_bytes(self) -> int:
        """What would have fitted then."""
        fits = headroom(
            self.block_map, self.settings, device_free_bytes=self.free_bytes, allowed_bytes=self.allowed_bytes
        )
        return bounded(fits.request_bytes)


@dataclass(frozen=True, slots=True)
class Foreseen:
    """What follows, of each row that was asked for."""

    time_us: Ints
    level: Levels
    cause: Levels
    ready: Bools
    """Whether there was anything to judge by; else it is what was said last."""
    facts: Facts
    """Of those that are ready."""

    def forecasts(self) -> Iterator[Forecast]:
        """Each allocator's."""
        return map(self.forecast, range(len(self.time_us)))

    def outcome(self, i: int) -> Forecast:
        """One allocator's state and cause, without figures."""
        cause = self.cause[i]
        return Forecast(int(self.time_us[i]), STATES[self.level[i]], CAUSES[cause] if cause != NO_CAUSE else None)

    def forecast(self, i: int) -> Forecast:
        """One allocator's."""
        outcome = self.outcome(i)
        if not self.ready[i]:
            return outcome
        facts = self.facts.row(int(self.ready[:i].sum()))
        headroom_bytes, request_bytes = _known(facts.headroom[0]), _known(facts.request[0])
        ratio = None
        if headroom_bytes is not None and request_bytes is not None:
            ratio = (headroom_bytes - request_bytes) / int(facts.total[0])
        left = float(facts.seconds_left[0])
        return replace(
            outcome,
            headroom_bytes=headroom_bytes,
            request_bytes=request_bytes,
            margin_ratio=ratio,
            seconds_to_oom=None if np.isnan(left) else left,
            summary=describe(facts) if outcome.state is not State.OK else "",
        )


class Outlooks:
    """Many allocators, a row each. Cheap to tell (`observe…`); `forecast` says what follows.

    Samples go by their numbers: one that was seen already, or comes after a later one, is passed over.
    """

    def __init__(self, constants: Constants = Constants()) -> None:  # noqa: B008 (frozen)
        self._constants = constants
        self._latest = _Latest(FIRST_ROWS)
        self._scales = tuple(Windows(window_us, FIRST_ROWS) for window_us in SCALES_US)
        self._peaks, self._rooms, self._flushes = Peaks(FIRST_ROWS), Rooms(FIRST_ROWS), Flushes(FIRST_ROWS)
        self._requests, self._judgement = Requests(FIRST_ROWS), Judgement(FIRST_ROWS)
        self._history: tuple[Table, ...] = (*self._scales, self._peaks, self._rooms, self._flushes)
        self._tables = (self._latest, *self._history, self._requests, self._judgement)
        self._settings: list[AllocatorSettings] = [AllocatorSettings()] * FIRST_ROWS
        self._maps: dict[int, _Unasked] = {}
        """By row: the latest map, where nobody has asked for its headroom yet."""
        self._vacant = list(range(FIRST_ROWS))[::-1]

    @property
    def row_bytes(self) -> int:
        """What one allocator takes."""
        return sum(table.row_bytes() for table in self._tables)

    def add(self, *, device_total_bytes: int | None, allowed_bytes: int | None, allocator_conf: str | None) -> int:
        """A row for an allocator of which nothing else is known yet."""
        if not self._vacant:
            rows = self._latest.rows
            for table in self._tables:
                table.grow(2 * rows)
            self._settings += [AllocatorSettings()] * rows
            self._vacant = list(range(rows, 2 * rows))[::-1]
        row = self._vacant.pop()
        self._latest.total[row] = UNKNOWN if device_total_bytes is None else bounded(device_total_bytes)
        self.amend(row, allowed_bytes=allowed_bytes, allocator_conf=allocator_conf)
        return row

    def amend(self, row: int, *, allowed_bytes: int | None, allocator_conf: str | None) -> None:
        """A program may set its allocator's limit and settings while it runs."""
        self._settings[row] = _settings(allocator_conf)
        self._latest.expandable[row] = self._settings[row].expandable
        self._latest.allowed[row] = UNKNOWN if allowed_bytes is None else bounded(allowed_bytes)

    def drop(self, row: int) -> None:
        """Forget an allocator; its row is another one's next."""
        for table in self._tables:
            table.clear(np.array([row]))
        self._maps.pop(row, None)
        self._vacant.append(row)

    # what is told

    def observe(self, rows: Rows, figures: Figures) -> Bools:
        """A sample of each of these rows, no row twice; which were new."""
        latest = self._latest
        new = figures.sequence > latest.sequence[rows]
        before_us, time_us = latest.time_us[rows], figures.time_us
        takes = new & (figures.allocated_bytes >= 0) & (figures.reserved_bytes >= 0)
        takes &= ~((before_us - SET_BACK_US <= time_us) & (time_us < before_us))
        if takes.all():
            self._take(rows, figures)
        elif takes.any():
            self._take(rows[takes], figures.among(takes))
        return new

    def _take(self, rows: Rows, now: Figures) -> None:
        latest = self._latest
        first = now.time_us < latest.time_us[rows]
        first |= latest.started_us[rows] < 0
        if first.any():
            self._restart(rows[first], now.among(first))
        own_peak, allocated = now.allocated_peak_bytes, now.allocated_bytes
        moved = ~first & (own_peak >= allocated) & (own_peak != latest.peak[rows])
        peak = np.where(moved, own_peak, allocated)  # an unmoved peak is of an earlier moment
        held = ~latest.expandable[rows]
        latest.stranded[rows[held]] = np.maximum(now.inactive_split_bytes[held], 0)
        self._remember(rows, now, peak)
        self._take_room(rows, now)
        if not first.all():
            again = ~first
            self._compare(rows[again], now.among(again))
        latest.sequence[rows], latest.time_us[rows] = now.sequence, now.time_us
        latest.samples[rows] += 1
        latest.allocated[rows], latest.reserved[rows] = allocated, now.reserved_bytes
        latest.active[rows], latest.split[rows] = now.active_bytes, now.inactive_split_bytes
        latest.private[rows], latest.peak[rows] = now.private_pools_reserved_bytes, own_peak
        latest.retries[rows], latest.holes[rows] = now.num_alloc_retries, now.inactive_split_count
        latest.device_allocs[rows], latest.device_frees[rows] = now.num_device_alloc, now.num_device_free
        latest.free[rows] = now.device_free_bytes

    def _restart(self, rows: Rows, now: Figures) -> None:
        """A first sample, or the clock was set: what went before is known by its peak only."""
        for table in self._history:
            table.clear(rows)
        self._latest.started_us[rows], self._latest.samples[rows] = now.time_us, 0
        self._latest.record[rows] = np.maximum(now.allocated_peak_bytes, now.allocated_bytes)
        self._latest.stale[rows] = True

    def _remember(self, rows: Rows, now: Figures, peak: Ints) -> None:
        latest = self._latest
        elapsed_us = now.time_us - latest.started_us[rows]
        higher = peak > latest.record[rows]
        latest.record[rows] = np.maximum(peak, latest.record[rows])
        record, allocated = pages(latest.record[rows]), pages(now.allocated_bytes)
        blocks = np.clip(now.allocation_count, 0, np.iinfo(np.int32).max)
        fuller = allocated > self._scales[0].fullest[rows]
        begun = [windows.observe(rows, elapsed_us, allocated, record, blocks) for windows in self._scales]
        self._peaks.observe(rows, begun[0], fuller, pages(peak), pages(latest.stranded[rows]))
        latest.stale[rows] |= higher | begun[0] | begun[1]

    def _take_room(self, rows: Rows, now: Figures) -> None:
        """The most that an allocator may come to reserve: what others leave of the device, or what it is allowed."""
        latest = self._latest
        told = now.device_total_bytes >= 0
        latest.total[rows[told]] = now.device_total_bytes[told]
        total = latest.total[rows]
        read = (latest.others[rows, -1] >= 0) & (total >= 0)
        left = np.where(read, total - self._others(rows), UNKNOWN) if read.any() else np.full(len(rows), UNKNOWN)
        free = now.device_free_bytes
        left = np.where(free >= 0, free + now.reserved_bytes, left)
        bounds = np.array([np.where(b >= 0, b, np.iinfo(np.int64).max) for b in (left, total, latest.allowed[rows])])
        room = bounds.min(axis=0)
        known = room < np.iinfo(np.int64).max
        latest.room[rows] = np.where(known, room, UNKNOWN)
        used_up = room - now.reserved_bytes < self._constants.used_up * np.where(total > 0, total, room)
        if not known.all():
            rows, room, used_up, now = rows[known], room[known], used_up[known], now.among(known)
        self._rooms.observe(rows, self._elapsed_s(rows, now.time_us), room, used_up)

    def _others(self, rows: Rows) -> Ints:
        """The middle one of the latest readings."""
        readings = np.sort(self._latest.others[rows], axis=1).astype(np.int64)
        unknown = np.sum(readings < 0, axis=1)
        middle = unknown + (READINGS - unknown - 1) // 2
        found: Ints = readings[np.arange(len(rows)), np.minimum(middle, READINGS - 1)] << PAGE_BITS
        return found

    def _compare(self, rows: Rows, now: Figures) -> None:
        """What happened since the sample before."""
        latest = self._latest
        before, allocs = latest.device_allocs[rows], now.num_device_alloc
        got = now.reserved_bytes - latest.reserved[rows]
        asked = (before >= 0) & (allocs - before == 1) & (now.num_device_free == latest.device_frees[rows]) & (got > 0)
        asked &= ~latest.expandable[rows]
        if asked.any():  # what one request made the driver give
            self._requests.observe(rows[asked], now.time_us[asked], got[asked])
        rounds = _rise(latest.retries[rows], now.num_alloc_retries)
        flushed = (rounds > 0) & (latest.room[rows] >= 0)
        if flushed.any():
            exact = ~latest.expandable[rows] & (_rise(before, allocs) <= rounds)
            slack = latest.room[rows] - now.reserved_bytes
            at = rows[flushed]
            elapsed_s = self._elapsed_s(at, now.time_us[flushed])
            self._flushes.observe(at, elapsed_s, slack[flushed], exact[flushed])

    def observe_map(self, row: int, block_map: BlockMap) -> None:
        """A block map: of expandable segments it alone tells of holes; and what is live was asked for."""
        self.observe_maps(np.array([row]), [block_map])

    def observe_maps(self, rows: Rows, block_maps: Sequence[BlockMap]) -> None:
        """A block map of each of these rows, no row twice."""
        latest = self._latest
        time_us = np.array([block_map.time_us for block_map in block_maps])
        asked = np.array([UNKNOWN if (live := largest_live(m)) is None else bounded(live) for m in block_maps])
        if (known := asked >= 0).any():
            self._requests.observe(rows[known], time_us[known], asked[known])
        expandable = [any(group.expandable for group in block_map.groups) for block_map in block_maps]
        latest.expandable[rows] = expandable
        for row, free, is_expandable, block_map in zip(
            rows.tolist(), self._free(rows).tolist(), expandable, block_maps, strict=True
        ):
            if is_expandable:
                latest.stranded[row] = bounded(sum(group.stranded_bytes for group in block_map.groups))
            if free >= 0:
                latest.map_us[row] = block_map.time_us
                self._maps[row] = _Unasked(block_map, self._settings[row], free, _known(int(latest.allowed[row])))

    def observe_event(self, row: int, event: Event) -> None:
        """An OOM that the program may have survived: what was asked for in vain may be asked for again."""
        if event.kind is EventKind.OOM and event.requested_bytes is not None:
            request = bounded(event.requested_bytes)
            self._requests.observe(np.array([row]), np.array([event.time_us]), np.array([request]))

    def observe_device(self, row: int, reading: DeviceReading) -> None:
        """The device as its node sees it, for where the samples do not know what is free."""
        latest, total, free = self._latest, reading.device.total_bytes, reading.free_bytes
        if total is not None and latest.total[row] < 0:
            latest.total[row] = bounded(total)
        if total is None or free is None or latest.reserved[row] < 0:
            return
        if abs(reading.time_us - int(latest.time_us[row])) <= READING_APART_US:
            others = np.array([bounded(max(total - free - int(latest.reserved[row]), 0))])
            latest.others[row, :-1] = latest.others[row, 1:]
            latest.others[row, -1] = pages(others)[0]

    # what follows

    def forecast(self, rows: Rows, now_us: Ints, *, in_full: Bools | None = None) -> Foreseen:
        """What follows from all that was seen of these rows. `in_full`: of which the headroom is wanted though they are ok; None: of all."""
        latest, judgement = self._latest, self._judgement
        ready = (self._scales[0].count[rows] >= 2) & (latest.room[rows] >= 0) & (latest.total[rows] > 0)
        at, moments_us = rows[ready], now_us[ready]
        facts = self._facts(at, moments_us)
        warm = moments_us - latest.started_us[at] >= self._constants.warmup_s * 1e6
        judgement.judge(at, facts, warm, moments_us)
        wanted = np.ones(len(at), np.bool_) if in_full is None else in_full[ready] | (judgement.level[at] > OK)
        facts.headroom[wanted] = self._headroom(at[wanted], moments_us[wanted])
        return Foreseen(now_us, judgement.level[rows], judgement.cause[rows], ready, facts)

    def _facts(self, rows: Rows, now_us: Ints) -> Facts:
        """All but the headroom, which no state hangs on."""
        latest, constants = self._latest, self._constants
        elapsed_us = latest.time_us[rows] - latest.started_us[rows]
        self._look_for_trends(rows, elapsed_us)
        total, room = latest.total[rows], latest.room[rows]
        flushes = self._flushes.lately(rows, elapsed_us / 1e6, constants)
        return Facts(
            total=total,
            room=room,
            peak=self._peaks.highest(rows),
            stranded=self._peaks.stranded_lately(rows, self._windows_of(rows), constants.stranded_windows),
            growth=trends.Trend(_float(latest.growth_speed[rows]), _float(latest.growth_unevenness[rows])),
            leak=trends.Trend(_float(latest.leak_speed[rows]), _float(latest.leak_unevenness[rows])),
            pressure=trends.pressure(self._rooms, rows, elapsed_us, total, constants),
            troughs=_float(latest.troughs_speed[rows]),
            moved_by_neighbour=self._moved_by_neighbour(rows),
            flushes=flushes.sum(axis=1),
            slack=self._flushes.narrowest(rows, flushes),
            narrowing=self._flushes.narrowing(rows, flushes, constants),
            slack_left_s=self._flushes.seconds_left(rows, flushes, elapsed_us / 1e6, total, constants),
            request=self._requests.largest(rows, now_us),
            headroom=np.full(len(rows), UNKNOWN, np.int64),
            holes=np.where(latest.expandable[rows], UNKNOWN, latest.holes[rows]),
            constants=constants,
        )

    def _look_for_trends(self, rows: Rows, elapsed_us: Ints) -> None:
        """Anew, of those whose windows changed."""
        latest, constants = self._latest, self._constants
        stale = latest.stale[rows]
        if not stale.any():
            return
        rows, elapsed_us = rows[stale], elapsed_us[stale]
        sparse = elapsed_us > constants.sparse_s * 1e6 * latest.samples[rows]
        growth, leak = trends.Trend.none(len(rows)), trends.Trend.none(len(rows))
        for windows in reversed(self._scales):  # the finest that tells counts
            found = trends.growth(windows, rows, elapsed_us, latest.total[rows], constants)
            growth.put(found.found, trends.Trend(*(part[found.found] for part in found)))
            found = trends.leak(windows, rows, elapsed_us, sparse, constants)
            leak.put(found.found, trends.Trend(*(part[found.found] for part in found)))
        latest.growth_speed[rows], latest.growth_unevenness[rows] = growth
        latest.leak_speed[rows], latest.leak_unevenness[rows] = leak
        latest.troughs_speed[rows] = trends.troughs(self._scales, rows, elapsed_us, constants)
        latest.stale[rows] = False

    def _moved_by_neighbour(self, rows: Rows) -> Bools:
        """Whether others took most of the margin between the beginning and the end of what is remembered."""
        lost = self._rooms.taken(rows, self._latest.room[rows])
        moved = lost > 0
        if moved.any():
            at = rows[moved]
            by_peaks, by_holes = self._peaks.moved(at, self._windows_of(at))
            moved[moved] = lost[moved] >= np.maximum(by_peaks, by_holes)
        return moved

    def _windows_of(self, rows: Rows) -> Ints:
        """How many of the finer scale are remembered."""
        return self._scales[0].count[rows].astype(np.int64)

    def _headroom(self, rows: Rows, now_us: Ints) -> Ints:
        """The largest request that would succeed: by the latest map, or what the counters are sure of."""
        latest = self._latest
        by_map = (latest.map_us[rows] >= 0) & (now_us - latest.map_us[rows] <= MAP_HOLDS_US)
        for row in rows[by_map].tolist() if self._maps else ():
            if (unasked := self._maps.pop(row, None)) is not None:
                latest.map_headroom[row] = unasked.headroom_bytes()
        found = np.where(by_map, latest.map_headroom[rows], UNKNOWN)
        for i in np.flatnonzero(~by_map):
            found[i] = self._lower_bound(int(rows[i]))
        return found

    def _lower_bound(self, row: int) -> int:
        latest, free = self._latest, int(self._free(np.array([row]))[0])
        if free < 0 or latest.time_us[row] < 0:
            return UNKNOWN
        known = {name: _known(getattr(latest, column)[row]) for name, column in _COUNTERS.items()}
        bounds = bounds_from_counters(
            Sample(0, 0, **known),
            self._settings[row],
            device_free_bytes=free,
            allowed_bytes=_known(latest.allowed[row]),
        )
        return bounded(bounds.lower_bytes)

    def _free(self, rows: Rows) -> Ints:
        """Of the device, bytes; -1: not known."""
        latest = self._latest
        by_room = np.maximum(latest.room[rows] - np.maximum(latest.reserved[rows], 0), 0)
        free = np.where(latest.free[rows] >= 0, latest.free[rows], np.where(latest.room[rows] >= 0, by_room, UNKNOWN))
        return np.where(latest.time_us[rows] >= 0, free, UNKNOWN)

    def _elapsed_s(self, rows: Rows, time_us: Ints) -> Floats:
        elapsed: Floats = (time_us - self._latest.started_us[rows]) / 1e6
        return elapsed


class Outlook:
    """One allocator, by itself or among others."""

    __slots__ = ("_all", "_rows", "row")

    def __init__(
        self,
        *,
        device_total_bytes: int | None,
        allowed_bytes: int | None,
        allocator_conf: str | None,
        among: Outlooks | None = None,
    ) -> None:
        self._all = Outlooks() if among is None else among
        self.row = self._all.add(
            device_total_bytes=device_total_bytes, allowed_bytes=allowed_bytes, allocator_conf=allocator_conf
        )
        """Among the others."""
        self._rows = np.array([self.row])

    def amend(self, *, allowed_bytes: int | None, allocator_conf: str | None) -> None:
        """As `Outlooks.amend`."""
        self._all.amend(self.row, allowed_bytes=allowed_bytes, allocator_conf=allocator_conf)

    def drop(self) -> None:
        """Forget it; nothing may be told to it, or asked of it, after that."""
        self._all.drop(self.row)

    def observe(self, sample: Sample) -> bool:
        """One sample; whether it was new."""
        return bool(self._all.observe(self._rows, of_samples([sample]))[0])

    def observe_chunk(self, chunk: SampleChunk) -> None:
        """Many samples."""
        figures = of_chunk(chunk)
        for i in range(len(chunk)):
            self._all.observe(self._rows, figures.among(np.array([i])))

    def observe_map(self, block_map: BlockMap) -> None:
        """As `Outlooks.observe_map`."""
        self._all.observe_map(self.row, block_map)

    def observe_event(self, event: Event) -> None:
        """As `Outlooks.observe_event`."""
        self._all.observe_event(self.row, event)

    def observe_device(self, reading: DeviceReading) -> None:
        """As `Outlooks.observe_device`."""
        self._all.observe_device(self.row, reading)

    def forecast(self, now_us: int) -> Forecast:
        """What follows from all that was seen."""
        return self._all.forecast(self._rows, np.array([now_us])).forecast(0)


_COUNTERS = {
    "allocated_bytes": "allocated",
    "reserved_bytes": "reserved",
    "active_bytes": "active",
    "inactive_split_bytes": "split",
    "private_pools_reserved_bytes": "private",
}


@lru_cache(maxsize=1024)
def _settings(allocator_conf: str | None) -> AllocatorSettings:
    try:
        return parse_settings(allocator_conf or "")
    except SettingsError:  # of a version that knows more: the counters tell enough
        return AllocatorSettings()


def _rise(before: Ints, now: Ints) -> Ints:
    """How far a counter rose; one that was reset, or is not known, did not."""
    return np.where((before >= 0) & (now >= 0), np.maximum(now - before, 0), 0)


def _known(figure: int) -> int | None:
    return int(figure) if figure >= 0 else None


def _float(column: NDArray[np.float32]) -> Floats:
    return column.astype(np.float64)
