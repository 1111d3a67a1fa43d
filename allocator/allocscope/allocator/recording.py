"""Recordings: whole runs of one process on one device, from its first allocation on.

RUN.run.json says what a snapshot does not, and names the snapshot that lies beside it. The only module here that reads
files.
"""

from __future__ import annotations

import json
import os
from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise
from os import PathLike
from pathlib import Path
from typing import Any

from allocscope.allocator.errors import NotASnapshotError, RecordingError
from allocscope.allocator.settings import AllocatorSettings
from allocscope.allocator.snapshot import GZIP_MAGIC, SnapshotSegment, TraceEntry, read_snapshot

FILE_LIMIT_BYTES = 256 << 20
DESCRIPTION_LIMIT_BYTES = 16 << 20
SUFFIX = ".run.json"


@dataclass(frozen=True, slots=True)
class Recording:
    """A run of one process on one device."""

    name: str
    start_us: int
    end_us: int
    """Of the last entry."""
    device_index: int
    device_total_bytes: int
    other_used: tuple[tuple[int, int], ...]
    """From when on, and how many bytes of the device were in use that are not this process's allocator's; never empty."""
    settings: AllocatorSettings
    conf: str
    trace: tuple[TraceEntry, ...]
    segments: tuple[SnapshotSegment, ...]
    """How the run ended, by PyTorch itself."""

    @property
    def outside_bytes(self) -> int:
        """What this process used beside its allocator: `other_used` at first; what comes on top is other processes'."""
        return self.other_used[0][1]

    @property
    def allowed_bytes(self) -> int | None:
        """What a memory fraction in its settings let the allocator reserve; None: no such limit."""
        fraction = self.settings.memory_fraction
        return int(fraction * self.device_total_bytes) if fraction < 1 else None

    def other_used_at(self, time_us: int) -> int:
        """Bytes of the device in use at that moment that were not this allocator's."""
        step = bisect_right(self.other_used, time_us, key=_since) - 1
        return self.other_used[max(step, 0)][1]


def _since(step: tuple[int, int]) -> int:
    return step[0]


def read_recording(path: str | PathLike[str], *, device_index: int | None = None) -> Recording:
    """Read RUN.run.json and the snapshot it names; `device_index` chooses, where several devices have a history.

    Sizes are bytes, moments unix microseconds. Snapshots are of the versions of PyTorch that `read_snapshot` reads; where
    entries have no time (2.0) it counts as 0. RecordingError: either file cannot be read or is too large, or the description is
    wrong; NotASnapshotError: the snapshot is not gzip, or no one device's history can be chosen; other SnapshotErrors as
    `read_snapshot` raises them.
    """
    description = Path(path)
    told = _Told(str(description), _described(description))
    snapshot_path = description.parent / told.snapshot
    data = _bytes(snapshot_path, FILE_LIMIT_BYTES)
    if not data.startswith(GZIP_MAGIC):
        raise NotASnapshotError(str(snapshot_path), "is not gzip")
    snapshot = read_snapshot(data, str(snapshot_path))
    index = _device(snapshot.traces, device_index, str(snapshot_path))
    trace = snapshot.traces[index]
    return Recording(
        name=description.name.removesuffix(SUFFIX),
        start_us=told.start_us,
        end_us=max(trace[-1].time_us, told.start_us),
        device_index=index,
        device_total_bytes=told.device_total,
        other_used=told.other_used,
        settings=snapshot.settings,
        conf=snapshot.conf,
        trace=trace,
        segments=tuple(segment for segment in snapshot.segments if segment.device == index),
    )


def _device(traces: tuple[tuple[TraceEntry, ...], ...], wanted: int | None, name: str) -> int:
    recorded = [index for index, trace in enumerate(traces) if trace]
    if wanted is None:
        if len(recorded) == 1:
            return recorded[0]
        problem = (
            f"devices {recorded} have a history, and one must be chosen" if recorded else "has no history of any device"
        )
        raise NotASnapshotError(name, problem)
    if wanted not in recorded:
        raise NotASnapshotError(name, f"has no history of device {wanted} (of {recorded})")
    return wanted


def _bytes(path: Path, limit_bytes: int) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(limit_bytes + 1)
    except OSError as error:
        raise RecordingError(str(path), f"cannot be read ({error.strerror or error})") from error
    if len(data) > limit_bytes:
        raise RecordingError(str(path), f"is larger than {limit_bytes} bytes")
    return data


def _described(path: Path) -> dict[str, Any]:
    name = str(path)
    if not name.endswith(".json") and os.path.exists(name):  # noqa: PTH110 (one that may not be looked at is told of below)
        raise RecordingError(name, f"is not the description of a recording; name its RUN{SUFFIX}")
    try:
        told = json.loads(_bytes(path, DESCRIPTION_LIMIT_BYTES))
    except (ValueError, RecursionError) as error:
        raise RecordingError(name, f"is not JSON ({error})") from error
    if not isinstance(told, dict):
        raise RecordingError(name, f"holds a {type(told).__name__}, not an object")
    return told


class _Told:
    """What a RUN.run.json says, checked."""

    def __init__(self, name: str, told: dict[str, Any]) -> None:
        self._name = name
        missing = [key for key in ("snapshot", "device_total", "other_used", "start_us") if key not in told]
        if missing:
            raise RecordingError(name, f"lacks {', '.join(missing)}")
        self.snapshot = self._file_name(told["snapshot"])
        self.device_total = self._number("device_total", told["device_total"], at_least=1)
        self.start_us = self._number("start_us", told["start_us"], at_least=0)
        self.other_used = self._steps(told["other_used"])

    def _file_name(self, value: Any) -> str:
        if not isinstance(value, str) or Path(value).name != value or value in ("", ".", "..") or "\0" in value:
            raise RecordingError(self._name, f"snapshot is {value!r}, not the name of a file beside it")
        return value

    def _number(self, key: str, value: Any, at_least: int) -> int:
        if type(value) is not int or not at_least <= value < 1 << 63:
            raise RecordingError(self._name, f"{key} is {value!r}, not a whole number from {at_least} on")
        return value

    def _steps(self, value: Any) -> tuple[tuple[int, int], ...]:
        problem = "is not a list of one or more [from_time_us, bytes], in order"
        if not isinstance(value, list) or not all(isinstance(step, list) and len(step) == 2 for step in value):
            raise RecordingError(self._name, f"other_used {problem}")
        steps = tuple(
            (self._number("other_used", since, 0), self._number("other_used", used, 0)) for since, used in value
        )
        if not steps or any(later[0] < earlier[0] for earlier, later in pairwise(steps)):
            raise RecordingError(self._name, f"other_used {problem}")
        return steps
