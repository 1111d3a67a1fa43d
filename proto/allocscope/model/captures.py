"""Whole snapshots, kept for later: what is known of one without opening it, and what a process leaves of it on disk."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from allocscope.model.blocks import BlockMap
from allocscope.model.events import Event
from allocscope.model.identity import Process
from allocscope.model.sample import SampleChunk

NOTE_SUFFIX, SNAPSHOT_SUFFIX, UNFINISHED_SUFFIX = ".note", ".snapshot", ".part"
"""A process leaves `<capture_id>.note` and then `<capture_id>.snapshot`; each is whole once it has that name."""
FOLDER = "captures"
"""Beside the daemon's socket, since that is what a job and its daemon are sure to share."""


class CaptureReason(Enum):
    """Why a capture was taken."""

    OOM = "oom"
    """An OutOfMemoryError was about to be raised."""
    ASKED = "asked"
    """Somebody asked for it."""
    FORECAST = "forecast"
    """A forecast turned at_risk."""


@dataclass(frozen=True, slots=True)
class Capture:
    """What is known of a capture without opening its snapshot."""

    capture_id: str
    """32 hex digits, drawn by who ordered it; at an OutOfMemoryError by the probe."""
    process_id: str
    time_us: int
    """When it was taken, by the process's clock."""
    reason: CaptureReason
    device_uuid: str | None = None
    """The device that ran out, or that was asked for; None: all devices of the process."""
    snapshot_bytes: int | None = None
    """None: there is no snapshot."""
    history_entries: int | None = None
    tensors: bool = False
    """Whether it tells who holds the live tensors."""
    problem: str | None = None
    """Why there is no snapshot, or what it lacks, for people."""


@dataclass(frozen=True, slots=True)
class CaptureNote:
    """What a process writes before the snapshot itself, whole in itself."""

    capture: Capture
    process: Process
    samples: SampleChunk | None = None
    block_map: BlockMap | None = None
    event: Event | None = None
