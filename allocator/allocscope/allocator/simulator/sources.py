"""What a snapshot says of each device's allocator, to be replayed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from allocscope.allocator.recording import Recording
from allocscope.allocator.simulator.asked import OtherUsed
from allocscope.allocator.simulator.rules import is_version
from allocscope.allocator.simulator.what_if import Source, shown_other
from allocscope.allocator.snapshot import Snapshot, SnapshotSegment, TraceEntry


def sources_of(
    snapshot: Snapshot, *, device_total_bytes: int | None = None, other_bytes: int | None = None
) -> dict[int, Source]:
    """By device; those without a history as well. Raises nothing.

    A capture of Allocscope's tells PyTorch's version, and of each device its size and memory fraction; what it tells wrongly is
    passed over. `device_total_bytes` goes before what it tells. What others use of a device whose size is known: `other_bytes`, or
    what the history's OutOfMemoryErrors show.
    """
    process = _mapping((snapshot.capture or {}).get("process"))
    version = process.get("torch_version")
    devices = process.get("devices")
    told = {each.get("index"): each for each in map(_mapping, devices if isinstance(devices, list | tuple) else ())}
    found = {}
    for index, trace in enumerate(snapshot.traces):
        segments = tuple(segment for segment in snapshot.segments if segment.device == index)
        total = device_total_bytes or _positive(told.get(index, {}).get("total_bytes"))
        found[index] = Source(
            trace=trace,
            segments=segments,
            settings=snapshot.settings,
            conf=snapshot.conf,
            device_total_bytes=total,
            other_used=_other(trace, segments, total) if other_bytes is None else other_bytes,
            memory_fraction=_share(told.get(index, {}).get("memory_fraction")),
            version=version if type(version) is str and is_version(version) else None,
        )
    return found


def _other(trace: Sequence[TraceEntry], segments: Sequence[SnapshotSegment], total: int | None) -> OtherUsed | int:
    return 0 if total is None else shown_other(trace, segments, total)


def source_of(run: Recording) -> Source:
    """The same of a recorded run, which knows its device."""
    return Source(
        trace=run.trace,
        segments=run.segments,
        settings=run.settings,
        conf=run.conf,
        device_total_bytes=run.device_total_bytes,
        other_used=run.other_used_at,
    )


def _mapping(told: Any) -> Mapping[str, Any]:
    return told if isinstance(told, Mapping) else {}


def _positive(told: Any) -> int | None:
    return told if type(told) is int and 0 < told < 1 << 63 else None


def _share(told: Any) -> float | None:
    return float(told) if type(told) in (int, float) and 0 <= told <= 1 else None
