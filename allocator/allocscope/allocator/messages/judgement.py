"""A verdict and its reasons."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Verdict(Enum):
    """Why a request failed."""

    FRAGMENTATION = "fragmentation"
    """What was free, stranded in holes and on the device together, would have held it."""
    CAPACITY = "capacity"
    """All that was free would not have held it."""
    OTHER_PROCESSES = "other_processes"
    """What others hold on the device would have."""
    LIMIT = "limit"
    """A limit below the device's memory."""
    NOT_DEVICE_MEMORY = "not_device_memory"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Judgement:
    """A verdict with its reasons."""

    verdict: Verdict
    reasons: tuple[str, ...]
    advice: tuple[str, ...] = ()
    """What to try; only what the facts bear out."""
    own_pid: int | None = None
    """Which `Process N` is in truth this job, seen from inside a container."""
