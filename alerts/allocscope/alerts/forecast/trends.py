"""What keeps moving: live peaks, live troughs, the others' share of the device.

A trend is several moves, the latest of them of late. Nothing here fits a line through noise: peaks are looked at by the records
that they break. Peaks that vary but do not grow break fewer and fewer of them (in the second half of any stretch ln 2, about
0.7, however they are distributed); so four in the second half of a job's life, or in the last stretch of a long one, come by
chance about once in a hundred and fifty.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from allocscope.alerts.forecast.constants import Constants
from allocscope.alerts.forecast.rooms import Rooms
from allocscope.alerts.forecast.rows import PAGE_BYTES, Bools, Floats, Ints, Rows, filled
from allocscope.alerts.forecast.windows import WINDOWS, Windows

LAST = WINDOWS - 1
_PLACES = np.arange(WINDOWS)


class Trend(NamedTuple):
    """Something that keeps moving, of each row; NaN: it does not."""

    bytes_per_s: Floats
    unevenness: Floats
    """By what part of it the halves of what was looked at differ from it."""

    @classmethod
    def none(cls, rows: int) -> Trend:
        """Of nobody."""
        return cls(np.full(rows, np.nan), np.zeros(rows))

    @property
    def found(self) -> Bools:
        """Where there is one."""
        return ~np.isnan(self.bytes_per_s)

    @property
    def speed(self) -> Floats:
        """0 where there is none."""
        return filled(self.bytes_per_s, 0.0)

    def put(self, where: Bools | Rows, other: Trend) -> None:
        """Take these over from another one."""
        self.bytes_per_s[where], self.unevenness[where] = other


def growth(windows: Windows, rows: Rows, elapsed_us: Ints, total_bytes: Ints, constants: Constants) -> Trend:
    """Peaks that go on breaking their record."""
    lately = windows.lately(rows, elapsed_us)
    record = windows.record[rows].astype(np.int64)
    moves = np.diff(record, axis=1)
    among = _PLACES[:-1] >= WINDOWS - lately[:, None]
    counted = among & (moves > (constants.move * total_bytes / PAGE_BYTES)[:, None])
    goes_on = counted[:, -constants.recent_windows :].any(axis=1)
    found = goes_on & (counted.sum(axis=1) >= _enough(windows, rows, lately, 0, constants))
    trend = Trend.none(len(rows))
    if found.any():
        first = counted[found].argmax(axis=1)
        trend.put(found, _between(windows, rows[found], record[found], first, WINDOWS - lately[found], LAST))
    return trend


def leak(windows: Windows, rows: Rows, elapsed_us: Ints, sparse: Bools, constants: Constants) -> Trend:
    """Troughs that rise and rise, with more and more live blocks: memory that nothing frees. The latest window is left out, its
    trough may be still to come; but where it is low already, something did free. Where samples are too sparse to meet each
    window's trough, the lowest of several windows tells.
    """
    lately = windows.lately(rows, elapsed_us)
    trend = Trend.none(len(rows))
    likely = lately - 1 > _enough(windows, rows, lately, 1, constants)
    for among, where in ((1, likely & ~sparse), (constants.smoothing_windows, likely & sparse)):
        at = np.flatnonzero(where)
        if at.size:
            first = WINDOWS - lately[at]
            trough, blocks = (f[rows[at], :-1].astype(np.int64) for f in (windows.trough, windows.trough_blocks))
            rising = _rises(_lowest(trough, among), first, among, constants)
            rising &= _rises(_lowest(blocks, among), first, among, constants, evenly=False)
            rising &= ~_comes_and_goes(windows, rows[at], first)
            found = _between(windows, rows[at], trough, first, first, LAST - 1)
            trend.put(at[rising], Trend(*(part[rising] for part in found)))
    return trend


def _comes_and_goes(windows: Windows, rows: Rows, first: Ints) -> Bools:
    """Whether live memory that rose from the place `first` on is back below that, or had been as high before."""
    trough = windows.trough[rows].astype(np.int64)
    before = (WINDOWS - windows.count[rows][:, None] <= _PLACES) & (first[:, None] > _PLACES)
    highest = np.where(before, trough, -1).max(axis=1)
    found: Bools = (trough[:, LAST] < trough[np.arange(len(rows)), first]) | (trough[:, LAST - 1] <= highest)
    return found


def _lowest(figures: Ints, among: int) -> Ints:
    """Of each so many in a row."""
    lowest: Ints = np.min([figures[:, i : figures.shape[1] - among + 1 + i] for i in range(among)], axis=0)
    return lowest


def _rises(figures: Ints, first: Ints, apart: int, constants: Constants, *, evenly: bool = True) -> Bools:
    """Whether figures rise from the place `first` on, each above the one so far before it, and all about alike."""
    rises = figures[:, apart:] - figures[:, :-apart]
    among = np.arange(rises.shape[1]) >= first[:, None]
    count = among.sum(axis=1)
    rising: Bools = (among & (rises > 0)).sum(axis=1) >= np.maximum(constants.rising_share * count, constants.records)
    if evenly:
        mean = np.sum(rises * among, axis=1) / np.maximum(count, 1)
        spread = np.sum((rises - mean[:, None]) ** 2 * among, axis=1) / np.maximum(count, 1)
        rising &= spread <= (constants.unevenness * mean) ** 2
    return rising


def troughs(scales: tuple[Windows, ...], rows: Rows, elapsed_us: Ints, constants: Constants) -> Floats:
    """How fast the troughs rise, on the coarsest scale that tells, steadily or not, bytes a second; NaN: they do not."""
    speed = np.full(len(rows), np.nan)
    told = np.zeros(len(rows), np.bool_)
    for windows in reversed(scales):
        lately = windows.lately(rows, elapsed_us)
        tells = ~told & (lately - 1 > constants.records)
        told |= tells
        at = rows[tells]
        first = WINDOWS - lately[tells]
        rise = windows.trough[at, LAST - 1].astype(np.int64) - windows.trough[at, first]
        rate = rise * PAGE_BYTES / windows.elapsed_s(at, first, np.full_like(first, LAST - 1))
        speed[tells] = np.where(rise > 0, rate, np.nan)
    return speed


def pressure(rooms: Rooms, rows: Rows, elapsed_us: Ints, total_bytes: Ints, constants: Constants) -> Trend:
    """Others that take more and more of the device."""
    room, time_s = rooms.pages[rows].astype(np.int64), rooms.time_s[rows].astype(np.float64)
    there = rooms.there(rows)[:, :-1]
    lost = np.where(there, room[:, :-1] - room[:, 1:], 0)
    losses = lost > (constants.room_move * total_bytes / PAGE_BYTES)[:, None]
    trend = Trend.none(len(rows))
    likely = losses.sum(axis=1) >= constants.room_losses
    if likely.any():
        at = (room[likely], time_s[likely][:, 1:], lost[likely], losses[likely], rooms.used_up[rows[likely]][:, 1:])
        trend.bytes_per_s[likely] = _one_growth(*at, elapsed_us[likely] / 1e6, constants)
    return trend


def _one_growth(
    room: Ints, time_s: Floats, lost: Ints, losses: Bools, used_up: Bools, now_s: Floats, constants: Constants
) -> Floats:
    """Of the latest losses, as far back as they follow one another."""
    before = np.maximum.accumulate(np.where(losses, time_s, -np.inf), axis=1)
    gap = time_s[:, 1:] - before[:, :-1]
    breaks = losses.copy()
    breaks[:, 1:] &= gap > constants.room_gap_s
    places = np.arange(losses.shape[1])
    start = np.max(np.where(breaks, places, 0), axis=1)
    losses = losses & (places >= start[:, None])
    count = losses.sum(axis=1)
    first_s = np.min(np.where(losses, time_s, np.inf), axis=1)
    last_s = np.max(np.where(losses, time_s, -np.inf), axis=1)
    loss = np.sum(lost * losses, axis=1)
    since = time_s > first_s[:, None]
    stalls = np.sum(since & used_up & (lost == 0), axis=1)
    gained = np.sum(np.where(since, np.maximum(-lost, 0), 0), axis=1)
    moving = (count >= constants.room_losses) & (count + stalls >= constants.room_moves) & (2 * gained <= loss)
    apart_s = (last_s - first_s) / np.maximum(count - 1, 1)
    moving &= now_s - last_s <= np.maximum(constants.room_recent_s, 2 * apart_s)
    largest = np.max(np.where(losses, lost, 0), axis=1)
    moving &= last_s > first_s
    speed = (loss - largest) * PAGE_BYTES / np.where(moving, last_s - first_s, 1.0)
    return np.where(moving, speed, np.nan)


def _between(windows: Windows, rows: Rows, figure: Ints, first: Ints, start: Ints, last: int) -> Trend:
    """A figure's move from the place `start` on, over the time from `first` on; and how its halves since `first` differ."""
    each = np.arange(len(rows))
    half = (last - first) // 2
    early = figure[each, first + half] - figure[each, first]
    late = figure[:, last] - figure[each, last - half]
    moved = (figure[:, last] - figure[each, start]) * PAGE_BYTES
    speed = moved / windows.elapsed_s(rows, first, np.full_like(first, last))
    return Trend(speed, np.abs(late - early) / np.maximum(late + early, 1))


def _enough(windows: Windows, rows: Rows, lately: Ints, without: int, constants: Constants) -> Ints:
    """How many records it takes: more where there were few steps, since several may have been broken in one and the same."""
    among = (WINDOWS - lately[:, None] <= _PLACES) & (LAST - without >= _PLACES)
    swings = np.sum(windows.swings[rows] * among, axis=1, dtype=np.int64)
    return np.where(swings >= constants.swings, constants.records, constants.few_swings_records)
