"""What the requests of a recorded history come to under other settings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from allocscope.allocator.settings import AllocatorSettings, parse_settings
from allocscope.allocator.simulator.device import Device
from allocscope.allocator.simulator.history import History, OtherUsed, Outcome, ask_again, read_history
from allocscope.allocator.simulator.seed import as_told
from allocscope.allocator.simulator.simulator import Simulator
from allocscope.allocator.snapshot import SnapshotSegment, TraceEntry

UNKNOWN_TOTAL_BYTES = 1 << 40
"""What a device of unknown size is taken to have: enough for anything."""


@dataclass(frozen=True, slots=True)
class Source:
    """What is known of one device's allocator; bytes."""

    trace: Sequence[TraceEntry]
    segments: Sequence[SnapshotSegment]
    """After the last entry."""
    settings: AllocatorSettings
    conf: str
    device_total_bytes: int | None = None
    """None: what an OutOfMemoryError in the history shows to have been there, or enough for anything."""
    other_used: OtherUsed | int = 0
    """In use on the device and not this allocator's."""


@dataclass(frozen=True, slots=True)
class WhatIf:
    """What the same requests come to."""

    history: History
    device_total_bytes: int | None
    """None: not known, and so nothing could fail."""
    total_is_shown: bool
    """Whether that size is not told, but what the last OutOfMemoryError of the history shows this allocator to have had."""
    recorded_peak_bytes: int
    """What was reserved at most while the history was recorded."""
    outcomes: tuple[tuple[str, Outcome], ...]
    """By settings, as they were recorded first."""


def what_if(source: Source, confs: Iterable[str], *, version: str | None = None) -> WhatIf:
    """Replay a history under its own settings and each of these; sizes are bytes.

    Requests after the first that fails are not made. Each is as it was recorded: a program that would have asked otherwise under
    other settings (benchmarking of kernels by free memory, a cache sized by it) is not foreseen.

    PyTorch 2.11 to 2.14, others by the nearest rules; `History.exact` says whether they explain the history. SettingsError: one
    of `confs` cannot be read; ValueError: `version` is none; UndefinedStateError: PyTorch itself would be corrupt under one of them.
    """
    total = source.device_total_bytes or shown_total(source.trace, source.segments)
    known = UNKNOWN_TOTAL_BYTES if total is None else total
    other = source.other_used if callable(source.other_used) else _always(source.other_used)
    history = read_history(
        source.trace,
        source.settings,
        device_total_bytes=known,
        other_used=other,
        allowed_bytes=None,
        version=version,
        segments=[as_told(segment) for segment in source.segments],
    )
    outcomes = []
    for conf, settings in [(source.conf, source.settings), *((conf, parse_settings(conf)) for conf in confs)]:
        simulator = Simulator(settings, Device(known), version=history.version)
        outcomes.append((conf, ask_again(history.asked, simulator, other)))
    return WhatIf(
        history=history,
        device_total_bytes=total,
        total_is_shown=total is not None and not source.device_total_bytes,
        recorded_peak_bytes=max(_reserved(source.trace, source.segments)),
        outcomes=tuple(outcomes),
    )


def shown_total(trace: Sequence[TraceEntry], segments: Iterable[SnapshotSegment]) -> int | None:
    """What an allocator and the device's free memory came to when a request failed, at the last such moment; None: none did.

    Bytes; others' use is not in it. Any version of PyTorch whose entries of failures tell device_free. Raises nothing.
    """
    for entry, reserved in zip(reversed(trace), _reserved(trace, segments), strict=False):
        free: int | None = entry.device_free
        if entry.action == "oom" and free is not None:
            return reserved + free
    return None


def _reserved(trace: Sequence[TraceEntry], segments: Iterable[SnapshotSegment]) -> Iterator[int]:
    """After each entry, the last one first; before the first, in the end."""
    reserved = sum(segment.total_size for segment in segments)
    yield reserved
    for entry in reversed(trace):
        if entry.action in ("segment_alloc", "segment_map"):
            reserved -= entry.size
        elif entry.action in ("segment_free", "segment_unmap"):
            reserved += entry.size
        yield reserved


def _always(other_bytes: int) -> OtherUsed:
    return lambda _: other_bytes
