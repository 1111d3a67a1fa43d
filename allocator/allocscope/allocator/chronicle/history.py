"""A device's recorded history, told event by event."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from operator import attrgetter

from allocscope.allocator.chronicle.causes import Burst, Piece, Room, cause_of
from allocscope.allocator.chronicle.events import (
    Allocated,
    Contradiction,
    Event,
    Freed,
    GivenBack,
    Got,
    Merged,
    OutOfMemory,
    Pool,
    Release,
    Waiting,
    WaitOver,
)
from allocscope.allocator.chronicle.foreknown import never_split, privates_not_told, reserved_peak
from allocscope.allocator.chronicle.layout import Block
from allocscope.allocator.chronicle.shadow import Shadow
from allocscope.allocator.chronicle.verification import Difference, difference_of
from allocscope.allocator.settings import SMALL_MAX_BYTES, AllocatorSettings
from allocscope.allocator.simulator.beginning import RELEASES, beginning_of
from allocscope.allocator.simulator.blocks import FREE
from allocscope.allocator.simulator.seed import as_told
from allocscope.allocator.snapshot import AWAITING, DEFAULT_POOL, SnapshotSegment, TraceEntry

_BETWEEN_RELEASES = frozenset((*RELEASES, "free_completed", "snapshot", "annotate"))


class DeviceHistory:
    """What happened in one device's allocator. `events` can be gone through once."""

    def __init__(
        self,
        device: int,
        trace: Sequence[TraceEntry],
        segments: Sequence[SnapshotSegment],
        settings: AllocatorSettings,
        *,
        room: Room | None = None,
    ) -> None:
        """`segments`: the device's own, after the last entry. `room`: where it is known."""
        self.device, self.contradictions = device, 0
        self.first_contradiction: int | None = None
        """The first entry that cannot be; from there on what is told is an estimate."""
        self._trace, self._segments, self._settings, self._room = trace, segments, settings, room
        self._pool = Pool(device, None, None, None)
        self._shadow = Shadow(device, settings, never_split=never_split(segments, settings))
        self._shadow.begin(beginning_of(trace, map(as_told, segments), settings))
        self.live_before = tuple(block.size for block in self._shadow.blocks.values() if block.state != FREE)
        """Sizes of the blocks that were in use before the first entry."""
        self.reserved_before = self._reserved = sum(block.size for block in self._shadow.blocks.values())
        self._peak_bytes = reserved_peak(self._reserved, trace)
        self._note_problems(-1, None, 0, [])
        self._privates = privates_not_told(trace, segments)
        actions = Counter(map(attrgetter("action"), trace))
        self._asked_before = actions["free_requested"] > 0
        """Frees may be recorded only when they are asked for, or only when they are complete (skip_actions)."""
        waits = any(block.state == AWAITING for segment in segments for block in segment.blocks)
        self._completes = actions["free_completed"] > 0 or waits
        self._got: list[tuple[int, int]] = []
        """What was got from the driver, from where to where, and for no allocation yet."""
        self._burst: Burst | None = None
        self._freed_late: set[int] = set()
        """Free blocks that came about by a wait that was over, since the last allocation or free."""

    def events(self) -> Iterator[Event]:
        """All that happened, in order."""
        out: list[Event] = []
        take = {
            "alloc": self._alloc,
            "free_requested": self._free_requested,
            "free_completed": self._free_completed,
            "segment_alloc": self._got_memory,
            "segment_map": self._got_memory,
            "segment_free": self._gave_back,
            "segment_unmap": self._gave_back,
            "oom": self._oom,
        }
        shadow, trace, known = self._shadow, self._trace, take.get
        for index, entry in enumerate(trace):
            shadow.entry = index
            if self._burst is not None and entry[0] not in _BETWEEN_RELEASES:
                yield self._release(self._burst, index)
                yield from out
                out.clear()
            handle = known(entry[0])
            if handle is not None:
                handle(index, entry, out)
                if shadow.problems:
                    self._note_problems(index, entry[4] or None, entry[1], out)
            if self._burst is None and out:
                yield from out
                out.clear()
        if self._burst is not None:
            yield self._release(self._burst, len(trace))
            yield from out

    def difference(self) -> Difference | None:
        """After the last event: how what this came to differs from the snapshot; None: not at all, to the byte."""
        return difference_of(self._shadow.blocks.values(), self._segments)

    @property
    def entries(self) -> int:
        """How many it has."""
        return len(self._trace)

    @property
    def times_us(self) -> tuple[int | None, int | None]:
        """Of the first entry and of the last; None: not told (PyTorch before 2.2)."""
        if not self._trace:
            return None, None
        return self._trace[0].time_us or None, self._trace[-1].time_us or None

    @property
    def estimate_from(self) -> int | None:
        """After the last event: from which entry on what was told is an estimate; None: all of it is exact."""
        difference = self.difference()
        starts = [self.first_contradiction, None if difference is None else difference.from_entry]
        return min((start for start in starts if start is not None), default=None)

    # each kind of entry

    def _alloc(self, index: int, entry: TraceEntry, out: list[Event]) -> None:
        block, hole, left = self._shadow.alloc(entry)
        driver = False
        if self._got:
            end = block.address + block.size
            driver = any(start < end and block.address < stop for start, stop in self._got)
            if driver or len(self._got) > 8:
                self._got.clear()
        if self._freed_late:
            self._freed_late.clear()
        out.append(
            Allocated(index, entry[4] or None, block.span.pool, block.address, entry[2], block.size, driver, hole, left)
        )

    def _free_requested(self, index: int, entry: TraceEntry, out: list[Event]) -> None:
        self._freed_late.clear()
        block = self._shadow.free_requested(entry)
        if block is None:
            return
        following = self._trace[index + 1] if index + 1 < len(self._trace) else None
        if not self._completes:
            self._free_completed(index, entry, out)
        elif following is None or following[0] != "free_completed" or following[1] != entry[1]:
            out.append(Waiting(index, entry[4] or None, block.span.pool, entry[1], block.requested, block.size))

    def _free_completed(self, index: int, entry: TraceEntry, out: list[Event]) -> None:
        address, time_us = entry[1], entry[4] or None
        waiting = self._shadow.blocks.get(address)
        since, asked_at = (waiting.since_us, waiting.entry) if waiting is not None else (0, index)
        done = self._shadow.free_completed(entry, asked_before=self._asked_before)
        if done is None:
            return
        block, size, joined = done
        pool = block.span.pool
        if asked_at >= index - 1 or not self._asked_before:
            out.append(Freed(index, time_us, pool, address, block.requested, size))
        else:
            waited = time_us - since if time_us and since else None
            out.append(WaitOver(index, time_us, pool, address, block.requested, size, waited))
            self._freed_late.add(address if joined is None else joined[0])
        if joined is not None:
            out.append(Merged(index, time_us, pool, joined[0], joined[1], size, joined[2], joined[3]))

    def _got_memory(self, index: int, entry: TraceEntry, out: list[Event]) -> None:
        address, size = entry[1], entry[2]
        if not self._shadow.has_size(entry):
            return
        expandable = entry[0] == "segment_map"
        if expandable:
            span = self._shadow.segment_map(entry)
        else:
            span = self._shadow.segment_alloc(entry, self._privates.get(index, entry[5])).span
        self._reserved += size
        self._got.append((address, address + size))
        out.append(Got(index, entry[4] or None, span.pool, address, size, expandable))

    def _gave_back(self, index: int, entry: TraceEntry, out: list[Event]) -> None:
        address, size = entry[1], entry[2]
        if not self._shadow.has_size(entry):
            return
        expandable = entry[0] == "segment_unmap"
        if self._burst is None:
            self._burst = Burst(index, entry[4] or None, self._reserved)
        late = address in self._freed_late
        pool = self._shadow.segment_unmap(entry) if expandable else self._shadow.segment_free(entry)
        if pool is None:
            pool = Pool(self.device, entry[3], None, entry[5])
        self._burst.pieces.append(
            Piece(pool, address, size, expandable, late or (expandable and bool(self._freed_late)))
        )
        self._reserved -= size
        out.append(GivenBack(index, entry[4] or None, pool, address, size, expandable))

    def _oom(self, index: int, entry: TraceEntry, out: list[Event]) -> None:
        self._got.clear()
        small, blocks = entry[2] <= SMALL_MAX_BYTES, self._shadow.blocks.values()
        free = [block for block in blocks if block.state == FREE]
        pool = Pool(self.device, entry[3], small, entry[5])
        mine = [block.size for block in free if block.span.pool == pool]
        out.append(
            OutOfMemory(
                index,
                entry[4] or None,
                pool,
                entry[2],
                entry[6],
                sum(block.size for block in free),
                len(free),
                sum(mine),
                len(mine),
                max(mine, default=0),
            )
        )

    def _release(self, burst: Burst, index: int) -> Release:
        self._burst = None
        keeps = self._settings.max_split_bytes is not None or self._settings.gc_threshold > 0
        cause = cause_of(
            burst,
            self._trace,
            index,
            self._settings,
            self._room,
            keeps_something=keeps and any(map(_could_be_given_back, self._shadow.blocks.values())),
            peak_bytes=self._peak_bytes,
        )
        return Release(
            burst.entry,
            burst.time_us,
            self._pool,
            cause.kind,
            len(burst.pieces),
            burst.size,
            cause.needed_bytes,
            cause.sure,
        )

    def _note_problems(self, index: int, time_us: int | None, address: int, out: list[Event]) -> None:
        problems = self._shadow.problems
        if problems and self.first_contradiction is None:
            self.first_contradiction = max(index, 0)
        self.contradictions += len(problems)
        out += [Contradiction(index, time_us, self._pool, address, problem) for problem in problems]
        problems.clear()


def _could_be_given_back(block: Block) -> bool:
    return block.state == FREE and block.size == block.span.size and block.span.pool.private == DEFAULT_POOL
