"""The state of a recorded allocator, rebuilt from its own history.

A history tells addresses and requested sizes. What else there is follows: an allocation is the front of the free block
that begins at its address, and the rules of ALLOCATOR.md 2.2 and 2.9 say how much of that block it takes; a completed free
merges with its free neighbours. So every counter of memory_stats() and every block is known after each entry.

Two things a history does not tell, and here they are inferred (ALLOCATOR.md 2.4, 2.6, 13). A flush and retry shows as segments
given back within an allocation that then got a new one, or that failed; an allocation that failed has retried, whether or not
the flush found something to give back. Segments given back at any other moment are the program's empty_cache, or a private
pool's end. A flush that found nothing, outside a failed allocation, leaves no trace, and is not counted.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable
from typing import Any

from allocscope.allocator.errors import TraceError
from allocscope.allocator.settings import (
    MIB,
    MIN_BLOCK_BYTES,
    SMALL_MAX_BYTES,
    SMALL_SEGMENT_BYTES,
    AllocatorSettings,
)
from allocscope.allocator.snapshot import DEFAULT_POOL, TraceEntry
from allocscope.model import Sample

FREE, LIVE, AWAITING = 0, 1, 2
_STATES = ("inactive", "active_allocated", "active_pending_free")
_NO_LIMIT = 1 << 62


class Segment:
    """Memory got from the driver in one piece, or the addresses reserved for an expandable segment."""

    __slots__ = ("address", "end", "expandable", "mapped_bytes", "pool_id", "size", "small", "stream")

    def __init__(
        self, address: int, size: int, stream: int, pool_id: tuple[int, int], *, small: bool, expandable: bool
    ) -> None:
        self.address, self.end, self.stream, self.pool_id = address, address + size, stream, pool_id
        self.small, self.expandable = small, expandable
        self.size = -1 if expandable else size
        """What a block that is the whole segment has; no block is a whole expandable segment."""
        self.mapped_bytes = 0
        """Of an expandable one; when none is left its addresses are given up."""


class Block:
    """A run of bytes of a segment in one state."""

    __slots__ = ("address", "requested", "segment", "size", "state")

    def __init__(self, address: int, size: int, segment: Segment) -> None:
        self.address, self.size, self.segment = address, size, segment
        self.requested, self.state = 0, FREE


class AllocatorState:
    """One allocator after as many entries of its history as were applied; the history must begin with the first allocation."""

    def __init__(self, settings: AllocatorSettings, *, device_total_bytes: int | None = None) -> None:
        self.settings = settings
        self.room_bytes: int | None = None
        """How much the allocator could reserve now, where that is known: tells a retry from an empty_cache right before."""
        self.entries_applied = 0
        self.allocated_bytes = self.active_bytes = self.requested_bytes = self.reserved_bytes = 0
        self.allocated_peak_bytes = self.active_peak_bytes = self.requested_peak_bytes = self.reserved_peak_bytes = 0
        self.inactive_split_bytes = self.inactive_split_count = 0
        self.allocation_count = self.active_count = self.segment_count = 0
        self.allocations_total = self.allocated_bytes_total = 0
        self.num_alloc_retries = self.num_ooms = self.num_sync_all_streams = 0
        self.num_device_alloc = self.num_device_free = 0
        self.private_pools_reserved_bytes = 0
        self._by_start: dict[int, Block] = {}
        self._by_end: dict[int, Block] = {}
        self._reservations: list[Segment] = []  # of expandable segments, by address
        self._reservation_bytes = None if device_total_bytes is None else device_total_bytes + device_total_bytes // 8
        self._given_back: list[tuple[int, int]] = []  # address and size, since the last entry of another kind
        self._reserved_before = 0  # what was reserved before they were
        self._free_starts: list[int] | None = None  # sorted, for unmapping; None: to be made
        self._large_split_rest = MIN_BLOCK_BYTES if settings.expandable else MIB + 1
        self._max_split_bytes = settings.max_split_bytes or _NO_LIMIT
        self._rounds_plainly = settings.rounds_plainly
        self._flushes_only = settings.max_split_bytes is None and settings.gc_threshold == 0
        self._apply: dict[str, Callable[[TraceEntry], None]] = {
            "alloc": self._alloc,
            "free_requested": self._free_requested,
            "free_completed": self._free_completed,
            "segment_alloc": self._segment_alloc,
            "segment_free": self._segment_free,
            "segment_map": self._segment_map,
            "segment_unmap": self._segment_unmap,
            "oom": self._oom,
        }

    def apply(self, entries: Iterable[TraceEntry]) -> None:
        """Go through these entries; an action that is not known (snapshot, annotate, …) changes nothing."""
        known = self._apply.get
        for entry in entries:
            handle = known(entry[0])
            if handle is not None:
                handle(entry)
            self.entries_applied += 1

    def settle(self) -> None:
        """The history ends here: what was given back last was no allocation's retry."""
        if self._given_back:
            self._flushed()

    # what can happen

    def _alloc(self, entry: TraceEntry) -> None:
        if self._given_back:
            self._flushed()
        address, requested = entry[1], entry[2]
        block = self._by_start.get(address)
        if block is None or block.state:
            raise self._contradiction(f"{requested} bytes at {address:#x}, where no free block begins")
        if self._rounds_plainly:
            taken = (requested + 511) & -512 or MIN_BLOCK_BYTES
        else:
            taken = self.settings.round(requested)
        size, segment = block.size, block.segment
        rest = size - taken
        if rest < 0:
            raise self._contradiction(f"{requested} bytes at {address:#x}, where {size} are free")
        whole = size == segment.size
        if (
            rest >= MIN_BLOCK_BYTES
            if taken <= SMALL_MAX_BYTES
            else rest >= self._large_split_rest and (self.settings.expandable or taken < self._max_split_bytes)
        ):
            left = Block(address + taken, rest, segment)
            self._by_start[left.address] = left
            self._by_end[address + size] = left
            self._by_end[left.address] = block
            block.size = size = taken
            if not segment.expandable:
                if whole:
                    self.inactive_split_bytes += rest
                    self.inactive_split_count += 1
                else:
                    self.inactive_split_bytes -= taken
        elif not whole and not segment.expandable:
            self.inactive_split_bytes -= size
            self.inactive_split_count -= 1
        block.state, block.requested = LIVE, requested
        self._free_starts = None
        self.allocation_count += 1
        self.active_count += 1
        self.allocations_total += 1
        self.allocated_bytes_total += size
        self.allocated_bytes += size
        self.active_bytes += size
        self.requested_bytes += requested
        if self.allocated_bytes > self.allocated_peak_bytes:
            self.allocated_peak_bytes = self.allocated_bytes
        if self.active_bytes > self.active_peak_bytes:
            self.active_peak_bytes = self.active_bytes
        if self.requested_bytes > self.requested_peak_bytes:
            self.requested_peak_bytes = self.requested_bytes

    def _free_requested(self, entry: TraceEntry) -> None:
        if self._given_back:
            self._flushed()
        block = self._by_start.get(entry[1])
        if block is None or block.state != LIVE:
            raise self._contradiction(f"a free of {entry[1]:#x}, where no live block begins")
        block.state = AWAITING
        self.allocation_count -= 1
        self.allocated_bytes -= block.size

    def _free_completed(self, entry: TraceEntry) -> None:
        address = entry[1]
        block = self._by_start.get(address)
        if block is None or block.state != AWAITING:
            raise self._contradiction(f"a completed free of {address:#x}, which none had asked for")
        self.active_count -= 1
        self.active_bytes -= block.size
        self.requested_bytes -= block.requested
        block.state = FREE
        segment = block.segment
        absorbed = self._merge(block)
        if not segment.expandable:
            size = block.size
            if size == segment.size:
                self.inactive_split_count -= absorbed[0]
                self.inactive_split_bytes -= absorbed[1]
            else:
                self.inactive_split_count += 1 - absorbed[0]
                self.inactive_split_bytes += size - absorbed[1]

    def _segment_alloc(self, entry: TraceEntry) -> None:
        _, address, size, stream, _, pool_id, *_ = entry
        if self._given_back:
            self._retried(size)
        if address in self._by_start:
            raise self._contradiction(f"a segment at {address:#x}, where there is one")
        segment = Segment(address, size, stream, pool_id, small=size == SMALL_SEGMENT_BYTES, expandable=False)
        self._put(Block(address, size, segment))
        self.segment_count += 1
        self._reserve(size, pool_id)

    def _segment_free(self, entry: TraceEntry) -> None:
        block = self._by_start.get(entry[1])
        if block is None or block.state or block.size != block.segment.size:
            raise self._contradiction(f"segment {entry[1]:#x} given back, where no whole free one begins")
        self._take(block)
        self.segment_count -= 1
        self._unreserve(block.address, block.size, block.segment.pool_id)

    def _segment_map(self, entry: TraceEntry) -> None:
        _, address, size, _, _, pool_id, *_ = entry
        if self._given_back:
            again = sum(_overlap(address, size, *range_) for range_ in self._given_back)
            self._retried(size - again)
        block = Block(address, size, self._reservation(entry))
        block.segment.mapped_bytes += size
        self._put(block)
        self._merge(block)
        self._free_starts = None
        self._reserve(size, pool_id)

    def _segment_unmap(self, entry: TraceEntry) -> None:
        address, size = entry[1], entry[2]
        block = self._free_block_that_holds(address, size)
        self._take(block)
        before, after = address - block.address, block.address + block.size - address - size
        if before:
            self._put(Block(block.address, before, block.segment))
        if after:
            self._put(Block(address + size, after, block.segment))
        self._unreserve(address, size, block.segment.pool_id)
        block.segment.mapped_bytes -= size
        if not block.segment.mapped_bytes:
            self._reservations.remove(block.segment)

    def _oom(self, entry: TraceEntry) -> None:
        self._given_back.clear()
        self.num_ooms += 1
        self.num_alloc_retries += 1
        self.num_sync_all_streams += 1

    # blocks

    def _put(self, block: Block) -> None:
        self._by_start[block.address] = block
        self._by_end[block.address + block.size] = block

    def _take(self, block: Block) -> None:
        del self._by_start[block.address]
        del self._by_end[block.address + block.size]

    def _merge(self, block: Block) -> tuple[int, int]:
        """Let a free block absorb its free neighbours: how many, and their bytes."""
        count = absorbed = 0
        segment, by_start, by_end = block.segment, self._by_start, self._by_end
        end = block.address + block.size
        after = by_start.get(end)
        if after is not None and after.state == FREE and after.segment is segment:
            del by_start[end]
            count, absorbed = 1, after.size
            block.size += absorbed
            by_end[end + absorbed] = block
            del by_end[end]
        before = by_end.get(block.address)
        if before is not None and before.state == FREE and before.segment is segment:
            del by_end[block.address]
            del by_start[block.address]
            count, absorbed = count + 1, absorbed + before.size
            block.size += before.size
            block.address = before.address
            by_start[block.address] = block
        return count, absorbed

    def _free_block_that_holds(self, address: int, size: int) -> Block:
        if self._free_starts is None or not self._given_back:
            self._free_starts = sorted(
                start for start, block in self._by_start.items() if block.state == FREE and block.segment.expandable
            )
        index = bisect_right(self._free_starts, address) - 1
        block = self._by_start.get(self._free_starts[index]) if index >= 0 else None
        if block is None or block.state or address + size > block.address + block.size:
            raise self._contradiction(f"{size} bytes unmapped at {address:#x}, which are not all free")
        return block

    def _reservation(self, entry: TraceEntry) -> Segment:
        """The expandable segment whose addresses these pages belong to."""
        _, address, size, stream, _, pool_id, *_ = entry
        index = bisect_right(self._reservations, address, key=_start)
        known = self._reservations[index - 1] if index else None
        small = size == SMALL_SEGMENT_BYTES
        if known and address < known.end and (known.stream, known.pool_id, known.small) == (stream, pool_id, small):
            return known
        page = self.settings.page_bytes(small=small)
        span = self._reservation_bytes
        reserved = _NO_LIMIT if span is None else max(-(-span // page) * page, size)
        segment = Segment(address, reserved, stream, pool_id, small=small, expandable=True)
        self._reservations.insert(index, segment)
        return segment

    # what was got from the driver and given back

    def _reserve(self, size: int, pool_id: tuple[int, int]) -> None:
        self.num_device_alloc += 1
        self.reserved_bytes += size
        self.reserved_peak_bytes = max(self.reserved_peak_bytes, self.reserved_bytes)
        if pool_id != DEFAULT_POOL:
            self.private_pools_reserved_bytes += size

    def _unreserve(self, address: int, size: int, pool_id: tuple[int, int]) -> None:
        if not self._given_back:
            self._reserved_before = self.reserved_bytes
        self._given_back.append((address, size))
        self.num_device_free += 1
        self.reserved_bytes -= size
        if pool_id != DEFAULT_POOL:
            self.private_pools_reserved_bytes -= size

    def _flushed(self) -> None:
        """What was given back was not an allocation's doing."""
        self._given_back.clear()
        self.num_sync_all_streams += 1

    def _retried(self, needed: int) -> None:
        """An allocation gets memory after some was given back: its own retry, unless it would have succeeded at once."""
        fitted = self.room_bytes is not None and self._reserved_before + needed <= self.room_bytes
        collected = fitted and self.settings.gc_threshold > 0 and self._given_back_large_only()
        self._given_back.clear()
        if collected or (not self._flushes_only and self._keeps_something()):
            return  # garbage collection, or room made for one large block: no flush
        self.num_sync_all_streams += 1
        if not fitted:
            self.num_alloc_retries += 1

    def _given_back_large_only(self) -> bool:
        """Whether only such segments were given back as garbage collection takes (ALLOCATOR.md 2.5)."""
        return all(size != SMALL_SEGMENT_BYTES for _, size in self._given_back)

    def _keeps_something(self) -> bool:
        """Whether there is a whole free segment that a flush would have given back."""
        return any(
            block.state == FREE and block.size == block.segment.size and block.segment.pool_id == DEFAULT_POOL
            for block in self._by_start.values()
        )

    def _contradiction(self, problem: str) -> TraceError:
        return TraceError(
            self.entries_applied, f"{problem}; a history must begin with the first allocation and be whole"
        )

    # how it stands

    def sample(
        self,
        sequence: int,
        time_us: int,
        *,
        device_total_bytes: int | None = None,
        device_free_bytes: int | None = None,
        process_used_bytes: int | None = None,
    ) -> Sample:
        """The counters, as memory_stats() would give them, and what is known of the device."""
        return Sample(
            sequence=sequence,
            time_us=time_us,
            allocated_bytes=self.allocated_bytes,
            active_bytes=self.active_bytes,
            requested_bytes=self.requested_bytes,
            reserved_bytes=self.reserved_bytes,
            inactive_split_bytes=self.inactive_split_bytes,
            allocated_peak_bytes=self.allocated_peak_bytes,
            active_peak_bytes=self.active_peak_bytes,
            requested_peak_bytes=self.requested_peak_bytes,
            reserved_peak_bytes=self.reserved_peak_bytes,
            allocation_count=self.allocation_count,
            active_count=self.active_count,
            segment_count=self.segment_count,
            inactive_split_count=self.inactive_split_count,
            allocations_total=self.allocations_total,
            allocated_bytes_total=self.allocated_bytes_total,
            num_alloc_retries=self.num_alloc_retries,
            num_ooms=self.num_ooms,
            num_device_alloc=self.num_device_alloc,
            num_device_free=self.num_device_free,
            num_sync_all_streams=self.num_sync_all_streams,
            private_pools_reserved_bytes=self.private_pools_reserved_bytes,
            device_total_bytes=device_total_bytes,
            device_free_bytes=device_free_bytes,
            process_used_bytes=process_used_bytes,
        )

    def segments(self) -> list[dict[str, Any]]:
        """Segments and blocks in the form of torch.cuda.memory_snapshot(), by address; of an expandable one each mapped range."""
        found: list[dict[str, Any]] = []
        owner, end = None, -1
        for address in sorted(self._by_start):
            block = self._by_start[address]
            if block.segment is not owner or address != end:
                owner = block.segment
                found.append(
                    {
                        "address": address,
                        "total_size": 0,
                        "allocated_size": 0,
                        "active_size": 0,
                        "requested_size": 0,
                        "stream": owner.stream,
                        "segment_type": "small" if owner.small else "large",
                        "segment_pool_id": owner.pool_id,
                        "is_expandable": owner.expandable,
                        "blocks": [],
                    }
                )
            end = address + block.size
            _add(found[-1], block)
        return found


def _add(segment: dict[str, Any], block: Block) -> None:
    size, state = block.size, block.state
    segment["total_size"] += size
    if state:
        segment["active_size"] += size
        segment["requested_size"] += block.requested
        if state == LIVE:
            segment["allocated_size"] += size
    segment["blocks"].append(
        {
            "address": block.address,
            "size": size,
            "requested_size": block.requested if state else 0,
            "state": _STATES[state],
        }
    )


def _start(segment: Segment) -> int:
    return segment.address


def _overlap(address: int, size: int, other_address: int, other_size: int) -> int:
    return max(min(address + size, other_address + other_size) - max(address, other_address), 0)
