"""The door: what was seen of one allocator, and what follows from it."""

from __future__ import annotations

from allocscope.alerts.forecast.history import Flush, History
from allocscope.alerts.forecast.judgement import Judgement, gather
from allocscope.model import BlockMap, DeviceReading, Event, Forecast, Sample, SampleChunk, State

USED_UP = 0.02
"""Less than this part of the device free is as good as nothing."""


class Outlook:
    """What is known of one allocator. Cheap to tell (`observe…`); `forecast` says what follows.

    Samples go by their numbers: one that was seen already, or comes after a later one, is passed over.
    """

    __slots__ = (
        "_allowed_bytes",
        "_expandable",
        "_history",
        "_judgement",
        "_latest",
        "_reading_free_bytes",
        "_room_bytes",
        "_stranded_bytes",
        "_total_bytes",
    )

    def __init__(
        self, *, device_total_bytes: int | None, allowed_bytes: int | None, allocator_conf: str | None
    ) -> None:
        self._total_bytes, self._allowed_bytes = device_total_bytes, allowed_bytes
        self._expandable = "expandable_segments:true" in (allocator_conf or "").lower().replace(" ", "")
        self._history: History | None = None
        self._judgement = Judgement()
        self._latest: Sample | None = None
        self._room_bytes: int | None = None
        self._stranded_bytes = 0
        self._reading_free_bytes: int | None = None

    def observe(self, sample: Sample) -> bool:
        """One sample; whether it was new."""
        before = self._latest
        if before is not None and sample.sequence <= before.sequence:
            return False
        allocated, reserved = sample.allocated_bytes, sample.reserved_bytes
        if allocated is None or reserved is None:
            return True
        self._latest = sample
        peak = sample.allocated_peak_bytes
        if self._history is None or before is None or _restarted(before, sample):
            self._history, before = History(sample.time_us, max(peak or 0, allocated)), None
        if peak is None or before is None or peak == before.allocated_peak_bytes or peak < allocated:
            peak = allocated  # an unmoved peak is of an earlier moment
        if not self._expandable:
            self._stranded_bytes = sample.inactive_split_bytes or 0
        history = self._history
        history.observe(sample.time_us, allocated, peak, self._stranded_bytes, sample.allocation_count or 0)
        self._room_bytes = room = self._room(sample)
        if room is not None:
            history.observe_room(sample.time_us, room, room - reserved < USED_UP * (self._total_bytes or room))
            rounds = _flushes(before, sample)
            if rounds > 0:
                exact = not self._expandable and _got(before, sample) <= rounds
                history.flushes.append(Flush(sample.time_us, room - reserved, exact))
        return True

    def observe_chunk(self, chunk: SampleChunk) -> None:
        """Many samples."""
        for sample in chunk.samples():
            self.observe(sample)

    def observe_map(self, block_map: BlockMap) -> None:
        """A block map: of expandable segments it alone tells of holes."""
        self._expandable = any(group.expandable for group in block_map.groups)
        if self._expandable:
            self._stranded_bytes = sum(group.stranded_bytes for group in block_map.groups)

    def observe_event(self, event: Event) -> None:
        """An OOM that the program may have survived is seen in the samples' counters as well."""

    def observe_device(self, reading: DeviceReading) -> None:
        """The device as its node sees it, for where the samples do not know what is free."""
        self._reading_free_bytes = reading.free_bytes
        if self._total_bytes is None:
            self._total_bytes = reading.device.total_bytes

    def forecast(self, now_us: int) -> Forecast:
        """What follows from all that was seen."""
        if self._history is None or self._room_bytes is None or not self._total_bytes:
            return Forecast(now_us, State.OK)
        facts = gather(self._history, self._total_bytes, self._room_bytes, now_us)
        if facts is None:
            return Forecast(now_us, State.OK)
        return self._judgement.judge(facts, self._history.started_us, now_us)

    def _room(self, sample: Sample) -> int | None:
        """The most that this allocator may come to reserve: what others leave of the device, or what it is allowed."""
        if sample.device_total_bytes is not None:
            self._total_bytes = sample.device_total_bytes
        free = sample.device_free_bytes if sample.device_free_bytes is not None else self._reading_free_bytes
        left = None if free is None or sample.reserved_bytes is None else free + sample.reserved_bytes
        bounds = (left, self._total_bytes, self._allowed_bytes)
        return min((bound for bound in bounds if bound is not None), default=None)


def _restarted(before: Sample, sample: Sample) -> bool:
    """Time or the count of all allocations went backwards: what was remembered is of another life."""
    if sample.time_us < before.time_us:
        return True
    made, made_before = sample.allocations_total, before.allocations_total
    return made is not None and made_before is not None and made < made_before


def _flushes(before: Sample | None, sample: Sample) -> int:
    """How often the cache was flushed for a new try."""
    rounds, rounds_before = sample.num_alloc_retries, before.num_alloc_retries if before else None
    return 0 if rounds is None or rounds_before is None else rounds - rounds_before


def _got(before: Sample | None, sample: Sample) -> int:
    """How often memory was got from the driver."""
    return (sample.num_device_alloc or 0) - ((before and before.num_device_alloc) or 0)
