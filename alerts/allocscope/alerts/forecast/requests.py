"""What the job asks for: its largest requests of late, as maps and the driver's calls show them."""

from __future__ import annotations

from collections import deque

from allocscope.model import BlockMap, Sample

KEPT_US = 600_000_000
"""A request counts for ten minutes: one that comes with a checkpoint or an evaluation is made again."""
KEPT = 16


class Requests:
    """The largest requests of late, each larger than all that came after it."""

    __slots__ = ("_largest",)

    def __init__(self) -> None:
        self._largest: deque[tuple[int, int]] = deque(maxlen=KEPT)

    def observe(self, time_us: int, request_bytes: int) -> None:
        """One request."""
        while self._largest and self._largest[-1][1] <= request_bytes:
            self._largest.pop()
        self._largest.append((time_us, request_bytes))

    def largest(self, now_us: int) -> int | None:
        """The largest of late; None: nothing is known."""
        while self._largest and now_us - self._largest[0][0] > KEPT_US:
            self._largest.popleft()
        return self._largest[0][1] if self._largest else None


def largest_live(block_map: BlockMap) -> int | None:
    """The largest request that was live at a map's moment."""
    return max((c.largest_bytes for group in block_map.groups for c in group.live), default=None)


def got_at_once(before: Sample, sample: Sample) -> int | None:
    """What one request made the driver give, where between two samples nothing else was got or given back."""
    figures = (before.num_device_alloc, sample.num_device_alloc, before.num_device_free, sample.num_device_free)
    allocs_before, allocs, frees_before, frees = figures
    if allocs is None or allocs_before is None or allocs - allocs_before != 1 or frees != frees_before:
        return None
    got = (sample.reserved_bytes or 0) - (before.reserved_bytes or 0)
    return got if got > 0 else None
