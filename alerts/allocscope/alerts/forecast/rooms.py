"""What an allocator could come to reserve at most, over time: what the others leave of the device, or a limit allows."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from allocscope.alerts.forecast.rows import PAGE_BITS, Bools, Columns, Floats, Ints, Rows, Table, pages, push

ROOMS = 32
ROOM_EVERY_S = 10.0
"""The room is noted so often: what others do has no steps that would have to be waited for."""


class Rooms(Table):
    """The latest notes, the latest last."""

    COLUMNS: ClassVar[Columns] = {
        "count": (np.int8, 1, 0),
        "time_s": (np.float32, ROOMS, 0),
        "pages": (np.int32, ROOMS, 0),
        "used_up": (np.bool_, ROOMS, 0),
    }
    count: NDArray[np.int8]
    time_s: NDArray[np.float32]
    """Since the allocator's first sample."""
    pages: NDArray[np.int32]
    used_up: Bools
    """Nearly nothing of the device was free: nobody could grow."""

    def observe(self, rows: Rows, elapsed_s: Floats, room_bytes: Ints, used_up: Bools) -> None:
        """A sample of each, noted where it is time."""
        due = (self.count[rows] == 0) | (elapsed_s - self.time_s[rows, -1] >= ROOM_EVERY_S)
        if due.any():
            at = rows[due]
            push(self.time_s, at, elapsed_s[due])
            push(self.pages, at, pages(room_bytes[due]))
            push(self.used_up, at, used_up[due])
            self.count[at] = np.minimum(self.count[at] + 1, ROOMS)

    def there(self, rows: Rows) -> Bools:
        """Which places hold a note."""
        noted: Bools = np.arange(ROOMS) >= ROOMS - self.count[rows][:, None]
        return noted

    def taken(self, rows: Rows, room_bytes: Ints) -> Ints:
        """What of the room was lost since the first note that is remembered, bytes."""
        first = np.minimum(ROOMS - self.count[rows], ROOMS - 1)
        noted = self.pages[rows, first].astype(np.int64)
        return np.where(self.count[rows] > 0, (noted - pages(room_bytes)) << PAGE_BITS, 0)
