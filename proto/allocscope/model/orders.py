"""What a daemon, or a collector through it, tells a probe to do."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Intervals:
    """How often to look; None: as before."""

    sample_us: int | None = None
    block_map_us: int | None = None
    """Before jitter."""


@dataclass(frozen=True, slots=True)
class CaptureOrder:
    """Take a whole PyTorch snapshot and keep it."""

    capture_id: str
    device_uuid: str | None = None
    """None: all devices of the process."""


@dataclass(frozen=True, slots=True)
class HistoryOrder:
    """Record the allocator's history without stacks, or stop doing so."""

    enabled: bool
    max_entries: int | None = None


Order = Intervals | CaptureOrder | HistoryOrder
