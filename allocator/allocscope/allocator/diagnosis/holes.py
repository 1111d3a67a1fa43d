"""The holes in a device's memory, what pins them, and where live bytes were asked for."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from allocscope.allocator.snapshot import DEFAULT_POOL, INACTIVE, LIVE, Frame, SnapshotBlock, SnapshotSegment, Stack

UNKNOWN_SITE = "not recorded"
_TOLD_FRAMES = 2


@dataclass(frozen=True, slots=True)
class Hole:
    """A free block that cannot be given back, for others in its segment are in use."""

    segment: SnapshotSegment
    address: int
    size: int
    pins: tuple[SnapshotBlock, ...]
    """The blocks in use of the same segment, the smallest first; of an expandable one those beside the hole."""

    @property
    def pinned_by_bytes(self) -> int:
        """What the pins come to."""
        return sum(block.size for block in self.pins)


@dataclass(frozen=True, slots=True)
class Site:
    """A place in the program, and what it holds."""

    where: str
    bytes: int
    count: int


def largest_holes(segments: Iterable[SnapshotSegment], count: int) -> tuple[Hole, ...]:
    """The largest holes of the default pools, at most `count`; whole free segments are none.

    Sizes in bytes. PyTorch 1.13 to 2.14; where a snapshot does not tell private pools (2.0 and before) theirs are among them.
    Raises nothing.
    """
    found = [
        (segment.blocks[index].size, -segment.blocks[index].address, segment, index)
        for segment, index in _all(segments)
    ]
    found.sort(key=lambda hole: hole[:2], reverse=True)
    return tuple(_hole(segment, index) for _, _, segment, index in found[:count])


def hole_count(segments: Iterable[SnapshotSegment]) -> int:
    """How many holes there are in the default pools; for the versions of PyTorch that `largest_holes` holds for. Raises nothing."""
    return sum(1 for _ in _all(segments))


def _all(segments: Iterable[SnapshotSegment]) -> Iterator[tuple[SnapshotSegment, int]]:
    """The segment of every hole, and which of its blocks it is."""
    return (
        (segment, index)
        for segment in segments
        if segment.pool_id == DEFAULT_POOL and len(segment.blocks) > 1
        for index, block in enumerate(segment.blocks)
        if block.state == INACTIVE
    )


def _hole(segment: SnapshotSegment, index: int) -> Hole:
    block = segment.blocks[index]
    near = (*segment.blocks[max(index - 1, 0) : index], *segment.blocks[index + 1 : index + 2])
    pins = (b for b in (near if segment.is_expandable else segment.blocks) if b.state != INACTIVE)
    return Hole(segment, block.address, block.size, tuple(sorted(pins, key=_size)))


def worst_segments(segments: Iterable[SnapshotSegment], count: int) -> tuple[SnapshotSegment, ...]:
    """Those with the most bytes in holes, at most `count`; none without a hole.

    For the versions of PyTorch that `largest_holes` holds for. Raises nothing.
    """
    holed = [(stranded_bytes(segment), -segment.address, segment) for segment in segments]
    holed.sort(key=lambda item: item[:2], reverse=True)
    return tuple(segment for stranded, _, segment in holed[:count] if stranded)


def stranded_bytes(segment: SnapshotSegment) -> int:
    """Free bytes of a segment that is partly in use, be they whole pages or not; 0 of a private pool's.

    For the versions of PyTorch that `largest_holes` holds for. Raises nothing.
    """
    if segment.pool_id != DEFAULT_POOL or len(segment.blocks) == 1:
        return 0
    return sum(block.size for block in segment.blocks if block.state == INACTIVE)


def sites(segments: Iterable[SnapshotSegment], count: int) -> tuple[Site, ...]:
    """Where the live bytes were asked for, the largest first, at most `count`; empty where no stacks were recorded.

    Bytes of whole blocks, rounding among them. PyTorch 1.13 to 2.14. Raises nothing.
    """
    totals: dict[str, list[int]] = {}
    known: dict[tuple[Frame, ...], str] = {}
    for block in _live(segments):
        frames = block.stack.frames if block.stack else ()
        where = known.get(frames)
        if where is None:
            where = known[frames] = site_of(block.stack) or UNKNOWN_SITE
        total = totals.setdefault(where, [0, 0])
        total[0] += block.size
        total[1] += 1
    if totals.keys() <= {UNKNOWN_SITE}:
        return ()
    ordered = sorted(totals.items(), key=lambda item: (-item[1][0], item[0]))
    return tuple(Site(where, *total) for where, total in ordered[:count])


def site_of(stack: Stack | None) -> str | None:
    """The program's own lines nearest to an allocation, innermost first; None: not recorded.

    Of a stack with C++ frames only, as the backward pass has it, the operator and the node of the graph. PyTorch 1.13 to 2.14.
    Raises nothing.
    """
    frames = stack.frames if stack else ()
    if not frames:
        return None
    python = [frame for frame in frames if frame.filename.endswith(".py")]
    own = [frame for frame in python if "/torch/" not in frame.filename] or python
    if own:
        return " ← ".join(f"{frame.name[:60]} {_last(frame.filename)}:{frame.line}" for frame in own[:_TOLD_FRAMES])
    native = (_first(_OPERATOR, frames), _first(_NODE, frames))
    return " ← ".join(name for name in native if name) or _beyond_allocator(frames)


_OPERATOR = re.compile(r"at::_ops::(?!new_empty|empty)(\w+)::")
_NODE = re.compile(r"torch::autograd::(?:\w+::)*(\w+)::apply\(")
_ALLOCATOR = ("torch::unwind", "torch::Captured", "torch::cuda::", "c10::", "??")


def _first(pattern: re.Pattern[str], frames: Iterable[Frame]) -> str | None:
    return next((found[1][:60] for frame in frames if (found := pattern.match(frame.name))), None)


def _beyond_allocator(frames: tuple[Frame, ...]) -> str:
    frame = next((frame for frame in frames if not frame.name.startswith(_ALLOCATOR)), frames[0])
    return f"{frame.name[:60]} {_last(frame.filename)}"


def _last(path: str) -> str:
    return path.rsplit("/", 1)[-1][:60]


def _live(segments: Iterable[SnapshotSegment]) -> Iterator[SnapshotBlock]:
    return (block for segment in segments for block in segment.blocks if block.state == LIVE)


def _size(block: SnapshotBlock) -> int:
    return block.size
