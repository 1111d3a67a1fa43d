"""The whole diagnosis of a snapshot, device by device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from allocscope.allocator.diagnosis.failure import Failure, failure_at_capture, failure_of
from allocscope.allocator.diagnosis.findings import Finding, findings_of
from allocscope.allocator.diagnosis.moment import Moment, large_page_bytes, moment_of
from allocscope.allocator.diagnosis.rewind import Rewind
from allocscope.allocator.errors import TraceError
from allocscope.allocator.headroom import Headroom, headroom, headrooms
from allocscope.allocator.settings import AllocatorSettings
from allocscope.allocator.snapshot import DEFAULT_POOL, Snapshot, SnapshotSegment, TraceEntry

FAILURES_JUDGED = 20
"""To how many OutOfMemoryErrors of a device the diagnosis goes back, the latest ones."""


@dataclass(frozen=True, slots=True)
class DeviceDiagnosis:
    """One device of a snapshot."""

    device: int
    now: Moment
    """As the snapshot shows it."""
    failures: tuple[Failure, ...]
    """Every OutOfMemoryError in the history, oldest first; where it has none, the one that a capture was taken at."""
    device_free_bytes: int | None
    """Free on the device now: told by the caller, or as at the last failure and what the allocator took and gave since."""
    headroom: Headroom
    """The largest request that would succeed now, in the default large pool and its main stream; with the device's free bytes
    not known, from what the allocator holds alone."""
    headrooms: tuple[Headroom, ...]
    """The same for each pool, stream and private pool."""

    @property
    def focus(self) -> Moment:
        """The moment worth looking at: of the last failure, if the history leads back to it, else now."""
        return next((f.moment for f in reversed(self.failures) if f.moment), self.now)


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What a snapshot says."""

    devices: tuple[DeviceDiagnosis, ...]
    """Those that have segments or a history."""
    findings: tuple[Finding, ...]
    """What does not add up."""


def diagnose(snapshot: Snapshot, *, device_free_bytes: int | None = None) -> Diagnosis:
    """The diagnosis of a snapshot of PyTorch 1.13 to 2.14; raises nothing.

    `device_free_bytes`: what cudaMemGetInfo says is free, where it is known.
    """
    findings = list(findings_of(snapshot))
    by_device: dict[int, list[SnapshotSegment]] = {device: [] for device, trace in enumerate(snapshot.traces) if trace}
    for segment in snapshot.segments:
        by_device.setdefault(segment.device, []).append(segment)
    devices = tuple(
        _device(device, segments, snapshot, device_free_bytes, findings)
        for device, segments in sorted(by_device.items())
    )
    return Diagnosis(devices, tuple(findings))


def _device(
    device: int,
    segments: Sequence[SnapshotSegment],
    snapshot: Snapshot,
    device_free_bytes: int | None,
    findings: list[Finding],
) -> DeviceDiagnosis:
    trace = snapshot.traces[device] if 0 <= device < len(snapshot.traces) else ()
    settings = replace(snapshot.settings, large_segment_bytes=large_page_bytes(segments, snapshot.settings))
    now = moment_of(segments, settings)
    told = _told_by_capture(device, snapshot.capture)
    failures = _failures(device, now, trace, settings, findings)
    if told is not None and not failures:
        failures = (failure_at_capture(told, now, settings),)
    if device_free_bytes is None:
        device_free_bytes = told.device_free if told is not None else _free_since(trace)
    free = device_free_bytes or 0
    return DeviceDiagnosis(
        device=device,
        now=now,
        failures=failures,
        device_free_bytes=device_free_bytes,
        headroom=headroom(now.block_map, settings, device_free_bytes=free),
        headrooms=headrooms(now.block_map, settings, device_free_bytes=free),
    )


def _failures(
    device: int, now: Moment, trace: tuple[TraceEntry, ...], settings: AllocatorSettings, findings: list[Finding]
) -> tuple[Failure, ...]:
    """Each judged at its own moment, from the last one backwards."""
    ooms = [index for index, entry in enumerate(trace) if entry[0] == "oom"]
    rewind = Rewind(device, now.segments, trace, settings) if ooms else None
    problem: str | None = None
    judged: list[Failure] = []
    for count, index in enumerate(reversed(ooms)):
        moment = None
        if count == FAILURES_JUDGED:
            problem = problem or f"only the latest {FAILURES_JUDGED} failures of a device are gone back to"
        if rewind is not None and problem is None:
            try:
                moment = moment_of(rewind.back_to(index), settings)
            except TraceError as error:
                problem = str(error)
                findings.append(Finding("history", f"device {device}: {problem}", device))
        judged.append(failure_of(index, trace[index], moment, problem, settings))
    return tuple(reversed(judged))


def _told_by_capture(device: int, capture: Mapping[str, Any] | None) -> TraceEntry | None:
    """The OutOfMemoryError that a capture was taken at, before anything unwound; None: of another device, or none."""
    told = None if capture is None else capture.get("oom")
    if capture is None or not isinstance(told, Mapping) or told.get("device") != device:
        return None
    wanted = _whole(told.get("requested_bytes"))
    if wanted is None:
        return None
    free = _whole(told.get("device_free_bytes"))
    return TraceEntry("oom", 0, wanted, 0, _whole(capture.get("time_us")) or 0, DEFAULT_POOL, free)


def _whole(value: object) -> int | None:
    """Anybody may have written the file."""
    return value if type(value) is int and 0 <= value < 1 << 63 else None


def _free_since(trace: tuple[TraceEntry, ...]) -> int | None:
    """What the device had free at the last failure, and what the allocator took of it and gave back since."""
    taken: int = 0
    for entry in reversed(trace):
        if entry.device_free is not None:
            free: int = entry.device_free
            return max(free - taken, 0)
        taken += _TAKEN.get(entry.action, 0) * entry.size
    return None


_TAKEN = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}
