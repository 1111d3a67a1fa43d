"""An allocator's blocks at a moment, condensed by pool, stream and private pool."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Pool(Enum):
    """Which of an allocator's two pools: rounded requests of up to 1 MiB are small."""

    SMALL = "small"
    LARGE = "large"


@dataclass(frozen=True, slots=True, order=True)
class PrivatePool:
    """A private pool's id: (0, k) of a MemPool or graph_pool_handle, (k, 0) of a capture's own pool."""

    first: int
    second: int


@dataclass(frozen=True, slots=True)
class SizeClass:
    """Blocks of about one size; four classes an octave (`size_class_floor`)."""

    at_least_bytes: int
    count: int
    bytes: int
    largest_bytes: int


@dataclass(frozen=True, slots=True)
class BlockGroup:
    """The blocks that can serve one another's requests: one pool, one stream, one private pool or none.

    requested + rounding = allocated; allocated + awaiting_free + stranded + releasable + private = reserved.
    """

    pool: Pool
    stream: int
    private_pool: PrivatePool | None
    expandable: bool
    segment_count: int
    reserved_bytes: int
    requested_bytes: int | None
    """Live blocks as asked for; None where PyTorch (before 2.0) does not tell."""
    rounding_bytes: int | None
    allocated_bytes: int
    """Live blocks, whole."""
    awaiting_free_bytes: int
    stranded_bytes: int
    releasable_bytes: int
    private_bytes: int
    free_stranded: tuple[SizeClass, ...]
    """Free blocks that empty_cache would leave; of expandable segments all free blocks, whole; of private pools all."""
    free_releasable: tuple[SizeClass, ...]
    """Free blocks that are whole segments."""
    live: tuple[SizeClass, ...]
    """Live blocks by requested size (by block size where that is not known)."""
    largest_free_block_bytes: int | None = None
    tail_bytes: int | None = None
    """The free block at the mapped end of an expandable segment, which can grow."""
    tail_kept_bytes: int | None = None
    """What of it lies before its first page boundary."""


@dataclass(frozen=True, slots=True)
class BlockMap:
    """An allocator's blocks at a moment."""

    sequence: int
    """The process's own numbering, as a sample's."""
    time_us: int
    groups: tuple[BlockGroup, ...]
    call_us: int | None = None
    """How long taking it took."""
