"""What the database knows of a capture's moment, for its replay."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median_low

from allocscope.collector.advice_task import DeviceFacts
from allocscope.model import AllocatorRef, CaptureReason, Device, Forecast, Process, Sample, State
from allocscope.storage.captures import CaptureRecord
from allocscope.storage.repository import Repository

BEFORE_US = 600_000_000
"""Of samples before a capture: as long as a history that is asked for may be. One that a program records itself may be longer; what
others used before is then taken to be what they used first."""
AFTER_US = 2_000_000
MOST_SAMPLES = 2_000


def device_facts(repository: Repository, capture: CaptureRecord, process: Process) -> tuple[DeviceFacts, ...]:
    """Of the device that was captured, or of all that its process used."""
    wanted = [device for device in process.devices if capture.device_uuid in (None, device.uuid)]
    return tuple(_facts(repository, capture, device) for device in wanted)


def _facts(repository: Repository, capture: CaptureRecord, device: Device) -> DeviceFacts:
    ref = AllocatorRef(capture.process_id, device.uuid)
    samples = _samples(repository, ref, capture.time_us)
    latest = next(iter(repository.forecasts(allocator=ref, limit=1).items), None)
    forecast = latest.forecast if latest else None
    told = [sample.device_total_bytes for sample in samples if sample.device_total_bytes is not None]
    total_bytes = told[-1] if told else device.total_bytes
    return DeviceFacts(
        device.uuid,
        device.index,
        total_bytes=total_bytes,
        other_used=() if total_bytes is None else other_used(samples, total_bytes),
        request_bytes=forecast.request_bytes if forecast else None,
        at_risk=_at_risk(capture, forecast),
    )


def _at_risk(capture: CaptureRecord, forecast: Forecast | None) -> bool:
    if capture.reason is not CaptureReason.ASKED:
        return True
    return forecast is not None and forecast.state.level >= State.AT_RISK.level


def _samples(repository: Repository, ref: AllocatorRef, time_us: int | None) -> list[Sample]:
    if time_us is None:
        return []
    chunks = repository.samples(ref, from_us=time_us - BEFORE_US, to_us=time_us + AFTER_US, limit=MOST_SAMPLES)
    return [sample for chunk in chunks for sample in chunk.samples()]


def other_used(samples: Sequence[Sample], total_bytes: int) -> tuple[tuple[int, int], ...]:
    """What was in use on a device and not the allocator's, and since when; bytes, in the order of the samples.

    The two figures are read one after the other: a segment that is got in between is in one of them only. Of three in a row the
    middle one is taken, so that one such sample says nothing.
    """
    used = [(s.time_us, total_bytes - free - reserved) for s, free, reserved in _known(samples)]
    return tuple(
        (at_us, max(median_low([bytes_ for _, bytes_ in used[max(at - 1, 0) : at + 2]]), 0))
        for at, (at_us, _) in enumerate(used)
    )


def _known(samples: Sequence[Sample]) -> Iterator[tuple[Sample, int, int]]:
    for sample in samples:
        if sample.device_free_bytes is not None and sample.reserved_bytes is not None:
            yield sample, sample.device_free_bytes, sample.reserved_bytes
