"""What is foreseen of an allocator."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class State(Enum):
    """How near an allocator is to an OutOfMemoryError."""

    OK = "ok"
    WATCH = "watch"
    AT_RISK = "at_risk"
    CRITICAL = "critical"

    @property
    def level(self) -> int:
        """0 ok, 1 watch, 2 at risk, 3 critical."""
        return list(State).index(self)


class Cause(Enum):
    """What it would run out for."""

    FRAGMENTATION = "fragmentation"
    """Live memory and the request would fit, but for holes."""
    CAPACITY = "capacity"
    """It needs more than there is, holes or not."""
    GROWTH = "growth"
    """What a step needs grows."""
    LEAK = "leak"
    """Memory that nothing uses again grows."""
    NEIGHBOUR = "neighbour"
    """Another process on the device grows."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """What is foreseen of an allocator at a moment."""

    time_us: int
    """The sample's time that it was made at, by the process's clock."""
    state: State
    cause: Cause | None = None
    """None where the state is ok."""
    headroom_bytes: int | None = None
    """The largest single request that would succeed now."""
    request_bytes: int | None = None
    """The largest request that the job is known to make again."""
    margin_ratio: float | None = None
    """Headroom less the largest known request, as a part of the device's total; below 0: that request would fail now."""
    seconds_to_oom: float | None = None
    """Where a trend gives one."""
    summary: str = ""
    """For people: the state with the figures that led to it."""
