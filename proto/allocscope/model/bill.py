"""The bill: where every byte of a device is."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Line(Enum):
    """The lines of a bill (DESIGN.md, Words)."""

    REQUESTED = "requested"
    ROUNDING = "rounding"
    AWAITING_FREE = "awaiting_free"
    STRANDED = "stranded"
    RELEASABLE = "releasable"
    PRIVATE = "private"
    OUTSIDE = "outside"
    OTHER_PROCESSES = "other_processes"
    DRIVER = "driver"
    FREE = "free"


@dataclass(frozen=True, slots=True)
class BillEntry:
    """One line: of one process, or of the device itself."""

    line: Line
    bytes: int
    exact: bool = True
    process_id: str | None = None
    """None: a line of the device itself (other_processes, driver, free)."""


@dataclass(frozen=True, slots=True)
class DeviceBill:
    """A device's bill; the entries add up to its total."""

    total_bytes: int
    entries: tuple[BillEntry, ...]

    def of(self, line: Line, process_id: str | None = None) -> BillEntry | None:
        """The entry of that line, or None where it is not known."""
        return next(
            (e for e in self.entries if e.line is line and e.process_id == process_id),
            None,
        )
