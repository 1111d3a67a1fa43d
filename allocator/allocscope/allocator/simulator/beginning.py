"""How an allocator stood before its history began: a snapshot, walked back entry by entry.

PyTorch keeps a limited number of entries, and often starts late; then the first ones free what nobody saw allocated.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from allocscope.allocator.settings import SMALL_MAX_BYTES, SMALL_SEGMENT_BYTES, AllocatorSettings
from allocscope.allocator.simulator.blocks import AWAITING, LIVE, STATES
from allocscope.allocator.snapshot import SnapshotSegment, TraceEntry


@dataclass(slots=True)
class _Range:
    """A segment, or a mapped range of an expandable one."""

    size: int
    stream: int
    pool_id: tuple[int, int]
    small: bool
    expandable: bool


@dataclass(slots=True)
class _Held:
    """A block that is live, or waits."""

    requested: int
    state: int
    size: int | None
    """None: freed within the history, and so seen by nobody."""


@dataclass(frozen=True, slots=True)
class Beginning:
    """How an allocator stood before its history."""

    segments: list[dict[str, Any]]
    """In the form of torch.cuda.memory_snapshot(); empty where the history begins with them."""
    contradictions: int
    """How many entries cannot have led to the segments in the end: then what comes of it is not defined."""


def beginning_of(
    trace: Sequence[TraceEntry], segments: Iterable[Mapping[str, Any]], settings: AllocatorSettings
) -> list[dict[str, Any]]:
    """The segments of `walk_back`, which see."""
    return walk_back(trace, segments, settings).segments


def walk_back(
    trace: Sequence[TraceEntry], segments: Iterable[Mapping[str, Any]], settings: AllocatorSettings
) -> Beginning:
    """What was there before the first entry.

    `segments` are those after the last entry. Sizes of blocks are exact but for slack of up to 1 MiB in large ones that
    something free lies behind of which nothing was allocated before they were freed.

    Sizes are bytes. PyTorch 2.1 to 2.14; before 2.12 entries do not tell private pools, and a segment given back counts as of the
    default one. KeyError and ValueError: a segment or block lacks a key, or a block's state is not known.
    """
    walk = _Walk(segments, settings)
    if walk.reserved_bytes == growth_bytes(trace):
        return Beginning([], 0)
    for entry in reversed(trace):
        walk.undo(entry)
    walk.part()
    order = sorted(walk.held)
    return Beginning([walk.told(start, order, settings) for start in sorted(walk.ranges)], walk.contradictions)


GAINS, RELEASES = ("segment_alloc", "segment_map"), ("segment_free", "segment_unmap")


def growth_bytes(trace: Iterable[TraceEntry]) -> int:
    """By how much a history lets what is reserved grow."""
    return sum(e.size if e.action in GAINS else -e.size for e in trace if e.action in GAINS or e.action in RELEASES)


def reserved_in_the_end(trace: Iterable[TraceEntry], segments: Sequence[SnapshotSegment]) -> int:
    """Bytes reserved after a history: its segments', or, where there are none, what it comes to by itself."""
    return sum(segment.total_size for segment in segments) if segments else max(growth_bytes(trace), 0)


