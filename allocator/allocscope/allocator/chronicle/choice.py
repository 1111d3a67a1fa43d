"""Which events somebody wants to see."""

from __future__ import annotations

from dataclasses import dataclass

from allocscope.allocator.chronicle.events import Allocated, Event, Kind
from allocscope.allocator.snapshot import DEFAULT_POOL

SPLIT, CACHED, DRIVER = "split", "cached", "driver"
WORDS = (*(kind.value for kind in Kind), SPLIT, CACHED, DRIVER)
"""What `kinds` may hold: kinds of events, and of the allocations those that split a block, that took one from the cache as it
was, and that lie in memory got for them."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What an event must be; None and empty: anything. One that lacks what is asked for (a stream, a time) is not chosen."""

    kinds: frozenset[str] = frozenset()
    least_bytes: int | None = None
    """Of the block."""
    most_bytes: int | None = None
    stream: int | None = None
    small: bool | None = None
    """Of the small pool, or of the large one."""
    private: bool = False
    """Of any private pool."""
    private_pool: tuple[int, int] | None = None
    since_us: int | None = None
    until_us: int | None = None
    """Unix microseconds; both ends count."""
    address: int | None = None
    """Somewhere in the block."""

    @property
    def is_all(self) -> bool:
        """Whether every event is chosen."""
        return self == Choice()

    def takes(self, event: Event) -> bool:
        """Whether this one is chosen."""
        return self.in_time(event) and self._of_kind(event) and self._in_place(event)

    def in_time(self, event: Event) -> bool:
        """Whether it is not too early and not too late."""
        if self.since_us is None and self.until_us is None:
            return True
        at = event.time_us
        if at is None:
            return False
        return (self.since_us is None or at >= self.since_us) and (self.until_us is None or at <= self.until_us)

    def _of_kind(self, event: Event) -> bool:
        if not self.kinds or event.kind in self.kinds:
            return True
        return isinstance(event, Allocated) and how_served(event) in self.kinds

    def _in_place(self, event: Event) -> bool:
        pool = event.pool
        if self.stream is not None and pool.stream != self.stream:
            return False
        if self.small is not None and pool.small != self.small:
            return False
        if self.private and pool.private in (None, DEFAULT_POOL):
            return False
        if self.private_pool is not None and pool.private != self.private_pool:
            return False
        return self._of_size(event) and self._at_address(event)

    def _of_size(self, event: Event) -> bool:
        if self.least_bytes is None and self.most_bytes is None:
            return True
        size = getattr(event, "block_bytes", None)
        if size is None:
            size = getattr(event, "requested_bytes", None)
        if size is None:
            return False
        return (self.least_bytes is None or size >= self.least_bytes) and (
            self.most_bytes is None or size <= self.most_bytes
        )

    def _at_address(self, event: Event) -> bool:
        if self.address is None:
            return True
        start: int | None = getattr(event, "address", None)
        if start is None:
            return False
        return start <= self.address < start + max(getattr(event, "block_bytes", None) or 0, 1)


def how_served(event: Allocated) -> str | None:
    """From the driver, by splitting a block, or from the cache as it was; None: not told."""
    if event.driver:
        return DRIVER
    if event.left_bytes is None:
        return None
    return SPLIT if event.left_bytes else CACHED
