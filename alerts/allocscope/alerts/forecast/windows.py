"""Windows of time: how high and how low live memory went in each."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from allocscope.alerts.forecast.rows import LARGEST, PAGE_BITS, Bools, Columns, Ints, Rows, Table, push

WINDOWS = 30
"""So many are remembered on each scale: ten minutes on the finer, fifty on the coarser."""
LOOKBACK_WINDOWS = WINDOWS - 1
"""So far back trends are looked for, but never into the first half of a job's life: what warms up grows, too."""
MOST_SWINGS = 200

Int32s = NDArray[np.int32]


class Windows(Table):
    """The latest windows of one length, the latest last. Figures in pages."""

    COLUMNS: ClassVar[Columns] = {
        "count": (np.int8, 1, 0),
        "number": (np.int32, WINDOWS, -1),
        "trough": (np.int32, WINDOWS, 0),
        "trough_blocks": (np.int32, WINDOWS, 0),
        "record": (np.int32, WINDOWS, 0),
        "swings": (np.uint8, WINDOWS, 0),
        "fullest": (np.int32, 1, 0),
        "lower": (np.int32, 1, 0),
        "upper": (np.int32, 1, 0),
        "was_low": (np.bool_, 1, 0),
    }
    count: NDArray[np.int8]
    """How many windows there are."""
    number: Int32s
    """Counts windows of this length from the first sample on."""
    trough: Int32s
    """Least allocated at a sample."""
    trough_blocks: Int32s
    """Live blocks then; 0 where not known."""
    record: Int32s
    """The highest peak of the allocator's life, by the window's end."""
    swings: NDArray[np.uint8]
    """How often it went from its lower half to its upper: as many steps, unless they are faster than the samples."""
    fullest: Int32s
    """Most allocated at a sample of the latest window."""
    lower: Int32s
    upper: Int32s
    """The lower and the upper two fifths of where live memory moved in the window before."""
    was_low: Bools

    def __init__(self, window_us: int, rows: int) -> None:
        self.window_us = window_us
        super().__init__(rows)

    def numbers(self, elapsed_us: Ints) -> Ints:
        """Of the windows of these moments."""
        return np.minimum(elapsed_us // self.window_us, LARGEST)

    def observe(self, rows: Rows, elapsed_us: Ints, allocated: Ints, record: Ints, blocks: Ints) -> Bools:
        """A sample of each; where it began a new window."""
        number = self.numbers(elapsed_us)
        begun: Bools = self.number[rows, -1] != number
        if begun.any():
            self._begin(rows[begun], number[begun], allocated[begun], blocks[begun])
        lower = allocated < self.trough[rows, -1]
        if lower.any():
            self.trough[rows[lower], -1] = allocated[lower]
            self.trough_blocks[rows[lower], -1] = blocks[lower]
        self.fullest[rows] = np.maximum(self.fullest[rows], allocated)
        self.record[rows, -1] = record
        self._swing(rows, allocated)
        return begun

    def _begin(self, rows: Rows, number: Ints, allocated: Ints, blocks: Ints) -> None:
        known = rows[self.count[rows] > 0]
        low, high = self.trough[known, -1].astype(np.int64), self.fullest[known].astype(np.int64)
        self.lower[known] = low + (high - low) * 2 // 5
        self.upper[known] = low + (high - low) * 3 // 5
        push(self.number, rows, number)
        push(self.trough, rows, allocated)
        push(self.trough_blocks, rows, blocks)
        push(self.record, rows, 0)
        push(self.swings, rows, 0)
        self.fullest[rows] = allocated
        self.count[rows] = np.minimum(self.count[rows] + 1, WINDOWS)

    def _swing(self, rows: Rows, allocated: Ints) -> None:
        low = allocated <= self.lower[rows]
        up = ~low & self.was_low[rows] & (allocated >= self.upper[rows])
        self.was_low[rows[low]] = True
        if up.any():
            swung = rows[up]
            self.was_low[swung] = False
            self.swings[swung, -1] = np.minimum(self.swings[swung, -1], MOST_SWINGS - 1) + 1

    def lately(self, rows: Rows, elapsed_us: Ints) -> Ints:
        """How many of the latest windows trends are looked for in; the first of them is the one to compare the next with."""
        latest = self.numbers(elapsed_us)
        first = latest - np.minimum(LOOKBACK_WINDOWS, latest // 2)
        there = np.arange(WINDOWS) >= WINDOWS - self.count[rows][:, None]
        counted: Ints = np.sum(there & (self.number[rows] >= first[:, None]), axis=1)
        return counted

    def elapsed_s(self, rows: Rows, first: Ints, last: Ints) -> NDArray[np.float64]:
        """Between two windows of each row, by their places."""
        windows = (self.number[rows, last] - self.number[rows, first]).astype(np.float64)
        passed: NDArray[np.float64] = windows * (self.window_us / 1e6)
        return passed


class Peaks(Table):
    """What windows of the finer scale besides remember, place by place. In pages."""

    COLUMNS: ClassVar[Columns] = {"peak": (np.int32, WINDOWS, 0), "stranded": (np.int32, WINDOWS, 0)}
    peak: Int32s
    """Most allocated: by samples, and by the allocator's own peak where that moved in between."""
    stranded: Int32s
    """What lay stranded when most was allocated at a sample."""

    def observe(self, rows: Rows, begun: Bools, fuller: Bools, peak: Ints, stranded: Ints) -> None:
        """A sample of each; `fuller`: it has more than those before it in its window."""
        if begun.any():
            push(self.peak, rows[begun], 0)
            push(self.stranded, rows[begun], 0)
        self.peak[rows, -1] = np.maximum(self.peak[rows, -1], peak)
        fullest = begun | fuller
        self.stranded[rows[fullest], -1] = stranded[fullest]

    def highest(self, rows: Rows) -> Ints:
        """The highest peak that is remembered, bytes."""
        highest: Ints = self.peak[rows].max(axis=1).astype(np.int64) << PAGE_BITS
        return highest

    def stranded_lately(self, rows: Rows, count: Ints, windows: int) -> Ints:
        """Of what lay stranded in so many of the latest windows, what four of five had less than, bytes."""
        count = np.minimum(count, windows)
        return _four_of_five(self.stranded[rows, -windows:], count, np.full(len(rows), windows)) << PAGE_BITS

    def moved(self, rows: Rows, count: Ints) -> tuple[Ints, Ints]:
        """How far peaks, and what lay stranded, moved between the first and the last third of what is remembered, bytes."""
        third = np.maximum(count // 3, 1)
        early_end = WINDOWS - count + third
        late_end = np.full(len(rows), WINDOWS)
        peaks = _highest(self.peak[rows], third, late_end) - _highest(self.peak[rows], third, early_end)
        stranded = self.stranded[rows]
        holes = _four_of_five(stranded, third, late_end) - _four_of_five(stranded, third, early_end)
        return peaks << PAGE_BITS, holes << PAGE_BITS


def _among(width: int, count: Ints, end: Ints) -> Bools:
    """The `count` places before `end`, row by row."""
    places = np.arange(width)
    found: Bools = (places >= (end - count)[:, None]) & (places < end[:, None])
    return found


def _highest(figures: Int32s, count: Ints, end: Ints) -> Ints:
    highest: Ints = np.where(_among(figures.shape[1], count, end), figures, 0).max(axis=1).astype(np.int64)
    return highest


def _four_of_five(figures: Int32s, count: Ints, end: Ints) -> Ints:
    """Of the `count` figures before `end` the one that four of five are below; 0 of none."""
    width = figures.shape[1]
    ordered = np.sort(np.where(_among(width, count, end), figures, -1), axis=1)
    place = width - count + count * 4 // 5
    found: Ints = np.maximum(ordered[np.arange(len(figures)), np.minimum(place, width - 1)], 0).astype(np.int64)
    return found
