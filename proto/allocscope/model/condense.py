"""From the segments of a PyTorch snapshot to a block map's groups."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from operator import itemgetter
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
    found: dict[Group, list[Mapping[str, Any]]] = {}
    known: dict[Any, list[Mapping[str, Any]]] = {}  # by what tells a group, as segments have it
    for segment in segments:
        try:
            told = _group_of(segment)
            mine = known.get(told)
        except (KeyError, TypeError):  # of a PyTorch that tells less, or a pool's id as a list
            told, mine = None, None
        if mine is None:
            group = Group(
                segment["segment_type"],
                segment["stream"],
                tuple(segment.get("segment_pool_id", DEFAULT_POOL)),
                segment.get("is_expandable", False),
            )
            mine = found.setdefault(group, [])
            if told is not None:
                known[told] = mine
        mine.append(segment)
    return tuple(_condensed(group, found[group], large_page_bytes) for group in sorted(found))


_group_of = itemgetter("segment_type", "stream", "segment_pool_id", "is_expandable")


def _address(segment: Mapping[str, Any]) -> int:
    return int(segment.get("address", 0))


_blocks_of, _total_of = itemgetter("blocks"), itemgetter("total_size")
_figures_of = itemgetter("state", "size", "requested_size")


def _patchy_figures_of(block: Mapping[str, Any]) -> tuple[str, int, int | None]:
    """Of a PyTorch that does not tell requested sizes."""
    return block["state"], block["size"], block.get("requested_size")


def _counted(blocks: Sequence[Sequence[Mapping[str, Any]]]) -> Counter[tuple[str, int, int | None]]:
    """All blocks, equal ones together, counted without a step of Python each: a probe goes through a job's blocks every ten
    seconds, with the interpreter to itself.
    """
    try:
        return Counter(map(_figures_of, chain.from_iterable(blocks)))
    except KeyError:
        return Counter(map(_patchy_figures_of, chain.from_iterable(blocks)))


def _condensed(group: Group, segments: Sequence[Mapping[str, Any]], large_page_bytes: int) -> BlockGroup:
    """One group's segments."""
    in_default_pool = group.private_pool == DEFAULT_POOL
    blocks = list(map(_blocks_of, segments))
    pages = _Pages(SMALL_PAGE_BYTES if group.pool == "small" else large_page_bytes)
    free_segments = Counter[int]()
    if group.expandable:
        for segment in sorted(segments, key=_address):
            pages.add(segment["blocks"])
    elif in_default_pool:
        free_segments.update(only[0]["size"] for only in blocks if len(only) == 1 and only[0]["state"] == "inactive")
    held, live, asked = Counter[int](), Counter[int](), Counter[int | None]()
    waiting = 0
    for (state, size, requested), count in _counted(blocks).items():
        if state == "active_allocated":
            live[size] += count
            asked[requested] += count
        elif state == "inactive":
            held[size] += count
        else:
            waiting += size * count
    known = None not in asked
    allocated, free = _sum(live), _sum(held)
    requested_bytes = _sum(asked) if known else None
    releasable = (pages.whole_bytes if group.expandable else _sum(free_segments)) if in_default_pool else 0
    return BlockGroup(
        pool=Pool(group.pool),
        stream=group.stream,
        private_pool=None if in_default_pool else PrivatePool(*group.private_pool),
        expandable=group.expandable,
        segment_count=len(segments),
        reserved_bytes=sum(map(_total_of, segments)),
        requested_bytes=requested_bytes,
        rounding_bytes=None if requested_bytes is None else allocated - requested_bytes,
        allocated_bytes=allocated,
        awaiting_free_bytes=waiting,
        stranded_bytes=free - releasable if in_default_pool else 0,
        releasable_bytes=releasable,
        private_bytes=0 if in_default_pool else free,
        free_stranded=_classes(held - free_segments),
        free_releasable=_classes(free_segments),
        live=_classes(asked if known else live),
        largest_free_block_bytes=max(held, default=None),
        tail_bytes=pages.tail[0] if pages.tail else None,
        tail_kept_bytes=pages.tail[1] if pages.tail else None,
    )


class _Pages:
    """Of expandable segments, whose free blocks give back whole pages. A mapped range starts on a page boundary of its own
    segment, whose base a snapshot does not tell.
    """

    def __init__(self, page_bytes: int) -> None:
        self.page_bytes, self.whole_bytes = page_bytes, 0
        self.tail: tuple[int, int] | None = None

    def add(self, blocks: Sequence[Mapping[str, Any]]) -> None:
        """A range, by ascending address."""
        offset, page_bytes, size, state = 0, self.page_bytes, 0, ""
        for block in blocks:
            size, state = block["size"], block["state"]
            if state == "inactive":
                pages = (offset + size) // page_bytes - -(-offset // page_bytes)
                self.whole_bytes += max(pages, 0) * page_bytes
            offset += size
        self.tail = (size, min(-(offset - size) % page_bytes, size)) if state == "inactive" else None


def _sum(sizes: Mapping[Any, int]) -> int:
    return sum(size * count for size, count in sizes.items())


def _classes(sizes: Mapping[Any, int]) -> tuple[SizeClass, ...]:
    """Sizes and how many there are, by class, smallest first."""
    by_floor: dict[int, list[int]] = {}
    for size, count in sorted(sizes.items()):
        entry = by_floor.setdefault(size_class_floor(size), [0, 0, 0])
        entry[0] += count
        entry[1] += size * count
        entry[2] = size
    return tuple(SizeClass(floor, *entry) for floor, entry in by_floor.items())
