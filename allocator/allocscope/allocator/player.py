"""What a probe would have seen of a recorded run, in the order of time.

The recorded process has a counter sample each second and a block map about every ten; an OutOfMemoryError brings a sample,
a map and an event at its own moment. Moments go by the recording's clock.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Callable, Iterator
from itertools import count, pairwise
from operator import attrgetter

from allocscope.allocator.recording import Recording
from allocscope.allocator.snapshot import TraceEntry
from allocscope.allocator.state import AllocatorState
from allocscope.model import AllocatorRef, BlockMap, Event, EventKind, Sample, condense

SAMPLE_EVERY_US = 1_000_000
BLOCK_MAP_EVERY_US = 10_000_000
JITTER = 0.4
"""How far a block map's moment strays from its place, at most, as a part of the interval; so it does not beat with the job's step."""

RECORDED = AllocatorRef("0" * 32, "GPU-recorded")
"""Whose events these are, where nobody says."""

Seen = Sample | BlockMap | Event
_SAMPLE, _BLOCK_MAP, _OOM, _STOPPED = range(4)


class Player:
    """One pass over a recording: iterate it once."""

    def __init__(
        self,
        recording: Recording,
        seed: int = 0,
        *,
        allocator: AllocatorRef = RECORDED,
        next_sequence: Callable[[], int] | None = None,
    ) -> None:
        """Samples are due at start + 1 s, 2 s, …; block map k (from 1) at start + (k + jitter) · 10 s, the jitter of each drawn
        from `seed`, uniform in ±JITTER. Without `next_sequence` the player numbers what it yields from 1.
        """
        self.recording = recording
        self.allocator = allocator
        self.state = AllocatorState(recording.settings, device_total_bytes=recording.device_total_bytes)
        self.died = _died(recording.trace)
        """Whether the recorded process ended by an OutOfMemoryError: then nothing comes after its event."""
        self._seed = seed
        self._next_sequence = next_sequence or count(1).__next__
        self._applied = 0

    def __iter__(self) -> Iterator[Seen]:
        times = _rising(self.recording.trace)
        for time_us, what, entry in self._moments():
            if what == _OOM:
                self._advance(entry + 1)
                yield from self._out_of_memory(self.recording.trace[entry])
                if self.died and entry == self._last_oom:
                    return
                continue
            self._advance(self._finished(bisect_right(times, time_us)))
            if what == _SAMPLE:
                yield self._sample(time_us)
            elif what == _BLOCK_MAP:
                yield self._block_map(time_us)
            else:
                self.state.settle()
                yield self._event(time_us, EventKind.STOPPED)

    @property
    def _last_oom(self) -> int:
        return _ooms(self.recording.trace)[-1]

    def _moments(self) -> list[tuple[int, int, int]]:
        """When something is seen, what, and (of an OutOfMemoryError) at which entry; in order."""
        start, end, trace = self.recording.start_us, self.recording.end_us, self.recording.trace
        draw = random.Random(self._seed)
        moments = [(time_us, _SAMPLE, 0) for time_us in range(start + SAMPLE_EVERY_US, end + 1, SAMPLE_EVERY_US)]
        for k in range(1, (end - start) // BLOCK_MAP_EVERY_US + 2):
            time_us = start + round((k + draw.uniform(-JITTER, JITTER)) * BLOCK_MAP_EVERY_US)
            if time_us <= end:
                moments.append((time_us, _BLOCK_MAP, 0))
        moments += [(trace[entry].time_us, _OOM, entry) for entry in _ooms(trace)]
        moments.append((end, _STOPPED, 0))
        return sorted(moments)

    def _finished(self, applied: int) -> int:
        """How many of the first `applied` entries belong to calls that have returned: a probe never sees a call half done.

        The allocator's lock is held over a whole call, but its history has several entries for one: a free with nothing to
        wait for has two, an allocation has one for each segment that it gave back or got.
        """
        trace = self.recording.trace
        if 0 < applied < len(trace):
            last, following = trace[applied - 1], trace[applied]
            if last.action == "free_requested" and following.action == "free_completed":
                if last.address == following.address:
                    return applied - 1
            elif _GETS_MEMORY.get(last.action, False) or (
                last.action in _GETS_MEMORY and following.action in _AFTER_GIVING_BACK
            ):
                while applied and trace[applied - 1].action in _GETS_MEMORY:
                    applied -= 1
        return applied

    def _advance(self, applied: int) -> None:
        if applied > self._applied:
            self.state.room_bytes = self._room_at(self.recording.trace[applied - 1].time_us)
            self.state.apply(self.recording.trace[self._applied : applied])
            self._applied = applied

    def _room_at(self, time_us: int) -> int:
        recording = self.recording
        left = max(recording.device_total_bytes - recording.other_used_at(time_us), 0)
        return left if recording.allowed_bytes is None else min(left, recording.allowed_bytes)

    def _sample(self, time_us: int) -> Sample:
        recording, reserved = self.recording, self.state.reserved_bytes
        other_used = recording.other_used_at(time_us)
        return self.state.sample(
            self._next_sequence(),
            time_us,
            device_total_bytes=recording.device_total_bytes,
            device_free_bytes=max(recording.device_total_bytes - other_used - reserved, 0),
            process_used_bytes=reserved + min(other_used, recording.outside_bytes),
        )

    def _block_map(self, time_us: int) -> BlockMap:
        groups = condense(self.state.segments(), self.recording.settings.large_segment_bytes)
        return BlockMap(self._next_sequence(), time_us, groups)

    def _event(self, time_us: int, kind: EventKind) -> Event:
        return Event(self.allocator.process_id, self._next_sequence(), time_us, kind)

    def _out_of_memory(self, entry: TraceEntry) -> Iterator[Seen]:
        yield self._sample(entry.time_us)
        yield self._block_map(entry.time_us)
        yield Event(
            self.allocator.process_id,
            self._next_sequence(),
            entry.time_us,
            EventKind.OOM,
            device_uuid=self.allocator.device_uuid,
            requested_bytes=self.recording.settings.segment_bytes(entry.size),
            device_total_bytes=self.recording.device_total_bytes,
            device_free_bytes=entry.device_free,
        )


_GETS_MEMORY = {"segment_alloc": True, "segment_map": True, "segment_free": False, "segment_unmap": False}
"""What an allocation does besides; True: nothing else does."""
_AFTER_GIVING_BACK = frozenset(_GETS_MEMORY) | {"oom"}


def _ooms(trace: tuple[TraceEntry, ...]) -> list[int]:
    return [index for index, entry in enumerate(trace) if entry.action == "oom"]


def _died(trace: tuple[TraceEntry, ...]) -> bool:
    """Whether the last OutOfMemoryError was the end: a process that goes on allocates again, one that unwinds only frees."""
    ooms = _ooms(trace)
    return bool(ooms) and all(entry.action != "alloc" for entry in trace[ooms[-1] + 1 :])


def _rising(trace: tuple[TraceEntry, ...]) -> list[int]:
    """The entries' times; a clock that was set back stands still meanwhile."""
    times = list(map(attrgetter("time_us"), trace))
    if any(later < earlier for earlier, later in pairwise(times)):
        latest = 0
        times = [latest := max(latest, time_us) for time_us in times]
    return times
