"""What is in use, as events go by: now, and when it was most."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from allocscope.allocator.chronicle.events import Allocated, Event, Freed, GivenBack, Got, WaitOver
from allocscope.allocator.settings import MIN_BLOCK_BYTES

CLASSES = 64
_LEAST = MIN_BLOCK_BYTES.bit_length() - 1


def class_of(size: int) -> int:
    """The size class of a block: `class_bytes` of it is the least power of two, from 512 on, that holds it."""
    return min(max((size - 1).bit_length(), _LEAST), CLASSES - 1)


def class_bytes(index: int) -> int:
    """The largest size of a class."""
    return 1 << index


@dataclass(frozen=True, slots=True)
class Level:
    """How much is in use; bytes. A block is in use until its free is complete."""

    used_bytes: int
    reserved_bytes: int
    blocks: tuple[int, ...]
    """How many, by size class."""


class Standing:
    """The level, from all events of one device in order."""

    def __init__(self, live_before: Iterable[int] = (), reserved_before: int = 0) -> None:
        """What was there before the first event: sizes of the blocks in use, and all that was reserved."""
        self._counts = [0] * CLASSES
        self._used, self._reserved = 0, reserved_before
        for size in live_before:
            self._counts[class_of(size)] += 1
            self._used += size
        self._peak: Level | None = None
        self._rising = True

    def take(self, event: Event) -> None:
        """An event goes by."""
        if isinstance(event, Allocated):
            size = event.block_bytes
            if size is not None:
                self._counts[class_of(size)] += 1
                self._used += size
                if not self._rising and (self._peak is None or self._used > self._peak.used_bytes):
                    self._rising = True
        elif isinstance(event, (Freed, WaitOver)):
            size = event.block_bytes
            if size is not None:
                if self._rising:
                    self._keep_peak()
                self._counts[class_of(size)] -= 1
                self._used -= size
        elif isinstance(event, Got):
            self._reserved += event.block_bytes
        elif isinstance(event, GivenBack):
            self._reserved -= event.block_bytes

    def _keep_peak(self) -> None:
        self._rising = False
        if self._peak is None or self._used > self._peak.used_bytes:
            self._peak = self.now()

    def now(self) -> Level:
        """After the last event."""
        return Level(self._used, self._reserved, tuple(self._counts))

    def peak(self) -> Level:
        """When most was in use, the first time."""
        now = self.now()
        return now if self._peak is None or now.used_bytes > self._peak.used_bytes else self._peak
