"""What is remembered of an allocator, in a bounded amount: windows of its live memory, its room, its flushes."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

SCALES_US = (20_000_000, 100_000_000)
"""Windows of live memory, on two scales: the finer for jobs with steps of up to some ten seconds, the coarser for slower ones,
and for what grows slowly."""
WINDOWS = 32
"""So many are remembered on each scale: ten minutes, and nearly an hour."""
ROOM_EVERY_US = 10_000_000
"""The room is noted so often: what others do has no steps that would have to be waited for."""
ROOMS = 64
FLUSHES = 16


@dataclass(slots=True)
class Window:
    """An allocator's live memory in one stretch of time."""

    number: int
    """Counts windows of this length from the first sample on."""
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
    swings: int
    """How often it went from its lower half to its upper: as many steps, unless they are faster than the samples."""


@dataclass(frozen=True, slots=True)
class Room:
    """What an allocator could reserve at most, at a moment."""

    time_us: int
    bytes: int
    """What the others leave of the device, or a limit allows."""
    used_up: bool
    """Nearly nothing of the device was free: nobody could grow."""


@dataclass(frozen=True, slots=True)
class Flush:
    """The allocator found no room, gave its cache back, tried again, and that time it went well."""

    time_us: int
    slack_bytes: int
    """What the next sample found left of the room."""
    exact: bool
    """The try was all that was got from the driver since: so much was left by it; else it may have been more."""


class Scale:
    """The latest windows of one length, oldest first."""

    __slots__ = ("_lower", "_started_us", "_upper", "_was_low", "window_us", "windows")

    def __init__(self, window_us: int, started_us: int) -> None:
        self.window_us = window_us
        self._started_us = started_us
        self.windows: deque[Window] = deque(maxlen=WINDOWS)
        self._was_low = False
        self._lower = self._upper = 0

    def observe(self, time_us: int, allocated: int, peak: int, record: int, stranded: int, count: int) -> None:
        """One sample."""
        number = self.number(time_us)
        windows = self.windows
        if not windows or windows[-1].number != number:
            self._bound_halves()
            windows.append(Window(number, peak, allocated, count, allocated, stranded, record, 0))
        window = windows[-1]
        if peak > window.peak_bytes:
            window.peak_bytes, window.record_bytes = peak, record
        if allocated < window.trough_bytes:
            window.trough_bytes, window.trough_count = allocated, count
        elif allocated > window.fullest_bytes:
            window.fullest_bytes, window.stranded_bytes = allocated, stranded
        if allocated <= self._lower:
            self._was_low = True
        elif self._was_low and allocated >= self._upper:
            window.swings += 1
            self._was_low = False

    def number(self, time_us: int) -> int:
        """Of the window of that moment."""
        return (time_us - self._started_us) // self.window_us

    def _bound_halves(self) -> None:
        """The lower and the upper two fifths of where live memory lately moved."""
        if self.windows:
            low, high = self.windows[-1].trough_bytes, self.windows[-1].fullest_bytes
            self._lower, self._upper = low + (high - low) * 2 // 5, low + (high - low) * 3 // 5


class History:
    """What there was, latest last."""

    __slots__ = ("flushes", "record_bytes", "rooms", "scales", "started_us")

    def __init__(self, time_us: int, record_bytes: int) -> None:
        """From a first sample on; what went before is known by its peak only."""
        self.scales = tuple(Scale(window_us, time_us) for window_us in SCALES_US)
        """Finest first."""
        self.rooms: deque[Room] = deque(maxlen=ROOMS)
        self.flushes: deque[Flush] = deque(maxlen=FLUSHES)
        self.record_bytes, self.started_us = record_bytes, time_us

    def observe(self, time_us: int, allocated: int, peak: int, stranded: int, count: int) -> None:
        """One sample. `peak` is the most allocated since the one before, as far as is known."""
        if peak > self.record_bytes:
            self.record_bytes = peak
        for scale in self.scales:
            scale.observe(time_us, allocated, peak, self.record_bytes, stranded, count)

    def observe_room(self, time_us: int, room: int, used_up: bool) -> None:
        """The room, at a sample."""
        if not self.rooms or time_us - self.rooms[-1].time_us >= ROOM_EVERY_US:
            self.rooms.append(Room(time_us, room, used_up))
