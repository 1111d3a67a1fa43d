"""What jobs ask for: their largest requests of late, as maps, errors and the driver's calls show them."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from allocscope.alerts.forecast.rows import LARGEST, Columns, Ints, Rows, Table
from allocscope.model import BlockMap

SPAN_US = 100_000_000
SPANS = 7
"""The present span and six before it, ten minutes at least: a request that comes with a checkpoint or an evaluation is made again."""


class Requests(Table):
    """The largest of each of the latest spans of time."""

    COLUMNS: ClassVar[Columns] = {"span": (np.int32, SPANS, -1), "bytes": (np.int64, SPANS, 0)}
    span: NDArray[np.int32]
    """Which one, counted in unix time."""
    bytes: Ints

    def observe(self, rows: Rows, time_us: Ints, request_bytes: Ints) -> None:
        """A request of each."""
        span = _span(time_us)
        place = span % SPANS
        new = self.span[rows, place] != span
        self.bytes[rows, place] = np.where(new, request_bytes, np.maximum(self.bytes[rows, place], request_bytes))
        self.span[rows, place] = span

    def largest(self, rows: Rows, time_us: Ints) -> Ints:
        """The largest of late, bytes; -1: nothing is known."""
        span = _span(time_us)[:, None]
        there = (self.span[rows] >= 0) & (self.span[rows] > span - SPANS) & (self.span[rows] <= span)
        largest: Ints = np.where(there, self.bytes[rows], -1).max(axis=1)
        return largest


def _span(time_us: Ints) -> Ints:
    return np.minimum(time_us // SPAN_US, LARGEST)


def largest_live(block_map: BlockMap) -> int | None:
    """The largest request that was live at a map's moment."""
    return max((c.largest_bytes for group in block_map.groups for c in group.live), default=None)
