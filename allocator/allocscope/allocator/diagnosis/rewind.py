"""Backwards through a history: how a device's memory stood before the snapshot was taken.

A program that unwinds after an OutOfMemoryError frees nearly all it had, and only then is the snapshot taken. But its history
tells each step, so that they can be undone one by one, from the snapshot back to that moment (ALLOCATOR.md 13). The history need
not begin with the process: only what is undone must be whole.

One thing a history does not tell: how large the block was that a free gave back. It follows from what was asked for (ALLOCATOR.md
2.2 and 2.9), but for slack of up to 1 MiB in a large segment that is not expandable. That shows by the block behind it, for no
block there is as small as that; only where the history does not reach back to the block's allocation can slack be taken for free.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Container, Iterable, Sequence
from heapq import heappop, heappush

from allocscope.allocator.diagnosis.past import Past
from allocscope.allocator.errors import TraceError
from allocscope.allocator.settings import MIB, MIN_BLOCK_BYTES, SMALL_SEGMENT_BYTES, AllocatorSettings
from allocscope.allocator.snapshot import (
    AWAITING,
    INACTIVE,
    LIVE,
    SnapshotBlock,
    SnapshotSegment,
    Stack,
    TraceEntry,
)

_LARGE_SLACK_BYTES = 1 * MIB


class _Block:
    __slots__ = ("address", "requested", "restored", "size", "stack", "state")

    def __init__(self, address: int, size: int, state: str, requested: int | None, stack: Stack | None) -> None:
        self.address, self.size, self.state, self.requested, self.stack = address, size, state, requested, stack
        self.restored = False
        """Whether its size is inferred from what was asked for."""


class _Segment:
    """A segment, or a mapped range of an expandable one, with its blocks by address."""

    __slots__ = ("address", "blocks", "expandable", "pool_id", "size", "small", "starts", "stream")

    def __init__(
        self, address: int, size: int, stream: int, pool_id: tuple[int, int], *, small: bool, expandable: bool
    ) -> None:
        self.address, self.size, self.stream, self.pool_id = address, size, stream, pool_id
        self.small, self.expandable = small, expandable
        self.starts: list[int] = []
        self.blocks: dict[int, _Block] = {}

    @property
    def end(self) -> int:
        return self.address + self.size

    def put(self, block: _Block) -> None:
        insort(self.starts, block.address)
        self.blocks[block.address] = block

    def drop(self, block: _Block) -> None:
        del self.starts[bisect_left(self.starts, block.address)]
        del self.blocks[block.address]

    def holding(self, address: int) -> _Block | None:
        index = bisect_right(self.starts, address) - 1
        return self.blocks[self.starts[index]] if index >= 0 else None

    def merge(self, block: _Block) -> None:
        """Let a free block absorb its free neighbours."""
        index = bisect_left(self.starts, block.address)
        if index + 1 < len(self.starts):
            after = self.blocks[self.starts[index + 1]]
            if after.state == INACTIVE:
                self.drop(after)
                block.size += after.size
        if index:
            before = self.blocks[self.starts[index - 1]]
            if before.state == INACTIVE:
                self.drop(block)
                before.size += block.size


class Rewind:
    """One device's memory, from the snapshot backwards."""

    def __init__(
        self,
        device: int,
        segments: Iterable[SnapshotSegment],
        trace: Sequence[TraceEntry],
        settings: AllocatorSettings,
    ) -> None:
        """`segments`: the device's own, whose blocks fill them and have addresses."""
        self._device, self._trace, self._settings = device, trace, settings
        self._at = len(trace)
        self._past = Past(trace)
        self._stacks_recorded = any(entry.told_frames for entry in trace)
        self._segments: dict[int, _Segment] = {}
        for segment in segments:
            self._add(_opened(segment))
        self._starts = sorted(self._segments)
        self._undo = {
            "alloc": self._undo_alloc,
            "free_requested": self._undo_free_requested,
            "free_completed": self._undo_free_completed,
            "segment_alloc": self._undo_segment_alloc,
            "segment_free": self._undo_segment_free,
            "segment_map": self._undo_segment_map,
            "segment_unmap": self._undo_segment_unmap,
        }

    def back_to(self, entry: int) -> tuple[SnapshotSegment, ...]:
        """The segments as they were right after trace entry `entry`, which must not come after what was asked for before.

        Raises TraceError where the history contradicts the snapshot or itself; then nothing can be told of earlier moments.
        """
        while self._at > entry + 1:
            self._at -= 1
            told = self._trace[self._at]
            undo = self._undo.get(told.action)
            if undo is not None:
                undo(told)
        self._look_further_back()
        return tuple(self._closed(self._segments[start]) for start in self._starts)

    def _look_further_back(self) -> None:
        """What still earlier entries tell of blocks that came back: where they were allocated, and where they end.

        Where a free block lies behind one in a large segment that is not expandable, slack may be hidden at its beginning. Then
        what was behind the slack was in use for a part of the block's life, so that an entry tells its address. Without such an
        entry up to the block's own allocation there is no slack: what is free was split off then.
        """
        back = {
            block.address: (segment, block)
            for segment in self._segments.values()
            for block in segment.blocks.values()
            if block.restored and block.state != INACTIVE
        }
        doubtful = {address for address, place in back.items() if _may_hide_slack(*place)}
        if not self._stacks_recorded:
            back = {address: back[address] for address in doubtful}
        for address, (_, block) in back.items():
            if block.stack is None and (alloc := self._past.alloc(address, self._at)) is not None:
                block.stack = self._trace[alloc].stack
        for address in doubtful:
            self._extend(*back[address], back)

    def _extend(self, segment: _Segment, block: _Block, back: Container[int]) -> None:
        """Give a block the slack behind it: up to each address there that an entry tells, from the latest to its own allocation.

        `back`: where blocks came back. Entries that allocated those tell nothing of this one.
        """
        index, seen = self._at, block.address + block.size
        limit = seen + segment.blocks[seen].size
        told: list[tuple[int, int]] = []
        while True:
            reach = min(block.address + block.size + _LARGE_SLACK_BYTES, limit)
            for address, last in self._past.told(seen, reach, index):
                heappush(told, (-last, address))
            seen = max(seen, reach)
            if not told:
                return
            index, end = -told[0][0], told[0][1]
            alloc = self._past.alloc(block.address, self._at)
            if alloc is not None and index < alloc:
                return
            heappop(told)
            if end in back and index == self._past.alloc(end, self._at):
                for _, last in self._past.told(end - 1, end, index):
                    heappush(told, (-last, end))
            else:
                _give_slack(segment, block, end)

    # each kind of entry, undone

    def _undo_alloc(self, entry: TraceEntry) -> None:
        segment, block = self._place(entry)
        if block is None or block.address != entry.address or block.state != LIVE:
            raise self._contradiction(entry, "no live block begins there afterwards")
        block.state, block.requested, block.stack, block.restored = INACTIVE, None, None, False
        segment.merge(block)

    def _undo_free_requested(self, entry: TraceEntry) -> None:
        _, block = self._place(entry)
        if block is None or block.address != entry.address or block.state not in (AWAITING, "active_awaiting_free"):
            raise self._contradiction(entry, "no block begins there afterwards that waits")
        block.state = LIVE

    def _undo_free_completed(self, entry: TraceEntry) -> None:
        segment, hole = self._place(entry)
        if hole is None or hole.state != INACTIVE:
            raise self._contradiction(entry, "it is not free afterwards")
        taken = self._taken(segment, hole, entry)
        end = hole.address + hole.size
        block = _Block(entry.address, taken, AWAITING, entry.size, None)
        block.restored = True
        hole.size = entry.address - hole.address
        if not hole.size:
            segment.drop(hole)
        segment.put(block)
        if end > entry.address + taken:
            segment.put(_Block(entry.address + taken, end - entry.address - taken, INACTIVE, None, None))

    def _taken(self, segment: _Segment, hole: _Block, entry: TraceEntry) -> int:
        """How large the block was that this free gave back."""
        available = hole.address + hole.size - entry.address
        rounded = self._settings.round(entry.size)
        if rounded > available:  # the settings were others then
            rounded = max(-(-entry.size // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES, MIN_BLOCK_BYTES)
        if rounded > available:
            raise self._contradiction(entry, f"only {available} bytes are free there afterwards")
        limit = self._settings.max_split_bytes
        never_split = limit is not None and rounded >= limit and available == segment.size
        slack = not segment.small and not segment.expandable and available - rounded <= _LARGE_SLACK_BYTES
        return available if never_split or slack else rounded

    def _undo_segment_alloc(self, entry: TraceEntry) -> None:
        segment = self._segments.get(entry.address)
        if segment is None or not _is_free(segment) or segment.size != entry.size:
            raise self._contradiction(entry, "no free segment of that size begins there afterwards")
        self._remove(segment)

    def _undo_segment_free(self, entry: TraceEntry) -> None:
        small = entry.size == SMALL_SEGMENT_BYTES
        segment = _Segment(entry.address, entry.size, entry.stream, entry.pool_id, small=small, expandable=False)
        self._insert(segment, entry)

    def _undo_segment_map(self, entry: TraceEntry) -> None:
        segment, hole = self._place(entry)
        end = entry.address + entry.size
        if hole is None or hole.state != INACTIVE or end > hole.address + hole.size or not segment.expandable:
            raise self._contradiction(entry, "it is not free afterwards")
        self._remove(segment)
        for start, stop in ((segment.address, entry.address), (end, segment.end)):
            if start < stop:
                self._add(_part(segment, start, stop))
                insort(self._starts, start)

    def _undo_segment_unmap(self, entry: TraceEntry) -> None:
        index = bisect_right(self._starts, entry.address)
        before = self._segments[self._starts[index - 1]] if index else None
        after = self._segments[self._starts[index]] if index < len(self._starts) else None
        near = [s for s in (before, after) if s and s.expandable and _continues(s, entry)]
        small = near[0].small if near else entry.size % self._settings.page_bytes(small=False) != 0
        pool_id = near[0].pool_id if near else entry.pool_id
        added = _Segment(entry.address, entry.size, entry.stream, pool_id, small=small, expandable=True)
        self._insert(added, entry)
        for other in near:
            if (other.small, other.pool_id) == (small, pool_id):
                self._join(*sorted((other, self._segments[added.address]), key=_address))
                added = self._segments[min(other.address, added.address)]

    # segments

    def _add(self, segment: _Segment) -> None:
        self._segments[segment.address] = segment

    def _insert(self, segment: _Segment, entry: TraceEntry) -> None:
        """A free segment comes back."""
        index = bisect_right(self._starts, segment.address)
        before = self._segments[self._starts[index - 1]] if index else None
        after = self._starts[index] if index < len(self._starts) else None
        if (before and before.end > segment.address) or (after is not None and segment.end > after):
            raise self._contradiction(entry, "there is another segment afterwards")
        segment.put(_Block(segment.address, segment.size, INACTIVE, None, None))
        self._add(segment)
        self._starts.insert(index, segment.address)

    def _remove(self, segment: _Segment) -> None:
        del self._segments[segment.address]
        del self._starts[bisect_left(self._starts, segment.address)]

    def _join(self, first: _Segment, second: _Segment) -> None:
        """Two mapped ranges become one."""
        self._remove(second)
        first.size += second.size
        last = first.blocks[first.starts[-1]]
        first.starts += second.starts
        first.blocks |= second.blocks
        if last.state == INACTIVE:
            first.merge(last)

    def _place(self, entry: TraceEntry) -> tuple[_Segment, _Block | None]:
        index = bisect_right(self._starts, entry.address) - 1
        segment = self._segments[self._starts[index]] if index >= 0 else None
        if segment is None or entry.address >= segment.end:
            raise self._contradiction(entry, "there is no segment afterwards")
        return segment, segment.holding(entry.address)

    def _contradiction(self, entry: TraceEntry, problem: str) -> TraceError:
        what = f"{entry.action} of {entry.size} bytes at {entry.address:#x}, but {problem}"
        return TraceError(self._at, f"{what}; the history has a gap between this entry and the snapshot")

    def _closed(self, segment: _Segment) -> SnapshotSegment:
        blocks = [segment.blocks[start] for start in segment.starts]
        if not segment.small and not segment.expandable:
            blocks = _without_slack(blocks)
        return SnapshotSegment(
            device=self._device,
            address=segment.address,
            total_size=segment.size,
            stream=segment.stream,
            segment_type="small" if segment.small else "large",
            pool_id=segment.pool_id,
            is_expandable=segment.expandable,
            blocks=tuple(
                SnapshotBlock(block.address, block.size, block.requested, block.state, block.stack) for block in blocks
            ),
        )


def _opened(segment: SnapshotSegment) -> _Segment:
    small = segment.segment_type == "small"
    opened = _Segment(
        segment.address,
        segment.total_size,
        segment.stream,
        segment.pool_id,
        small=small,
        expandable=segment.is_expandable,
    )
    for block in segment.blocks:
        opened.blocks[block.address] = _Block(block.address, block.size, block.state, block.requested_size, block.stack)
    opened.starts = sorted(opened.blocks)
    return opened


def _part(segment: _Segment, start: int, stop: int) -> _Segment:
    """What is left of a mapped range when a part of it is gone; the hole that it was in is cut."""
    part = _Segment(
        start, stop - start, segment.stream, segment.pool_id, small=segment.small, expandable=segment.expandable
    )
    for block in segment.blocks.values():
        low, high = max(block.address, start), min(block.address + block.size, stop)
        if low < high:
            kept = _Block(low, high - low, block.state, block.requested, block.stack)
            kept.restored = block.restored
            part.blocks[low] = kept
    part.starts = sorted(part.blocks)
    return part


def _without_slack(blocks: list[_Block]) -> list[_Block]:
    """Give what is too small to be a block of a large segment to the block before it, whose size was inferred."""
    kept: list[_Block] = []
    for block in blocks:
        owner = kept[-1] if kept else None
        if block.state == INACTIVE and block.size <= _LARGE_SLACK_BYTES and owner and owner.restored:
            whole = _Block(owner.address, owner.size + block.size, owner.state, owner.requested, owner.stack)
            whole.restored = True
            kept[-1] = whole
        else:
            kept.append(block)
    return kept


def _may_hide_slack(segment: _Segment, block: _Block) -> bool:
    behind = segment.blocks.get(block.address + block.size)
    return not segment.small and not segment.expandable and behind is not None and behind.state == INACTIVE


def _give_slack(segment: _Segment, block: _Block, end: int) -> None:
    """Give a block what of the hole behind it lies before `end`."""
    hole = segment.blocks.get(block.address + block.size)
    slack = end - block.address - block.size
    if hole is not None and 0 < slack <= hole.size:
        segment.drop(hole)
        block.size += slack
        if hole.size > slack:
            segment.put(_Block(end, hole.size - slack, INACTIVE, None, None))


def _is_free(segment: _Segment) -> bool:
    return len(segment.blocks) == 1 and segment.blocks[segment.starts[0]].state == INACTIVE


def _continues(segment: _Segment, entry: TraceEntry) -> bool:
    """Whether pages lie directly before or after this range, and are of its stream."""
    adjacent = segment.end == entry.address or entry.address + entry.size == segment.address
    return adjacent and segment.stream == entry.stream


def _address(segment: _Segment) -> int:
    return segment.address
