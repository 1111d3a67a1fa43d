"""What is remembered of each allocator, in columns: a row each, bounded, under two kilobytes.

Sizes are remembered in pages of 4 KiB, which four bytes hold up to 8 TiB; nothing that is foreseen hangs on less than a page.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Rows = NDArray[np.intp]

PAGE_BITS = 12
PAGE_BYTES = 1 << PAGE_BITS
LARGEST = (1 << 31) - 1
"""In pages, or in hundredths of a second: eight months."""
LARGEST_BYTES = 1 << 60
"""Who says more is taken to have said this: sums of a few still fit into eight bytes, so that no figure ends a round."""
UNKNOWN = -1

Columns = dict[str, tuple[type[np.generic], int, float]]
"""By name: (type, width, what an empty row holds)."""


class Table:
    """Columns that grow together. A subclass names them in COLUMNS."""

    COLUMNS: ClassVar[Columns] = {}

    def __init__(self, rows: int) -> None:
        self.rows = 0
        self.grow(rows)

    @classmethod
    def row_bytes(cls) -> int:
        """What a row takes."""
        return sum(np.dtype(kind).itemsize * width for kind, width, _ in cls.COLUMNS.values())

    def grow(self, rows: int) -> None:
        """Make room; what is there stays."""
        for name, (kind, width, empty) in self.COLUMNS.items():
            column: NDArray[Any] = np.full((rows, width) if width > 1 else rows, empty, kind)
            if self.rows:
                column[: self.rows] = getattr(self, name)
            setattr(self, name, column)
        self.rows = rows

    def clear(self, rows: Rows) -> None:
        """Forget these."""
        for name, (_, _, empty) in self.COLUMNS.items():
            getattr(self, name)[rows] = empty


def push(column: NDArray[Any], rows: Rows, values: Any) -> None:
    """Add to the end of these rows; what is oldest falls out."""
    column[rows, :-1] = column[rows, 1:]
    column[rows, -1] = values


def pages(size_bytes: Ints) -> Ints:
    """In pages, as far as four bytes go."""
    counted: Ints = np.minimum(size_bytes >> PAGE_BITS, LARGEST)
    return counted


def bounded(size_bytes: int) -> int:
    """As far as is reckoned with."""
    return min(size_bytes, LARGEST_BYTES)


def filled(figures: Floats, value: float) -> Floats:
    """With a value where there is none."""
    return np.where(np.isnan(figures), value, figures)
