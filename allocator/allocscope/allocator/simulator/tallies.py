"""What memory_stats() tells, kept as plain numbers (ALLOCATOR.md 6).

`current`, `allocated` and `freed` of a figure depend on each other, and `active` differs from `allocation` only while frees
wait for other streams; so the least is counted on each request, and the rest follows when somebody asks.
"""

from __future__ import annotations

from collections.abc import Iterator


class Gauge:
    """A figure that is not counted on each request: what it is, was at most, and all that was ever added."""

    __slots__ = ("added", "current", "peak")

    def __init__(self) -> None:
        self.current = self.peak = self.added = 0

    def add(self, amount: int) -> None:
        """It rises."""
        self.added += amount
        self.current += amount
        if self.current > self.peak:
            self.peak = self.current

    def take(self, amount: int) -> None:
        """It falls."""
        self.current -= amount

    def copy(self) -> Gauge:
        """The same, to go on apart."""
        other = Gauge()
        other.current, other.peak, other.added = self.current, self.peak, self.added
        return other

    def told(self) -> tuple[int, int, int, int]:
        """Current, peak, allocated, freed."""
        return self.current, self.peak, self.added, self.added - self.current


_COUNTED = (
    "count_in",
    "count_out",
    "count_peak",
    "bytes_in",
    "bytes_out",
    "bytes_peak",
    "requested_in",
    "requested_out",
    "requested_peak",
    "waiting_count",
    "waiting_bytes",
    "active_count_peak",
    "active_bytes_peak",
    "split_count",
    "split_count_in",
    "split_count_peak",
    "split_bytes",
    "split_bytes_in",
    "split_bytes_peak",
)


class Tally:
    """The figures of the small pools, or of the large ones, private ones included.

    `…_in` is all that was ever added, `…_out` all that was ever taken; bytes but for counts.
    """

    __slots__ = (*_COUNTED, "reserved", "segments")

    count_in: int
    count_out: int
    count_peak: int
    bytes_in: int
    bytes_out: int
    bytes_peak: int
    requested_in: int
    requested_out: int
    requested_peak: int
    waiting_count: int
    """Freed, and waiting for other streams: active and not allocated."""
    waiting_bytes: int
    active_count_peak: int
    """While anything waited; when nothing did, it is as `count_peak`."""
    active_bytes_peak: int
    split_count: int
    split_count_in: int
    split_count_peak: int
    split_bytes: int
    split_bytes_in: int
    split_bytes_peak: int

    def __init__(self) -> None:
        for name in _COUNTED:
            setattr(self, name, 0)
        self.segments, self.reserved = Gauge(), Gauge()

    def copy(self) -> Tally:
        """The same, to go on apart."""
        other = Tally()
        for name in _COUNTED:
            setattr(other, name, getattr(self, name))
        other.segments, other.reserved = self.segments.copy(), self.reserved.copy()
        return other

    def mark_active(self) -> None:
        """Something waits, and an allocation was made: active may be at its most."""
        count = self.count_in - self.count_out + self.waiting_count
        if count > self.active_count_peak:
            self.active_count_peak = count
        active = self.bytes_in - self.bytes_out + self.waiting_bytes
        if active > self.active_bytes_peak:
            self.active_bytes_peak = active

    def change_split(self, count: int, size: int) -> None:
        """Free pieces of partly used segments came or went, on balance."""
        if count:
            self.split_count += count
            if count > 0:
                self.split_count_in += count
                if self.split_count > self.split_count_peak:
                    self.split_count_peak = self.split_count
        if size:
            self.split_bytes += size
            if size > 0:
                self.split_bytes_in += size
                if self.split_bytes > self.split_bytes_peak:
                    self.split_bytes_peak = self.split_bytes

    def reset_peaks(self) -> None:
        """What is now is the most there was."""
        self.count_peak = self.count_in - self.count_out
        self.bytes_peak = self.bytes_in - self.bytes_out
        self.requested_peak = self.requested_in - self.requested_out
        self.active_count_peak = self.count_peak + self.waiting_count
        self.active_bytes_peak = self.bytes_peak + self.waiting_bytes
        self.split_count_peak, self.split_bytes_peak = self.split_count, self.split_bytes
        for gauge in (self.segments, self.reserved):
            gauge.peak = gauge.current

    def families(self) -> Iterator[tuple[str, tuple[int, int, int, int]]]:
        """Each family of memory_stats(): current, peak, allocated, freed."""
        count, held = self.count_in - self.count_out, self.bytes_in - self.bytes_out
        waiting, waiting_bytes = self.waiting_count, self.waiting_bytes
        yield "allocation", (count, self.count_peak, self.count_in, self.count_out)
        yield "allocated_bytes", (held, self.bytes_peak, self.bytes_in, self.bytes_out)
        peak = max(self.active_count_peak, self.count_peak)
        yield "active", (count + waiting, peak, self.count_in, self.count_out - waiting)
        peak = max(self.active_bytes_peak, self.bytes_peak)
        yield "active_bytes", (held + waiting_bytes, peak, self.bytes_in, self.bytes_out - waiting_bytes)
        requested = self.requested_in - self.requested_out
        yield "requested_bytes", (requested, self.requested_peak, self.requested_in, self.requested_out)
        split, split_in = self.split_count, self.split_count_in
        yield "inactive_split", (split, self.split_count_peak, split_in, split_in - split)
        split, split_in = self.split_bytes, self.split_bytes_in
        yield "inactive_split_bytes", (split, self.split_bytes_peak, split_in, split_in - split)
        yield "segment", self.segments.told()
        yield "reserved_bytes", self.reserved.told()
