"""What events come to: counted as they go by, in bounded memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from allocscope.allocator.chronicle.events import (
    Allocated,
    Contradiction,
    Event,
    Freed,
    GivenBack,
    Got,
    Kind,
    Merged,
    OutOfMemory,
    Pool,
    Release,
    Retry,
    Waiting,
    WaitOver,
)
from allocscope.allocator.chronicle.standing import CLASSES, class_of

AGAIN_WITHIN = 1000
"""Memory that is got within so many allocations after as much was given back was given back in vain."""


@dataclass(slots=True)
class Flow:
    """What was got from the driver, and given back; of segments of one size, or of pages."""

    got: int = 0
    got_bytes: int = 0
    given_back: int = 0
    given_back_bytes: int = 0
    again: int = 0
    """How much of what was given back was got again right after."""
    again_bytes: int = 0


@dataclass(slots=True)
class StreamUse:
    """What a stream asked for."""

    allocations: int = 0
    allocated_bytes: int = 0
    waits: int = 0
    """How many of its blocks, once freed, had to wait for other streams."""


@dataclass(slots=True)
class Releases:
    """Of one cause: how often memory was given back, and how much."""

    count: int = 0
    given_back_bytes: int = 0
    unsure: int = 0
    """Of which it could have been another cause."""


@dataclass(slots=True)
class Tally:
    """Counts of the events so far; moments in unix microseconds, sizes in bytes."""

    from_us: int | None = None
    to_us: int | None = None
    allocations: int = 0
    frees: int = 0
    """That are complete."""
    splits: int = 0
    merges: int = 0
    cached: int = 0
    """Allocations from the cache, a block as it was; the next two: by splitting one, and in memory got for it."""
    split_cached: int = 0
    driver: int = 0
    source_not_told: int = 0
    allocations_by_class: list[int] = field(default_factory=lambda: [0] * CLASSES)
    frees_by_class: list[int] = field(default_factory=lambda: [0] * CLASSES)
    splits_by_class: list[int] = field(default_factory=lambda: [0] * CLASSES)
    """By the size of the block that was split."""
    merges_by_class: list[int] = field(default_factory=lambda: [0] * CLASSES)
    """By the size of what came of it."""
    streams: dict[int | None, StreamUse] = field(default_factory=dict)
    waits: int = 0
    waits_over: int = 0
    waited_us: int = 0
    """All of those over together, where it is told."""
    longest_wait_us: int | None = None
    waiting_bytes: int = 0
    waiting_peak_bytes: int = 0
    segments: dict[int, Flow] = field(default_factory=dict)
    """By size."""
    pages: Flow = field(default_factory=Flow)
    """Of expandable segments."""
    late_driver: int = 0
    """Allocations in memory got for them, after `half` events of the history; see `late_allocations`."""
    late_allocations: int = 0
    releases: dict[Kind, Releases] = field(default_factory=dict)
    ooms: int = 0
    last_oom: OutOfMemory | None = None
    retries: int = 0
    contradictions: int = 0
    late_from_entry: int | None = None
    """From which entry on it is late: what a job does once it is warm; None: not known."""
    _given_back: dict[tuple[Pool, int], deque[list[int]]] = field(default_factory=dict)
    _take: dict[type, Callable[[Any], None]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._take = {
            Allocated: self._allocated,
            Freed: self._freed,
            Waiting: self._waiting,
            WaitOver: self._wait_over,
            Merged: self._merged,
            Got: self._got,
            GivenBack: self._gave_back,
            Release: self._released,
            OutOfMemory: self._failed,
            Retry: self._retried,
            Contradiction: self._contradicted,
        }

    def take(self, event: Event) -> None:
        """An event goes by."""
        at = event[1]
        if at is not None:
            if self.from_us is None:
                self.from_us = self.to_us = at
            elif at > self.to_us:  # type: ignore[operator]
                self.to_us = at
        self._take[type(event)](event)

    def _allocated(self, event: Allocated) -> None:
        self.allocations += 1
        size, left = event.block_bytes, event.left_bytes
        stream = event.pool.stream
        use = self.streams.get(stream)
        if use is None:
            use = self.streams[stream] = StreamUse()
        use.allocations += 1
        if size is not None:
            use.allocated_bytes += size
            self.allocations_by_class[class_of(size)] += 1
        late = self.late_from_entry is not None and event.entry >= self.late_from_entry
        self.late_allocations += late
        if event.driver is None:
            self.source_not_told += 1
        elif event.driver:
            self.driver += 1
            self.late_driver += late
        elif left:
            self.split_cached += 1
        else:
            self.cached += 1
        if left:
            self.splits += 1
            if event.hole_bytes is not None:
                self.splits_by_class[class_of(event.hole_bytes)] += 1

    def _freed(self, event: Freed) -> None:
        self.frees += 1
        if event.block_bytes is not None:
            self.frees_by_class[class_of(event.block_bytes)] += 1

    def _waiting(self, event: Waiting) -> None:
        self.waits += 1
        self.streams.setdefault(event.pool.stream, StreamUse()).waits += 1
        self.waiting_bytes += event.block_bytes or 0
        self.waiting_peak_bytes = max(self.waiting_peak_bytes, self.waiting_bytes)

    def _wait_over(self, event: WaitOver) -> None:
        self.frees += 1
        self.waits_over += 1
        if event.block_bytes is not None:
            self.frees_by_class[class_of(event.block_bytes)] += 1
            self.waiting_bytes = max(self.waiting_bytes - event.block_bytes, 0)
        if event.waited_us is not None:
            self.waited_us += event.waited_us
            self.longest_wait_us = max(self.longest_wait_us or 0, event.waited_us)

    def _merged(self, event: Merged) -> None:
        self.merges += 1
        if event.block_bytes is not None:
            self.merges_by_class[class_of(event.block_bytes)] += 1

    def _got(self, event: Got) -> None:
        size = event.block_bytes
        flow = self._flow(event)
        flow.got += 1
        flow.got_bytes += size
        back = self._given_back.get((event.pool, 0 if event.expandable else size))
        again, since = 0, self.allocations - AGAIN_WITHIN
        while back and again < size:
            if back[0][0] < since:
                back.popleft()
                continue
            taken = min(back[0][1], size - again)
            again += taken
            back[0][1] -= taken
            if not back[0][1]:
                back.popleft()
        flow.again += again > 0
        flow.again_bytes += again

    def _gave_back(self, event: GivenBack) -> None:
        flow = self._flow(event)
        flow.given_back += 1
        flow.given_back_bytes += event.block_bytes
        key = (event.pool, 0 if event.expandable else event.block_bytes)
        back = self._given_back.setdefault(key, deque(maxlen=AGAIN_WITHIN))
        back.append([self.allocations, event.block_bytes])

    def _flow(self, event: Got | GivenBack) -> Flow:
        return self.pages if event.expandable else self.segments.setdefault(event.block_bytes, Flow())

    def _released(self, event: Release) -> None:
        releases = self.releases.setdefault(event.kind, Releases())
        releases.count += 1
        releases.given_back_bytes += event.block_bytes
        releases.unsure += not event.sure

    def _failed(self, event: OutOfMemory) -> None:
        self.ooms += 1
        self.last_oom = event

    def _retried(self, event: Retry) -> None:
        self.retries += 1

    def _contradicted(self, event: Contradiction) -> None:
        self.contradictions += 1

    # what follows from the counts

    @property
    def duration_s(self) -> float | None:
        """From the first event to the last; None: not told."""
        if self.from_us is None or self.to_us is None or self.to_us <= self.from_us:
            return None
        return (self.to_us - self.from_us) / 1e6

    def a_second(self, count: int) -> float | None:
        """How many a second that is."""
        return None if self.duration_s is None else count / self.duration_s

    @property
    def flow(self) -> Flow:
        """All that was got from the driver and given back."""
        total = Flow()
        for each in (*self.segments.values(), self.pages):
            for name in Flow.__slots__:
                setattr(total, name, getattr(total, name) + getattr(each, name))
        return total

    def of(self, kind: Kind) -> Releases:
        """How often memory was given back for that cause."""
        return self.releases.get(kind, Releases())
