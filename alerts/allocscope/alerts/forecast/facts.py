"""What a forecast is made from, at a moment: one column a figure, one row an allocator."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from allocscope.alerts.forecast.constants import Constants
from allocscope.alerts.forecast.rows import Bools, Floats, Ints, Rows, filled
from allocscope.alerts.forecast.trends import Trend


@dataclass(frozen=True, slots=True)
class Facts:
    """Sizes in bytes, speeds in bytes a second; -1 or NaN: there is none, or it is not known."""

    total: Ints
    room: Ints
    """What the others leave of the device, or a limit allows."""
    peak: Ints
    """The highest of late."""
    stranded: Ints
    """Lies stranded when it peaks."""
    growth: Trend
    leak: Trend
    pressure: Trend
    troughs: Floats
    """How they rise, steadily or not."""
    moved_by_neighbour: Bools
    """Whether others took most of the margin, over all that is remembered."""
    flushes: Ints
    """Of late, count."""
    slack: Ints
    """What the narrowest of them left."""
    narrowing: Bools
    """Whether they left less and less, and few more such steps are more than there is."""
    slack_left_s: Floats
    """Until a flush leaves nothing, where they leave less and less; NaN: they do not."""
    request: Ints
    """The largest that is known."""
    headroom: Ints
    holes: Ints
    """Count."""
    constants: Constants

    @property
    def margin(self) -> Ints:
        """What is left of the room at peaks, if what lies stranded then served nothing."""
        return self.room - self.peak - self.stranded

    @property
    def by_holes(self) -> Bools:
        """Where more lies stranded than is left."""
        holes: Bools = (self.stranded > self.margin) & (self.stranded > 0)
        return holes

    @property
    def growing(self) -> Floats:
        """How fast the need grows. A leak below peaks that do not grow counts where it is going to lift them."""
        leak = self.leak.speed
        lifts = leak * self.constants.critical_horizon_s >= self.constants.lifts * self.total
        return np.where(self.growth.found | lifts, np.maximum(self.growth.speed, leak), 0.0)

    @property
    def closing(self) -> Floats:
        """How fast need and room near each other; 0: no trend."""
        return self.growing + self.pressure.speed

    @property
    def meet_s(self) -> Floats:
        """Until they meet; NaN: no trend."""
        closing = self.closing
        return np.where(closing > 0, np.maximum(self.margin, 0) / np.where(closing > 0, closing, 1.0), np.nan)

    @property
    def seconds_left(self) -> Floats:
        """Until they meet, or a flush leaves nothing; NaN: no trend."""
        soonest: Floats = np.fmin(self.meet_s, self.slack_left_s)
        return soonest

    @property
    def unevenness(self) -> Floats:
        """The most uneven trend's."""
        parts = [np.where(t.found, t.unevenness, 0.0) for t in (self.growth, self.leak, self.pressure)]
        most: Floats = np.max(parts, axis=0)
        return most

    def lifted_by(self, troughs: Floats) -> Bools:
        """Whether it is troughs that rise so which lift the peaks."""
        return filled(troughs, -1.0) >= self.constants.leak_share * self.growing

    def among(self, where: Bools | Rows) -> Facts:
        """Some of them."""
        return Facts(**{f.name: _among(getattr(self, f.name), where) for f in fields(self)})

    def row(self, i: int) -> Facts:
        """One allocator's."""
        return self.among(np.array([i]))


def _among(column: Any, where: Bools | Rows) -> Any:
    if isinstance(column, Constants):
        return column
    return Trend(*(part[where] for part in column)) if isinstance(column, Trend) else column[where]
