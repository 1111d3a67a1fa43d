"""From the segments of a PyTorch snapshot to a block map's groups."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from allocscope.model.blocks import BlockGroup, Pool, PrivatePool, SizeClass

SMALL_PAGE_BYTES = 2 << 20
"""Page of a small expandable segment (ALLOCATOR.md 1)."""
LARGE_PAGE_BYTES = 20 << 20
"""Page of a large one, where large_segment_size_mb does not say otherwise."""
DEFAULT_POOL = (0, 0)


def size_class_floor(size_bytes: int) -> int:
    """The lowest size of the class that holds `size_bytes`: its leading three bits."""
    drop = max(size_bytes.bit_length() - 3, 0)
    return size_bytes >> drop << drop


class Group(NamedTuple):
    """What decides which blocks can serve one another's requests."""

    pool: str
    stream: int
    private_pool: tuple[int, int]
    expandable: bool


def condense(segments: Iterable[Mapping[str, Any]], large_page_bytes: int = LARGE_PAGE_BYTES) -> tuple[BlockGroup, ...]:
    """Condense one device's segments, as torch.cuda.memory_snapshot() gives them (ALLOCATOR.md 7), in any order.

    A private pool is taken to be in use: whether it still is, a snapshot does not tell.
    """
    tallies: dict[Group, _Tally] = {}
    for segment in sorted(segments, key=_address):
        pool_id = tuple(segment.get("segment_pool_id", DEFAULT_POOL))
        group = Group(
            segment["segment_type"],
            segment["stream"],
            pool_id,
            segment.get("is_expandable", False),
        )
        tally = tallies.get(group)
        if tally is None:
            page_bytes = SMALL_PAGE_BYTES if group.pool == "small" else large_page_bytes
            tally = tallies[group] = _Tally(group, page_bytes)
        tally.add(segment)
    return tuple(tallies[group].close() for group in sorted(tallies))


def _address(segment: Mapping[str, Any]) -> int:
    return int(segment.get("address", 0))


class _Classes:
    """Sizes counted by class."""

    __slots__ = ("_by_floor",)

    def __init__(self) -> None:
        self._by_floor: dict[int, list[int]] = {}

    def add(self, size_bytes: int) -> None:
        floor = size_class_floor(size_bytes)
        entry = self._by_floor.get(floor)
        if entry is None:
            self._by_floor[floor] = [1, size_bytes, size_bytes]
        else:
            entry[0] += 1
            entry[1] += size_bytes
            if size_bytes > entry[2]:
                entry[2] = size_bytes

    def close(self) -> tuple[SizeClass, ...]:
        return tuple(SizeClass(floor, *entry) for floor, entry in sorted(self._by_floor.items()))

    def largest(self) -> int | None:
        return max((entry[2] for entry in self._by_floor.values()), default=None)


class _Tally:
    """One group's sums while its segments are gone through."""

    def __init__(self, group: Group, page_bytes: int) -> None:
        self.group, self.page_bytes = group, page_bytes
        self.segment_count = self.reserved = self.allocated = self.requested = 0
        self.awaiting_free = self.stranded = self.releasable = self.private = 0
        self.requested_known = True
        self.stranded_classes, self.releasable_classes, self.live = (
            _Classes(),
            _Classes(),
            _Classes(),
        )
        self.tail: tuple[int, int] | None = None

    def add(self, segment: Mapping[str, Any]) -> None:
        self.segment_count += 1
        self.reserved += segment["total_size"]
        blocks = segment["blocks"]
        offset = 0  # a mapped range starts on a page boundary of its own segment, whose base a snapshot does not tell
        self.tail = None
        for block in blocks:
            size, state = block["size"], block["state"]
            if state == "inactive":
                self._add_free(offset, size, whole=len(blocks) == 1, last=block is blocks[-1])
            elif state == "active_allocated":
                self.allocated += size
                requested = block.get("requested_size")
                if requested is None:
                    self.requested_known = False
                    requested = size
                self.requested += requested
                self.live.add(requested)
            else:
                self.awaiting_free += size
            offset += size

    def _add_free(self, offset: int, size: int, *, whole: bool, last: bool) -> None:
        if self.group.expandable and last:
            self.tail = (size, min(-offset % self.page_bytes, size))
        if self.group.private_pool != DEFAULT_POOL:
            self.private += size
            self.stranded_classes.add(size)
        elif self.group.expandable:
            pages = (
                max(
                    (offset + size) // self.page_bytes - -(-offset // self.page_bytes),
                    0,
                )
                * self.page_bytes
            )
            self.releasable += pages
            self.stranded += size - pages
            self.stranded_classes.add(size)
        elif whole:
            self.releasable += size
            self.releasable_classes.add(size)
        else:
            self.stranded += size
            self.stranded_classes.add(size)

    def close(self) -> BlockGroup:
        pool, stream, private_pool, expandable = self.group
        known = self.requested_known
        free: Sequence[int | None] = (
            self.stranded_classes.largest(),
            self.releasable_classes.largest(),
        )
        return BlockGroup(
            pool=Pool(pool),
            stream=stream,
            private_pool=None if private_pool == DEFAULT_POOL else PrivatePool(*private_pool),
            expandable=expandable,
            segment_count=self.segment_count,
            reserved_bytes=self.reserved,
            requested_bytes=self.requested if known else None,
            rounding_bytes=self.allocated - self.requested if known else None,
            allocated_bytes=self.allocated,
            awaiting_free_bytes=self.awaiting_free,
            stranded_bytes=self.stranded,
            releasable_bytes=self.releasable,
            private_bytes=self.private,
            free_stranded=self.stranded_classes.close(),
            free_releasable=self.releasable_classes.close(),
            live=self.live.close(),
            largest_free_block_bytes=max(_known(free), default=None),
            tail_bytes=self.tail[0] if self.tail else None,
            tail_kept_bytes=self.tail[1] if self.tail else None,
        )


def _known(sizes: Iterable[int | None]) -> Iterator[int]:
    return (size for size in sizes if size is not None)
