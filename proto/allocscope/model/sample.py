"""An allocator's counters, as single samples and as columns of many."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from itertools import groupby

from allocscope.model.identity import AllocatorRef


@dataclass(frozen=True, slots=True)
class Sample:
    """An allocator's counters at a moment: torch.cuda.memory_stats(), pool "all" (ALLOCATOR.md 6), and what the process knows of its device."""

    sequence: int
    """The process's own numbering over all that it hands on, from 1."""
    time_us: int
    allocated_bytes: int | None = None
    """Blocks in the program's hands."""
    active_bytes: int | None = None
    """Allocated, or waiting for another stream."""
    requested_bytes: int | None = None
    """Active blocks as they were asked for."""
    reserved_bytes: int | None = None
    """Got from the driver."""
    inactive_split_bytes: int | None = None
    """Free pieces of partly used segments; always 0 for expandable ones."""
    allocated_peak_bytes: int | None = None
    """Since the start, or since the user reset it; so are the other peaks."""
    active_peak_bytes: int | None = None
    requested_peak_bytes: int | None = None
    reserved_peak_bytes: int | None = None
    allocation_count: int | None = None
    active_count: int | None = None
    segment_count: int | None = None
    """Never counts expandable segments."""
    inactive_split_count: int | None = None
    allocations_total: int | None = None
    """Allocations ever made."""
    allocated_bytes_total: int | None = None
    """Bytes ever allocated."""
    num_alloc_retries: int | None = None
    """Flush-and-retry rounds ever."""
    num_ooms: int | None = None
    num_device_alloc: int | None = None
    """Calls to the driver for memory."""
    num_device_free: int | None = None
    num_sync_all_streams: int | None = None
    """Flushes of the cache ever, the user's empty_cache included."""
    private_pools_reserved_bytes: int | None = None
    device_total_bytes: int | None = None
    """The device's memory, by cudaMemGetInfo."""
    device_free_bytes: int | None = None
    """What of it was free for anybody."""
    process_used_bytes: int | None = None
    """All that the process used of the device, where it can tell itself."""
    call_us: int | None = None
    """How long reading the counters took."""


KEYS = ("sequence", "time_us")
"""The columns that every sample has."""
COLUMNS: tuple[str, ...] = tuple(f.name for f in fields(Sample) if f.name not in KEYS)
"""The columns that may be unknown, in the order of Sample's fields."""


_LAST = 2**63 - 1


@dataclass(frozen=True, slots=True)
class SampleChunk:
    """Consecutive samples of one allocator in columns; a column that is missing is unknown for all of them."""

    allocator: AllocatorRef
    sequence: tuple[int, ...]
    time_us: tuple[int, ...]
    columns: Mapping[str, tuple[int, ...]]
    """By name (COLUMNS); each as long as `sequence`."""

    def __len__(self) -> int:
        return len(self.sequence)

    def part(self, first: int = 0, last: int = _LAST) -> SampleChunk:
        """Those numbered from `first` to `last`; the sequence must rise."""
        part = slice(bisect_left(self.sequence, first), bisect_right(self.sequence, last))
        if part == slice(0, len(self)):
            return self
        columns = {name: column[part] for name, column in self.columns.items()}
        return SampleChunk(self.allocator, self.sequence[part], self.time_us[part], columns)

    def samples(self) -> Iterator[Sample]:
        """Row by row."""
        names = tuple(self.columns)
        for row in zip(self.sequence, self.time_us, *self.columns.values(), strict=True):
            yield Sample(row[0], row[1], **dict(zip(names, row[2:], strict=True)))


def chunks(allocator: AllocatorRef, samples: Iterable[Sample]) -> Iterator[SampleChunk]:
    """One chunk for each run of samples that know the same figures."""
    for known, run in groupby(samples, key=_known):
        rows = list(run)
        yield SampleChunk(
            allocator,
            tuple(s.sequence for s in rows),
            tuple(s.time_us for s in rows),
            {name: tuple(getattr(s, name) for s in rows) for name in known},
        )


def _known(sample: Sample) -> tuple[str, ...]:
    return tuple(name for name in COLUMNS if getattr(sample, name) is not None)
