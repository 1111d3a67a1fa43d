"""What is remembered of an allocator, in a bounded amount: windows of its live memory, its room, its flushes."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

WINDOW_US = 20_000_000
"""A window is longer than most training steps, so that each holds a whole step's peak and trough."""
WINDOWS = 32
"""So many are remembered: about ten minutes."""
ROOM_EVERY_US = 10_000_000
"""The room is noted so often: what others do has no steps that would have to be waited for."""
ROOMS = 64
FLUSHES = 16


@dataclass(slots=True)
class Window:
    """An allocator's live memory in one stretch of time."""

    number: int
    """Counts windows from the epoch."""
    peak_bytes: int
    """Most allocated: by samples, and by the allocator's own peak where that moved in between."""
    trough_bytes: int
    """Least allocated at a sample."""
    trough_count: int
    """Live blocks then; 0 where not known."""
    fullest_bytes: int
    """Most allocated at a sample …"""
    stranded_bytes: int
    """… and what lay stranded then."""
    record_bytes: int
    """The highest peak of the allocator's life, by the window's end."""


@dataclass(frozen=True, slots=True)
class Flush:
    """The allocator found no room, gave its cache back, tried again, and that time it went well."""

    time_us: int
    slack_bytes: int
    """What the next sample found left of the room: how narrowly it went well, or more narrowly than it did."""


class History:
    """The latest windows, rooms and flushes, oldest first."""

    __slots__ = ("flushes", "record_bytes", "rooms", "started_us", "windows")

    def __init__(self) -> None:
        self.windows: deque[Window] = deque(maxlen=WINDOWS)
        self.rooms: deque[tuple[int, int]] = deque(maxlen=ROOMS)
        """(time, room): what the others leave of the device, or a limit allows."""
        self.flushes: deque[Flush] = deque(maxlen=FLUSHES)
        self.record_bytes = 0
        self.started_us = 0

    def begin(self, time_us: int, record_bytes: int) -> None:
        """The first sample: what went before is known by its peak only."""
        self.windows.clear()
        self.rooms.clear()
        self.flushes.clear()
        self.record_bytes, self.started_us = record_bytes, time_us

    def observe(self, time_us: int, allocated: int, peak: int, stranded: int, count: int) -> None:
        """One sample. `peak` is the most allocated since the one before, as far as is known."""
        if peak > self.record_bytes:
            self.record_bytes = peak
        number = time_us // WINDOW_US
        windows = self.windows
        if not windows or windows[-1].number != number:
            windows.append(Window(number, peak, allocated, count, allocated, stranded, self.record_bytes))
            return
        window = windows[-1]
        if peak > window.peak_bytes:
            window.peak_bytes = peak
            window.record_bytes = self.record_bytes
        if allocated < window.trough_bytes:
            window.trough_bytes, window.trough_count = allocated, count
        if allocated > window.fullest_bytes:
            window.fullest_bytes, window.stranded_bytes = allocated, stranded

    def observe_room(self, time_us: int, room: int) -> None:
        """The room, at a sample."""
        if not self.rooms or time_us - self.rooms[-1][0] >= ROOM_EVERY_US:
            self.rooms.append((time_us, room))
