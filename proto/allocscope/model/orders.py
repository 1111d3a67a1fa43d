"""What a daemon, or a collector through it, tells a probe to do."""

from __future__ import annotations

from dataclasses import dataclass

from allocscope.model.captures import CaptureReason


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
    history_us: int | None = None
    """Record the history for so long first, without stacks; None: none is recorded for it."""
    history_entries: int | None = None
    """At most so many of it; None: as many as the probe finds right."""
    tensors: bool = False
    """Whether to tell who holds the live tensors."""
    reason: CaptureReason = CaptureReason.ASKED


Order = Intervals | CaptureOrder