class _Walk:
    def __init__(self, segments: Iterable[Mapping[str, Any]], settings: AllocatorSettings) -> None:
        self._settings = settings
        self.ranges: dict[int, _Range] = {}
        self.held: dict[int, _Held] = {}
        self.contradictions = 0
        self._unsized: list[int] = []
        """Addresses of large blocks whose size nobody saw, ascending."""
        for segment in segments:
            pool_id = segment.get("segment_pool_id", (0, 0))
            self._add(
                segment["address"],
                _Range(
                    segment["total_size"],
                    segment["stream"],
                    (pool_id[0], pool_id[1]),
                    segment["segment_type"] == "small",
                    bool(segment.get("is_expandable", False)),
                ),
            )
            for block in segment["blocks"]:
                state = STATES.index(block["state"])
                if state in (LIVE, AWAITING):
                    requested = block.get("requested_size")
                    size = block["size"]
                    self.held[block["address"]] = _Held(size if requested is None else requested, state, size)

    @property
    def reserved_bytes(self) -> int:
        """As of now."""
        return sum(each.size for each in self.ranges.values())

    def undo(self, entry: TraceEntry) -> None:
        """How it was before that entry."""
        address, size = entry.address, entry.size
        match entry.action:
            case "alloc":
                if self.held.pop(address, None) is None:
                    self.contradictions += 1
                if self._is_large(size):
                    self._size_before(address)
            case "free_completed":
                self.held[address] = _Held(size, AWAITING, None)
                if self._is_large(size):
                    insort(self._unsized, address)
            case "free_requested":
                self.held.setdefault(address, _Held(size, LIVE, None)).state = LIVE
            case "segment_alloc":
                if self.ranges.pop(address, None) is None:
                    self.contradictions += 1
            case "segment_free" | "segment_unmap":
                small = size == SMALL_SEGMENT_BYTES if entry.action == "segment_free" else self._is_small(entry)
                expandable = entry.action == "segment_unmap"
                self._add(address, _Range(size, entry.stream, entry.pool_id, small, expandable))
            case "segment_map":
                self._remove(address, size)

    def _is_large(self, requested: int) -> bool:
        return self._settings.round(requested) > SMALL_MAX_BYTES

    def _size_before(self, address: int) -> None:
        """A block was allocated here: so here ends the one before it, if no free block can be as small as what is between."""
        unsized = self._unsized
        at = bisect_left(unsized, address)
        if at < len(unsized) and unsized[at] == address:
            del unsized[at]
        held = self.held.get(unsized[at - 1]) if at else None
        if held is not None and held.size is None:
            start = unsized[at - 1]
            left = address - start - self._settings.round(held.requested)
            if 0 <= left <= SMALL_MAX_BYTES:
                held.size = address - start

    def _is_small(self, entry: TraceEntry) -> bool:
        """Whether an expandable range is of the small pool: as its neighbour is, or what nobody else could have."""
        for start, each in self.ranges.items():
            if each.expandable and (start + each.size == entry.address or start == entry.address + entry.size):
                return each.small
        return entry.size % self._settings.page_bytes(small=False) != 0

    def _add(self, address: int, added: _Range) -> None:
        """A range, joined with those of its kind beside it where it is expandable."""
        if added.expandable:
            following = self.ranges.get(address + added.size)
            if following is not None and _alike(following, added):
                added.size += self.ranges.pop(address + added.size).size
            for start, each in self.ranges.items():
                if start + each.size == address and _alike(each, added):
                    each.size += added.size
                    return
        self.ranges[address] = added

    def _remove(self, address: int, size: int) -> None:
        for start, each in self.ranges.items():
            if each.expandable and start <= address and address + size <= start + each.size:
                behind = start + each.size - (address + size)
                if behind:
                    rest = _Range(behind, each.stream, each.pool_id, each.small, expandable=True)
                    self.ranges[address + size] = rest
                each.size = address - start
                if not each.size:
                    del self.ranges[start]
                return

    def part(self) -> None:
        """Leave out ranges that lie in others, which nothing leads to."""
        end = 0
        for start, each in sorted(self.ranges.items()):
            if start < end or each.size <= 0:
                del self.ranges[start]
                self.contradictions += 1
            else:
                end = start + each.size

    def told(self, start: int, order: Sequence[int], settings: AllocatorSettings) -> dict[str, Any]:
        """A range as PyTorch would tell it; `order` are the addresses of what is held."""
        each = self.ranges[start]
        end = start + each.size
        inside = order[bisect_left(order, start) : bisect_left(order, end)]
        blocks: list[dict[str, Any]] = []
        at = start
        for address, following in pairwise([*inside, end]):
            if address > at:
                blocks.append({"address": at, "size": address - at, "requested_size": 0, "state": STATES[0]})
            held, room = self.held[address], following - address
            size = _size(held, each, room, settings)
            if not 0 < size <= room:
                self.contradictions += 1
                size = room
            blocks.append(
                {"address": address, "size": size, "requested_size": held.requested, "state": STATES[held.state]}
            )
            at = address + size
        if at < end:
            blocks.append({"address": at, "size": end - at, "requested_size": 0, "state": STATES[0]})
        return {
            "address": start,
            "total_size": each.size,
            "stream": each.stream,
            "segment_type": "small" if each.small else "large",
            "segment_pool_id": each.pool_id,
            "is_expandable": each.expandable,
            "blocks": blocks,
        }


def _alike(one: _Range, other: _Range) -> bool:
    return (one.stream, one.pool_id, one.small, one.expandable) == (
        other.stream,
        other.pool_id,
        other.small,
        other.expandable,
    )


def _size(held: _Held, inside: _Range, room: int, settings: AllocatorSettings) -> int:
    """A block's size; no free block of the large pool is as small as 1 MiB, so what is left over and smaller is the block's."""
    if held.size is not None:
        return held.size
    rounded = min(settings.round(held.requested), room)
    if inside.small or inside.expandable:
        return rounded
    whole = settings.max_split_bytes is not None and rounded >= settings.max_split_bytes
    return room if whole or room - rounded <= SMALL_MAX_BYTES else rounded
