"""The door: what was seen of one allocator, and what follows from it."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from statistics import median_low

from allocscope.alerts.forecast.history import Flush, History
from allocscope.alerts.forecast.judgement import Judgement, gather
from allocscope.alerts.forecast.requests import Requests, got_at_once, largest_live
from allocscope.allocator.errors import SettingsError
from allocscope.allocator.headroom import bounds_from_counters, headroom
from allocscope.allocator.settings import AllocatorSettings, parse_settings
from allocscope.model import BlockMap, DeviceReading, Event, EventKind, Forecast, Sample, SampleChunk

USED_UP = 0.02
"""Less than this part of the device free is as good as nothing."""
SET_BACK_US = 60_000_000
"""Times that go back by no more than this are passed over until they are made up for; by more, the clock was set."""
READINGS = 5
"""Of so many readings of the device the middle one counts: each is of another moment than the counters."""
READING_APART_US = 2_000_000
"""A reading so far from the latest sample tells nothing about who uses what."""
MAP_HOLDS_US = 30_000_000
"""So long a map's headroom is told; then what the counters are sure of."""


class Outlook:
    """What is known of one allocator. Cheap to tell (`observe…`); `forecast` says what follows.

    Samples go by their numbers: one that was seen already, or comes after a later one, is passed over.
    """

    __slots__ = (
        "_allowed_bytes",
        "_expandable",
        "_headroom",
        "_history",
        "_judgement",
        "_latest",
        "_others",
        "_requests",
        "_room_bytes",
        "_settings",
        "_stranded_bytes",
        "_total_bytes",
    )

    def __init__(
        self, *, device_total_bytes: int | None, allowed_bytes: int | None, allocator_conf: str | None
    ) -> None:
        self._total_bytes, self._allowed_bytes = device_total_bytes, allowed_bytes
        self._settings = _settings(allocator_conf)
        self._expandable = self._settings.expandable
        self._history: History | None = None
        self._judgement, self._requests = Judgement(), Requests()
        self._latest: Sample | None = None
        self._room_bytes: int | None = None
        self._stranded_bytes = 0
        self._others: deque[int] = deque(maxlen=READINGS)
        """What the device's other users have, by readings."""
        self._headroom: tuple[int, int] | None = None
        """(time, bytes) of the latest map."""

    def observe(self, sample: Sample) -> bool:
        """One sample; whether it was new."""
        before = self._latest
        if before is not None and sample.sequence <= before.sequence:
            return False
        allocated, reserved = sample.allocated_bytes, sample.reserved_bytes
        if allocated is None or reserved is None:
            return True
        if before is not None and before.time_us - SET_BACK_US <= sample.time_us < before.time_us:
            return True
        self._latest = sample
        peak = sample.allocated_peak_bytes
        if self._history is None or before is None or sample.time_us < before.time_us:
            self._history, before = History(sample.time_us, max(peak or 0, allocated)), None
        if peak is None or before is None or peak == before.allocated_peak_bytes or peak < allocated:
            peak = allocated  # an unmoved peak is of an earlier moment
        if not self._expandable:
            self._stranded_bytes = sample.inactive_split_bytes or 0
        self._history.observe(sample.time_us, allocated, peak, self._stranded_bytes, sample.allocation_count or 0)
        self._room_bytes = room = self._room(sample)
        if room is not None:
            used_up = room - reserved < USED_UP * (self._total_bytes or room)
            self._history.observe_room(sample.time_us, room, used_up)
        if before is not None:
            self._compare(before, sample, self._history)
        return True

    def observe_chunk(self, chunk: SampleChunk) -> None:
        """Many samples."""
        for sample in chunk.samples():
            self.observe(sample)

    def observe_map(self, block_map: BlockMap) -> None:
        """A block map: of expandable segments it alone tells of holes; and what is live was asked for."""
        self._expandable = any(group.expandable for group in block_map.groups)
        if self._expandable:
            self._stranded_bytes = sum(group.stranded_bytes for group in block_map.groups)
        request = largest_live(block_map)
        if request is not None:
            self._requests.observe(block_map.time_us, request)
        free = self._device_free()
        if free is not None:
            fits = headroom(block_map, self._settings, device_free_bytes=free, allowed_bytes=self._allowed_bytes)
            self._headroom = block_map.time_us, fits.request_bytes

    def observe_event(self, event: Event) -> None:
        """An OOM that the program may have survived: what was asked for in vain may be asked for again."""
        if event.kind is EventKind.OOM and event.requested_bytes is not None:
            self._requests.observe(event.time_us, event.requested_bytes)

    def observe_device(self, reading: DeviceReading) -> None:
        """The device as its node sees it, for where the samples do not know what is free."""
        total, free, latest = reading.device.total_bytes, reading.free_bytes, self._latest
        if self._total_bytes is None:
            self._total_bytes = total
        if total is None or free is None or latest is None or latest.reserved_bytes is None:
            return
        if abs(reading.time_us - latest.time_us) <= READING_APART_US:
            self._others.append(max(total - free - latest.reserved_bytes, 0))

    def forecast(self, now_us: int) -> Forecast:
        """What follows from all that was seen."""
        history, latest = self._history, self._latest
        facts = None
        if history is not None and latest is not None and self._room_bytes is not None and self._total_bytes:
            facts = gather(history, self._total_bytes, self._room_bytes, latest.time_us)
        if history is None or facts is None:
            return self._judgement.unchanged(now_us)
        facts = replace(
            facts,
            request_bytes=self._requests.largest(now_us),
            headroom_bytes=self._fits(now_us),
            hole_count=latest.inactive_split_count if latest and not self._expandable else None,
        )
        return self._judgement.judge(facts, history.started_us, now_us)

    def _compare(self, before: Sample, sample: Sample, history: History) -> None:
        """What happened between two samples."""
        request = got_at_once(before, sample)
        if request is not None and not self._expandable:
            self._requests.observe(sample.time_us, request)
        rounds = _rise(before.num_alloc_retries, sample.num_alloc_retries)
        if rounds > 0 and self._room_bytes is not None:
            exact = not self._expandable and _rise(before.num_device_alloc, sample.num_device_alloc) <= rounds
            slack = self._room_bytes - (sample.reserved_bytes or 0)
            history.flushes.append(Flush(sample.time_us, slack, exact))

    def _room(self, sample: Sample) -> int | None:
        """The most that this allocator may come to reserve: what others leave of the device, or what it is allowed."""
        if sample.device_total_bytes is not None:
            self._total_bytes = sample.device_total_bytes
        left = None
        if sample.device_free_bytes is not None and sample.reserved_bytes is not None:
            left = sample.device_free_bytes + sample.reserved_bytes
        elif self._others and self._total_bytes is not None:
            left = self._total_bytes - median_low(self._others)
        bounds = (left, self._total_bytes, self._allowed_bytes)
        return min((bound for bound in bounds if bound is not None), default=None)

    def _device_free(self) -> int | None:
        if self._latest is None or self._latest.device_free_bytes is not None or self._room_bytes is None:
            return self._latest.device_free_bytes if self._latest else None
        return max(self._room_bytes - (self._latest.reserved_bytes or 0), 0)

    def _fits(self, now_us: int) -> int | None:
        """The largest request that would succeed: by the latest map, or what the counters are sure of."""
        if self._headroom is not None and now_us - self._headroom[0] <= MAP_HOLDS_US:
            return self._headroom[1]
        free = self._device_free()
        if self._latest is None or free is None:
            return None
        bounds = bounds_from_counters(
            self._latest, self._settings, device_free_bytes=free, allowed_bytes=self._allowed_bytes
        )
        return bounds.lower_bytes


def _settings(allocator_conf: str | None) -> AllocatorSettings:
    try:
        return parse_settings(allocator_conf or "")
    except SettingsError:  # of a version that knows more: the counters tell enough
        return AllocatorSettings()


def _rise(before: int | None, now: int | None) -> int:
    """How far a counter rose; one that was reset, or is not known, did not."""
    return max(now - before, 0) if before is not None and now is not None else 0
