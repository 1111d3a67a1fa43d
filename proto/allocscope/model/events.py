"""What happened in a process, at a moment."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class EventKind(Enum):
    """What kind of event."""

    OOM = "oom"
    """An OutOfMemoryError was raised; the program may have caught it."""
    STOPPED = "stopped"
    """The process ended in order, or stopped its probe."""
    DROPPED = "dropped"
    """The probe lost data before it reached the daemon."""


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened in a process."""

    process_id: str
    sequence: int
    time_us: int
    kind: EventKind
    device_uuid: str | None = None
    """None: it is the process's own."""
    requested_bytes: int | None = None
    """OOM: the segment asked of the driver in vain."""
    device_total_bytes: int | None = None
    """OOM: the device's memory, or what the process is allowed of it."""
    device_free_bytes: int | None = None
    dropped_count: int | None = None
    """DROPPED: how many samples, maps and events."""
    message: str | None = None
