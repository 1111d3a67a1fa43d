"""Events as lines for people."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
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
from allocscope.allocator.chronicle.history import DeviceHistory
from allocscope.allocator.snapshot import DEFAULT_POOL
from allocscope.model.figures import size

NO_SUCH_LINES = (
    "PyTorch itself prints no such lines: no release from 2.0.1 to 2.14.1 does, and nothing reads TORCH_CUDA_ALLOC_LOG_LEVEL. Here is what they "
    "say, and no more; its real history is recorded by torch.cuda.memory._record_memory_history()"
)
_SECONDS, _UTC = 12, 27
"""Columns of a moment."""
_WHY = {
    Kind.FLUSH: "a request found no room: the cache is given back, and the driver asked again",
    Kind.EMPTY_CACHE: "the program empties the cache",
    Kind.GARBAGE_COLLECTION: "free segments that are old are given back",
    Kind.MADE_ROOM: "large free blocks are given back, for one larger than max_split_size",
    Kind.POOL_END: "a private pool gives back what it had",
}
_UNSURE = {
    Kind.FLUSH: "; or the program emptied the cache right before, which looks the same",
    Kind.EMPTY_CACHE: "; or a request found no room, which looks the same",
    Kind.GARBAGE_COLLECTION: "; or the program emptied the cache, which looks the same",
}


def heading(*, utc: bool) -> str:
    """Over the lines of `LineText`."""
    width = _UTC if utc else _SECONDS
    return (
        f"{'UTC' if utc else 'seconds':>{width}} {'dev':<3} {'event':<13} {'address':<14} {'requested':>12} {'block':>12} "
        f"{'stream':<6} {'pool':<5} what"
    )


class LineText:
    """Events as lines; moments as seconds before `end_us` (unix microseconds), or, where that is None, as UTC."""

    def __init__(self, end_us: int | None) -> None:
        self._end_us, self._width = end_us, _UTC if end_us is None else _SECONDS
        self._what: dict[type, Callable[[Any], str]] = {
            Allocated: _allocated,
            Freed: _freed,
            Waiting: lambda _: "freed; waits until other streams are done with it",
            WaitOver: _wait_over,
            Merged: _merged,
            Got: lambda _: "got from the driver",
            GivenBack: lambda _: "given back to the driver",
            Release: _release,
            OutOfMemory: _out_of_memory,
            Retry: _retry,
            Contradiction: lambda event: event.problem,
        }
        self._pools: dict[Pool, tuple[str, str, str]] = {}

    def line(self, event: Event) -> str:
        """One event."""
        pool = event.pool
        told = self._pools.get(pool)
        if told is None:
            told = self._pools[pool] = (_number(pool.device), _stream(pool.stream), _pool(pool))
        requested: int | None = getattr(event, "requested_bytes", None)
        block_bytes: int | None = getattr(event, "block_bytes", None)
        address: int | None = getattr(event, "address", None)
        return (
            f"{self._moment(event.time_us):>{self._width}} {told[0]:<3} {event.kind.value:<13} {'' if address is None else hex(address):<14} "
            f"{'' if requested is None else size(requested):>12} {'' if block_bytes is None else size(block_bytes):>12} "
            f"{told[1]:<6} {told[2]:<5} {self._what[type(event)](event)}"
        )

    def _moment(self, time_us: int | None) -> str:
        if time_us is None:
            return ""
        if self._end_us is None:
            return utc(time_us)
        return f"{(time_us - self._end_us) / 1e6:.6f}"


def utc(time_us: int) -> str:
    """A moment as UTC; a number that is none as it is."""
    try:
        moment = datetime.fromtimestamp(time_us // 1_000_000, UTC)
    except (OverflowError, OSError, ValueError):
        return f"{time_us} us"
    return f"{moment:%Y-%m-%dT%H:%M:%S}.{time_us % 1_000_000:06d}Z"


def _number(value: int | None) -> str:
    return "" if value is None else str(value)


def _stream(stream: int | None) -> str:
    """The default one is 0; others are pointers."""
    return "" if stream is None else str(stream) if 0 <= stream < 1 << 16 else hex(stream)


def _pool(pool: Pool) -> str:
    if pool.private in (None, DEFAULT_POOL):
        return pool.name or ""
    return f"{pool.name or ''} {pool.private[0]}.{pool.private[1]}".strip()


# what happened, in words


def _allocated(event: Allocated) -> str:
    hole, left = event.hole_bytes, event.left_bytes
    if event.driver is None or hole is None or left is None:
        return "allocated"
    if event.driver:
        return f"from the driver; {size(left)} of {size(hole)} is left" if left else "from the driver"
    return f"splits a free block of {size(hole)}; {size(left)} is left" if left else "a free block as it was"


def _freed(event: Freed) -> str:
    return _back_in(event.pool)


def _wait_over(event: WaitOver) -> str:
    waited = "" if event.waited_us is None else f" after {event.waited_us / 1e3:,.3f} ms"
    return f"other streams are done with it{waited}: {_back_in(event.pool)}"


def _back_in(pool: Pool) -> str:
    return f"back in the {pool.name} pool" if pool.name else "back in its pool"


def _merged(event: Merged) -> str:
    before, behind, freed = event.before_bytes, event.behind_bytes, event.freed_bytes
    if before is None or behind is None:
        return f"joined with a free block beside it{'' if freed is None else f', itself {size(freed)}'}"
    beside = [f"{size(each)} {where}" for each, where in ((before, "before"), (behind, "behind")) if each]
    return f"{size(freed or 0)} joins the free {' and '.join(beside)} it"


def _release(event: Release) -> str:
    needed = "" if event.needed_bytes is None else f" ({size(event.needed_bytes)} wanted)"
    pieces = "1 piece follows" if event.pieces == 1 else f"{event.pieces:,} pieces follow"
    return f"{_WHY[event.kind]}{needed}; {pieces}{'' if event.sure else _UNSURE.get(event.kind, '')}"


def _out_of_memory(event: OutOfMemory) -> str:
    device = "" if event.device_free_bytes is None else f" and {size(event.device_free_bytes)} on the device"
    usable = (
        f"{size(event.pool_free_bytes)} of its pool and stream in {event.pool_hole_count:,}, the largest {size(event.pool_largest_bytes)}"
        if event.pool_hole_count
        else "none of its pool and stream"
    )
    return f"OutOfMemoryError: free are {size(event.free_bytes)} in {event.hole_count:,} holes ({usable}){device}"


def _retry(event: Retry) -> str:
    free = "" if event.device_free_bytes is None else f"; {size(event.device_free_bytes)} was free"
    return f"the driver had no room{free}"


# around the lines


def beginning_as_text(history: DeviceHistory) -> Iterator[str]:
    """What there was before the first event."""
    count = len(history.live_before)
    if history.reserved_before:
        before = f"{size(history.reserved_before)} reserved and {size(sum(history.live_before))} in use in {count:,} blocks before that"
    else:
        before = "nothing reserved before that"
    first, last = history.times_us
    since = "" if first is None else f" from {utc(first)}"
    lasted = "" if first is None or last is None else f", {(last - first) / 1e6:,.3f} s"
    yield f"device {history.device}: {history.entries:,} entries{since}{lasted}; {before}"


def end_as_text(history: DeviceHistory) -> str:
    """Whether it is to be believed, once all events were told."""
    difference, first = history.difference(), history.first_contradiction
    who = f"device {history.device}:"
    if difference is None and first is None:
        return f"{who} what this came to is what the snapshot says, every block to the byte"
    parts = []
    if first is not None:
        what = "1 entry" if history.contradictions == 1 else f"{history.contradictions:,} entries"
        parts.append(f"{what} cannot be, after those before: the history has a gap, or was put together")
    if difference is not None:
        parts.append(f"{difference.blocks:,} blocks are not as the snapshot says, the first at {difference.address:#x}")
    return f"{who} {'; '.join(parts)}. From entry {history.estimate_from:,} on take this for an estimate"


@dataclass(frozen=True, slots=True)
class TextEnd:
    """What a log's text held."""

    lines: int
    ooms: int
    """Out-of-memory texts."""
    retries: int
    """PyTorch's warnings that the driver had no room."""


def end_of_text(told: TextEnd) -> str:
    """After the last line."""
    return (
        f"{told.lines:,} lines; out-of-memory texts: {told.ooms:,} (allocscope oom explains them); failed attempts: "
        f"{told.retries:,}"
    )
