"""What can happen in a caching allocator, one value for each thing that did.

Moments are unix microseconds; None: not told. Sizes are bytes. `entry` says which entry of the device's history it was, from 0;
of a log, which line, from 1.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple, TypeAlias


class Kind(StrEnum):
    """Of an event; where PyTorch has a word for it, that."""

    ALLOC = "alloc"
    FREE = "free"
    """Freed, and at once free in its pool."""
    WAIT = "wait"
    """Freed, and kept until other streams are done with it."""
    WAIT_OVER = "wait_over"
    MERGE = "merge"
    SEGMENT_ALLOC = "segment_alloc"
    SEGMENT_FREE = "segment_free"
    SEGMENT_MAP = "segment_map"
    SEGMENT_UNMAP = "segment_unmap"
    FLUSH = "flush"
    """A request found no room: what was free in whole segments was given back, and the driver asked again."""
    EMPTY_CACHE = "empty_cache"
    GARBAGE_COLLECTION = "garbage_collection"
    MADE_ROOM = "made_room"
    """Large free blocks were given back so that one larger than max_split_size could be got."""
    POOL_END = "pool_end"
    """What a private pool had was given back."""
    OOM = "oom"
    RETRY = "retry"
    """PyTorch 2.13 on said on stderr that the driver had no room."""
    CONTRADICTION = "contradiction"


class Pool(NamedTuple):
    """Where a block belongs: blocks of different ones neither merge nor serve each other's requests. None: not told."""

    device: int | None
    stream: int | None
    small: bool | None
    private: tuple[int, int] | None
    """(0, 0): the default pool."""

    @property
    def name(self) -> str | None:
        """small, large; None: not told."""
        return None if self.small is None else "small" if self.small else "large"


class Allocated(NamedTuple):
    """A block was handed out."""

    entry: int
    time_us: int | None
    pool: Pool
    address: int
    requested_bytes: int | None
    block_bytes: int | None
    driver: bool | None
    """Whether it lies in memory that was got for it; None: not told."""
    hole_bytes: int | None
    """The free block that it was the front of."""
    left_bytes: int | None
    """What of that stayed free: it was split; 0: it was taken whole."""

    @property
    def kind(self) -> Kind:
        return Kind.ALLOC


class Freed(NamedTuple):
    """A block was freed, and is free in its pool."""

    entry: int
    time_us: int | None
    pool: Pool
    address: int
    requested_bytes: int | None
    block_bytes: int | None

    @property
    def kind(self) -> Kind:
        return Kind.FREE


class Waiting(NamedTuple):
    """A block was freed, but other streams use it still."""

    entry: int
    time_us: int | None
    pool: Pool
    address: int
    requested_bytes: int | None
    block_bytes: int | None

    @property
    def kind(self) -> Kind:
        return Kind.WAIT


class WaitOver(NamedTuple):
    """Other streams are done with a block that was freed; it is free in its pool."""

    entry: int
    time_us: int | None
    pool: Pool
    address: int
    requested_bytes: int | None
    block_bytes: int | None
    waited_us: int | None

    @property
    def kind(self) -> Kind:
        return Kind.WAIT_OVER


class Merged(NamedTuple):
    """A block that became free was joined with its free neighbours."""

    entry: int
    time_us: int | None
    pool: Pool
    address: int
    """Of what came of it."""
    block_bytes: int | None
    """What came of it."""
    freed_bytes: int | None
    before_bytes: int | None
    """The free neighbour before it; 0: there was none."""
    behind_bytes: int | None

    @property
    def kind(self) -> Kind:
        return Kind.MERGE


class Got(NamedTuple):
    """Memory was got from the driver: a segment, or pages of an expandable one."""

    entry: int
    time_us: int | None
    pool: Pool
    address: int
    block_bytes: int
    expandable: bool

    @property
    def kind(self) -> Kind:
        return Kind.SEGMENT_MAP if self.expandable else Kind.SEGMENT_ALLOC


class GivenBack(NamedTuple):
    """Memory was given back to the driver."""

    entry: int
    time_us: int | None
    pool: Pool
    address: int
    block_bytes: int
    expandable: bool

    @property
    def kind(self) -> Kind:
        return Kind.SEGMENT_UNMAP if self.expandable else Kind.SEGMENT_FREE


class Release(NamedTuple):
    """Why memory is given back; each piece of it follows as an event of its own."""

    entry: int
    time_us: int | None
    pool: Pool
    kind: Kind
    """flush, empty_cache, garbage_collection, made_room, pool_end."""
    pieces: int
    """How many."""
    block_bytes: int
    """Of all of them."""
    needed_bytes: int | None
    """What was to be got from the driver then, where that is known."""
    sure: bool
    """A flush looks like an empty_cache right before an allocation, where it is not known how much the device had left."""


class OutOfMemory(NamedTuple):
    """A request failed."""

    entry: int
    time_us: int | None
    pool: Pool
    requested_bytes: int
    """Rounded."""
    device_free_bytes: int | None
    free_bytes: int
    """Free in the allocator, whatever the pool and stream."""
    hole_count: int
    """In how many pieces."""
    pool_free_bytes: int
    """Of that in the pool and stream of the request."""
    pool_hole_count: int
    pool_largest_bytes: int
    """The largest piece there."""

    @property
    def kind(self) -> Kind:
        return Kind.OOM


class Retry(NamedTuple):
    """PyTorch said that the driver had no room."""

    entry: int
    time_us: int | None
    pool: Pool
    requested_bytes: int | None
    device_free_bytes: int | None

    @property
    def kind(self) -> Kind:
        return Kind.RETRY


class Contradiction(NamedTuple):
    """An entry cannot be, after those before it."""

    entry: int
    time_us: int | None
    pool: Pool
    address: int
    problem: str

    @property
    def kind(self) -> Kind:
        return Kind.CONTRADICTION


Event: TypeAlias = (
    Allocated | Freed | Waiting | WaitOver | Merged | Got | GivenBack | Release | OutOfMemory | Retry | Contradiction
)
