"""When an allocator found no room, gave its cache back, tried again, and that time it went well."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from allocscope.alerts.forecast.constants import Constants
from allocscope.alerts.forecast.rows import (
    LARGEST,
    PAGE_BITS,
    PAGE_BYTES,
    UNKNOWN,
    Bools,
    Columns,
    Floats,
    Ints,
    Rows,
    Table,
    pages,
    push,
)

FLUSHES = 12


class Flushes(Table):
    """The latest of each, the latest last."""

    COLUMNS: ClassVar[Columns] = {
        "time_s": (np.float32, FLUSHES, -np.inf),
        "slack": (np.int32, FLUSHES, 0),
        "exact": (np.bool_, FLUSHES, False),
    }
    time_s: NDArray[np.float32]
    """Since the allocator's first sample."""
    slack: NDArray[np.int32]
    """What the next sample found left of the room, pages."""
    exact: Bools
    """The try was all that was got from the driver since: so much was left by it; else it may have been more."""

    def observe(self, rows: Rows, elapsed_s: Floats, slack_bytes: Ints, exact: Bools) -> None:
        """A flush of each."""
        push(self.time_s, rows, elapsed_s)
        push(self.slack, rows, pages(slack_bytes))
        push(self.exact, rows, exact)

    def lately(self, rows: Rows, elapsed_s: Floats, constants: Constants) -> Bools:
        """Which places hold one of late."""
        since_s = np.maximum(constants.warmup_s, elapsed_s - constants.flushes_s)
        late: Bools = self.time_s[rows] > since_s[:, None]
        return late

    def narrowest(self, rows: Rows, lately: Bools) -> Ints:
        """What the narrowest of late left, bytes; -1: there was none."""
        slack = np.where(lately, self.slack[rows], np.iinfo(np.int32).max).min(axis=1).astype(np.int64)
        return np.where(lately.any(axis=1), np.maximum(slack, 0) << PAGE_BITS, UNKNOWN)

    def narrowing(self, rows: Rows, lately: Bools, constants: Constants) -> Bools:
        """Whether they left less and less, and few more such steps are more than there is."""
        wanted = max(constants.narrowing_flushes, 2)
        told = lately & self.exact[rows]
        places = np.argsort(told, axis=1, kind="stable")[:, -wanted:]  # the latest that are told so, in their order
        slack = np.take_along_axis(self.slack[rows], places, axis=1).astype(np.int64)
        steps = -np.diff(slack, axis=1)
        found: Bools = (told.sum(axis=1) >= wanted) & (steps > 0).all(axis=1)
        return found & (slack[:, -1] < constants.narrowing_steps * steps[:, -1])

    def seconds_left(
        self, rows: Rows, lately: Bools, elapsed_s: Floats, total_bytes: Ints, constants: Constants
    ) -> Floats:
        """Until one leaves nothing, where they go on leaving less than any before; NaN: they do not.

        What a flush leaves tells of a step's worst moment with its holes and its request, as neither peaks nor what lies stranded
        beneath them do. The largest fall does not count: it may be a change that came once.
        """
        left = np.full(len(rows), np.nan)
        many = np.flatnonzero(lately.sum(axis=1) > constants.falling_flushes)
        if many.size:
            lately, time_s = lately[many], self.time_s[rows[many]].astype(np.float64)
            least = np.minimum.accumulate(np.where(lately, self.slack[rows[many]], LARGEST).astype(np.int64), axis=1)
            falls = _falls(least, _ends(lately, time_s, constants.burst_s))
            counted = falls * PAGE_BYTES > constants.move * total_bytes[many, None]
            falling = counted.sum(axis=1) >= constants.falling_flushes
            passed_s = elapsed_s[many] - np.where(lately, time_s, np.inf).min(axis=1)
            moved = falls.sum(axis=1) - falls.max(axis=1)
            left[many[falling]] = (np.maximum(least[:, -1], 0) * passed_s)[falling] / moved[falling]
        return left


def _ends(lately: Bools, time_s: Floats, burst_s: float) -> Bools:
    """Which flushes of late are the last of their burst."""
    burst = np.where(lately, time_s, -burst_s) // burst_s
    ends = lately.copy()
    ends[:, :-1] &= burst[:, :-1] != burst[:, 1:]
    return ends


def _falls(least: Ints, ends: Bools) -> Ints:
    """By how much the least so far is less at each end than at the one before; elsewhere 0."""
    latest = np.maximum.accumulate(np.where(ends, np.arange(FLUSHES), -1), axis=1)
    before = np.concatenate((np.full((len(ends), 1), -1), latest[:, :-1]), axis=1)
    fell = np.take_along_axis(least, np.maximum(before, 0), axis=1) - least
    return np.where(ends & (before >= 0), fell, 0)
