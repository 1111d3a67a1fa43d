"""When an allocator found no room, gave its cache back, tried again, and that time it went well."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from allocscope.alerts.forecast.constants import Constants
from allocscope.alerts.forecast.rows import (
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
        found = np.zeros(len(rows), np.bool_)
        for i in np.flatnonzero((lately & self.exact[rows]).sum(axis=1) >= wanted):
            slack = self.slack[rows[i]][lately[i] & self.exact[rows[i]]][-wanted:].astype(np.int64)
            steps = -np.diff(slack)
            found[i] = bool((steps > 0).all() and slack[-1] < constants.narrowing_steps * steps[-1])
        return found

    def seconds_left(
        self, rows: Rows, lately: Bools, elapsed_s: Floats, total_bytes: Ints, constants: Constants
    ) -> Floats:
        """Until one leaves nothing, where they go on leaving less than any before; NaN: they do not.

        What a flush leaves tells of a step's worst moment with its holes and its request, as neither peaks nor what lies stranded
        beneath them do. The largest fall does not count: it may be a change that came once.
        """
        left = np.full(len(rows), np.nan)
        for i in np.flatnonzero(lately.sum(axis=1) > constants.falling_flushes):
            time_s, slack = self.time_s[rows[i]][lately[i]], self.slack[rows[i]][lately[i]].astype(np.int64)
            begins = np.flatnonzero(np.diff(time_s // constants.burst_s, prepend=-1))
            least = np.minimum.accumulate(np.minimum.reduceat(slack, begins))
            falls = -np.diff(least)
            if np.sum(falls * PAGE_BYTES > constants.move * total_bytes[i]) >= constants.falling_flushes:
                speed = (falls.sum() - falls.max()) / (elapsed_s[i] - time_s[begins[0]])
                left[i] = max(least[-1], 0) / speed
        return left
