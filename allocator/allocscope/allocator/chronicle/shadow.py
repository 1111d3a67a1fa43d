"""One device's blocks, as they must lie after each entry of its history.

`allocscope.allocator.state` does the same for histories that are whole, and refuses others; this one follows any: one that
begins in the middle of a run, was made under settings that changed, or contradicts itself. What cannot be is told and mended, so
that the next entries make sense again.

Two things a history does not tell are inferred (ALLOCATOR.md 2.9): how large the block of an allocation is, and, of blocks that
were there before the history, whether slack belongs to them. A later allocation inside such a block shows where it ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from allocscope.allocator.chronicle.events import Pool
from allocscope.allocator.chronicle.layout import Block, Joined, Layout, Span
from allocscope.allocator.settings import (
    MIN_BLOCK_BYTES,
    SMALL_MAX_BYTES,
    SMALL_SEGMENT_BYTES,
    AllocatorSettings,
)
from allocscope.allocator.simulator.blocks import AWAITING, FREE, LIVE, STATES
from allocscope.allocator.snapshot import DEFAULT_POOL, TraceEntry

_NO_LIMIT = 1 << 62


class Taken(NamedTuple):
    """What an allocation took."""

    block: Block
    hole_bytes: int
    left_bytes: int


class Shadow:
    """The blocks of one device's allocator. `problems`: what could not be, since they were last taken away."""

    def __init__(
        self, device: int, settings: AllocatorSettings, *, never_split: frozenset[tuple[int, int]] = frozenset()
    ):
        """`never_split`: private pools whose blocks are whole segments (MemPool(no_split=True))."""
        self.problems: list[str] = []
        self.entry = -1
        self._layout = Layout()
        self.blocks = self._layout.blocks
        """By address."""
        self._device, self._settings, self._never_split = device, settings, never_split
        self._expandable: dict[Pool, Span] = {}
        self._max_split_bytes = settings.max_split_bytes or _NO_LIMIT
        self._rounds_plainly = settings.rounds_plainly

    def begin(self, segments: Iterable[Mapping[str, Any]]) -> None:
        """What was there before the history, in the form of torch.cuda.memory_snapshot()."""
        for told in segments:
            pool = Pool(self._device, told["stream"], told["segment_type"] == "small", told["segment_pool_id"])
            start, size = told["address"], told["total_size"]
            span = self._span(pool, size, expandable=told["is_expandable"])
            if size <= 0:
                continue
            self._vacate(start, size, "before the history a segment")
            rest = Block(start, size, span, -1)
            if span.expandable:
                self._layout.put(rest)
            else:
                self._layout.put_segment(rest)
            end = start + size
            for block in told["blocks"]:
                address, stop = max(block["address"], rest.address), min(block["address"] + block["size"], end)
                if block["state"] == STATES[FREE] or stop <= address:
                    continue
                held = rest if address == rest.address else self._layout.cut(rest, address - rest.address, -1)
                held.state, held.requested, held.guessed = STATES.index(block["state"]), block["requested_size"], True
                if stop == end:
                    break
                rest = self._layout.cut(held, stop - address, -1)

    # allocations and frees

    def alloc(self, entry: TraceEntry) -> Taken:
        """A block is handed out."""
        _, address, requested, *_ = entry
        if self._rounds_plainly:
            needed = (requested + 511) & -512 or MIN_BLOCK_BYTES
        else:
            needed = self._settings.round(requested)
        block = self.blocks.get(address)
        if block is None or block.state or block.size < needed:
            block, needed = self._room_at(entry, needed)
        size, span = block.size, block.span
        if entry[3] != span.pool.stream:
            self.problems.append(
                f"{requested} bytes at {address:#x} for stream {entry[3]}, in another stream's segment"
            )
        rest = size - needed
        if rest >= span.least_rest and (span.least_rest == MIN_BLOCK_BYTES or needed < self._max_split_bytes):
            self._layout.cut(block, needed, self.entry)
        else:
            rest = 0
        block.state, block.requested, block.guessed, block.entry = LIVE, requested, False, self.entry
        return Taken(block, size, rest)

    def free_requested(self, entry: TraceEntry) -> Block | None:
        """A live block is to be free."""
        block = self.blocks.get(entry[1])
        if block is None or block.state != LIVE:
            self.problems.append(f"a free of {entry[1]:#x}, where {_stands(block)}")
            return None
        block.state, block.entry, block.since_us = AWAITING, self.entry, entry[4]
        return block

    def free_completed(
        self, entry: TraceEntry, *, asked_before: bool = True
    ) -> tuple[Block, int, Joined | None] | None:
        """A block is free: the block with the size it had, and what it was joined with. `asked_before`: is the wish recorded?"""
        block = self.blocks.get(entry[1])
        if block is None or block.state == FREE or (block.state == LIVE and asked_before):
            self.problems.append(f"a completed free of {entry[1]:#x}, where {_stands(block)}")
            if block is None or block.state == FREE:
                return None
        size = block.size
        block.state, block.entry, block.guessed = FREE, self.entry, False
        return block, size, self._layout.join(block)

    # memory got and given back

    def segment_alloc(self, entry: TraceEntry, private: tuple[int, int]) -> Block:
        """A new segment, all free."""
        _, address, size, stream, *_ = entry
        self._vacate(address, size, "a new segment")
        pool = Pool(self._device, stream, size == SMALL_SEGMENT_BYTES, private)
        block = Block(address, size, self._span(pool, size, expandable=False), self.entry)
        self._layout.put_segment(block)
        return block

    def segment_map(self, entry: TraceEntry) -> Span:
        """New pages of an expandable segment; they join what is free beside them."""
        _, address, size, stream, _, private, *_ = entry
        self._vacate(address, size, "newly mapped pages")
        pool = Pool(self._device, stream, size == SMALL_SEGMENT_BYTES, private)
        block = Block(address, size, self._span(pool, size, expandable=True), self.entry)
        self._layout.put(block)
        self._layout.join(block)
        return block.span

    def segment_free(self, entry: TraceEntry) -> Pool | None:
        """A segment is given back: of which pool; None: there was none."""
        address = entry[1]
        block = self.blocks.get(address)
        if block is not None and not block.state and block.size == block.span.size:
            self._layout.take_segment(block)
            return block.span.pool
        self.problems.append(f"segment {address:#x} given back, where no whole free one begins")
        pool = None if block is None else block.span.pool
        self._layout.clear(address, entry[2], self.entry)
        return pool

    def segment_unmap(self, entry: TraceEntry) -> Pool | None:
        """Pages are given back: of which pool; None: there were none."""
        address, size = entry[1], entry[2]
        touched = self._layout.touching(address, size)
        if len(touched) != 1 or touched[0].state or touched[0].address > address or touched[0].end < address + size:
            self.problems.append(f"{size} bytes unmapped at {address:#x}, which are not all free")
        pool = touched[0].span.pool if touched else None
        self._layout.clear(address, size, self.entry)
        return pool

    # what does not fit

    def has_size(self, entry: TraceEntry) -> bool:
        """Memory that is got or given back is more than none."""
        if entry.size <= 0:
            self.problems.append(f"{entry.action} of {entry.size} bytes at {entry.address:#x}")
        return entry.size > 0

    def _room_at(self, entry: TraceEntry, needed: int) -> tuple[Block, int]:
        """A free block that begins at the address of an allocation, where none does or it is too small; what is taken of it."""
        address, requested = entry.address, entry.size
        block = self.blocks.get(address)
        if block is not None and not block.state:  # rounded otherwise then, as settings were
            plainly = (requested + 511) & -512 or MIN_BLOCK_BYTES
            if block.size < plainly:
                self.problems.append(f"{requested} bytes at {address:#x}, where {block.size} are free")
            return block, block.size
        if block is not None:
            self.problems.append(f"{requested} bytes at {address:#x}, where {_stands(block)}")
            block.state = FREE
            return block, min(needed, block.size)
        inside = next(iter(self._layout.touching(address, 1)), None)
        if inside is None:
            return self._orphan(entry, needed)
        if inside.state == FREE:
            owner = self._layout.before(inside)
            gap = address - inside.address
            if not (owner and owner.guessed and not owner.span.pool.small and gap <= SMALL_MAX_BYTES):
                self.problems.append(f"{requested} bytes at {address:#x}, in the middle of a free block")
                owner = None
            block = self._layout.cut(inside, gap, self.entry)
            if owner is not None:  # it had slack
                self._layout.grow_over(inside)
        else:
            if not inside.guessed:
                self.problems.append(f"{requested} bytes at {address:#x}, in the middle of a block in use")
            block = self._layout.cut(inside, address - inside.address, self.entry)
            self._layout.join(block)
        return block, min(needed, block.size)

    def _orphan(self, entry: TraceEntry, needed: int) -> tuple[Block, int]:
        """An allocation where nothing is known to be."""
        _, address, requested, stream, _, private, *_ = entry
        self.problems.append(f"{requested} bytes at {address:#x}, where there is no segment")
        behind = next(iter(self._layout.touching(address, needed)), None)
        if behind is not None:
            needed = behind.address - address
        pool = Pool(self._device, stream, needed <= SMALL_MAX_BYTES, private)
        block = Block(address, needed, self._span(pool, needed, expandable=False), self.entry)
        self._layout.put_segment(block)
        return block, needed

    def _vacate(self, address: int, size: int, what: str) -> None:
        """Nothing may be where memory is new; what is, is gone."""
        if not self._layout.is_empty(address, size):
            self.problems.append(f"{what} of {size} bytes at {address:#x}, where there is one")
            self._layout.clear(address, size, self.entry)

    def _span(self, pool: Pool, size: int, *, expandable: bool) -> Span:
        if pool.private in self._never_split:
            least = _NO_LIMIT
        elif pool.small or expandable or (self._settings.expandable and pool.private == DEFAULT_POOL):
            least = MIN_BLOCK_BYTES
        else:
            least = SMALL_MAX_BYTES + 1
        if not expandable:
            return Span(pool, size, expandable=False, least_rest=least)
        self._layout.keep_order()
        return self._expandable.setdefault(pool, Span(pool, size, expandable=True, least_rest=least))


def _stands(block: Block | None) -> str:
    if block is None:
        return "no block begins"
    return ("one is free", "one is live", "one waits to be free")[block.state]
