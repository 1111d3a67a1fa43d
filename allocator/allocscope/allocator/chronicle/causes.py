"""Whose doing it was that memory was given back to the driver; a history does not say (ALLOCATOR.md 2.4 to 2.7, 13).

Within an allocation it shows by what follows: memory is got right after, or the allocation fails. Anything else is the program's
empty_cache, or a private pool's end. But an empty_cache right before an allocation looks like that allocation's own flush; what
tells them apart is whether the allocation would have been served without it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from allocscope.allocator.chronicle.events import Kind, Pool
from allocscope.allocator.settings import SMALL_SEGMENT_BYTES, AllocatorSettings
from allocscope.allocator.simulator.beginning import GAINS, RELEASES
from allocscope.allocator.snapshot import DEFAULT_POOL, TraceEntry

Room = Callable[[int], int]
"""How much the allocator could reserve at a moment (unix microseconds): what others left of the device, and was allowed; bytes."""
_LOOK_AHEAD = 64
_ENDS = frozenset(("alloc", "oom", "free_requested", *RELEASES))


class Piece(NamedTuple):
    """What was given back at once."""

    pool: Pool
    address: int
    size: int
    expandable: bool
    freed_late: bool
    """Whether it became free by a wait that was over after the last allocation or free, as it may be within a flush."""


@dataclass(slots=True)
class Burst:
    """Pieces given back one after the other."""

    entry: int
    time_us: int | None
    reserved_bytes: int
    """Before."""
    pieces: list[Piece] = field(default_factory=list)

    @property
    def size(self) -> int:
        return sum(piece.size for piece in self.pieces)


class Cause(NamedTuple):
    """Why, and whether that is sure; what was to be got then, if anything was."""

    kind: Kind
    needed_bytes: int | None
    sure: bool


def cause_of(
    burst: Burst,
    following: Sequence[TraceEntry],
    at: int,
    settings: AllocatorSettings,
    room: Room | None,
    *,
    keeps_something: bool,
    peak_bytes: int,
) -> Cause:
    """Why that was given back; `at`: the entry that ended it, of `following`.

    `keeps_something`: whether free segments are left. `peak_bytes`: what was reserved at most in the whole history, which shows
    where `room` is not known what there was room for at least once.
    """
    got, request = _wanted(following, at)
    if not got and (request is None or request.action != "oom"):
        private = all(piece.pool.private != DEFAULT_POOL for piece in burst.pieces)
        return Cause(Kind.POOL_END if private else Kind.EMPTY_CACHE, None, sure=True)
    needed = sum(entry.size for entry in got) or (request.size if request is not None else 0)
    again = sum(_overlap(entry, piece) for entry in got if entry.action == "segment_map" for piece in burst.pieces)
    if request is not None and _would_have_served(burst, request, settings):
        return Cause(Kind.EMPTY_CACHE, needed, sure=True)
    sure = room is not None
    limit = peak_bytes if room is None else room(got[0].time_us if got else 0)
    fitted = bool(got) and burst.reserved_bytes + needed - again <= limit
    failed = request is not None and request.action == "oom"
    collects = settings.gc_threshold > 0 and all(piece.size != SMALL_SEGMENT_BYTES for piece in burst.pieces)
    keeps = keeps_something and not failed  # as neither a flush nor an empty_cache does
    if collects and (fitted or (keeps and settings.max_split_bytes is None)):
        return Cause(Kind.GARBAGE_COLLECTION, needed, sure=keeps)
    if keeps and settings.max_split_bytes is not None:
        return Cause(Kind.MADE_ROOM, needed, sure=True)
    if fitted:
        return Cause(Kind.EMPTY_CACHE, needed, sure=sure)
    return Cause(Kind.FLUSH, needed, sure=sure or failed)


def _wanted(following: Sequence[TraceEntry], at: int) -> tuple[list[TraceEntry], TraceEntry | None]:
    """What was got from the driver from there on, and the request that it was for; none where nothing is got or fails."""
    got: list[TraceEntry] = []
    for entry in following[at : at + _LOOK_AHEAD]:
        if entry.action in GAINS:
            got.append(entry)
        elif entry.action in _ENDS:
            return got, entry if entry.action in ("alloc", "oom") and (got or entry.action == "oom") else None
    return got, None


def _would_have_served(burst: Burst, request: TraceEntry, settings: AllocatorSettings) -> bool:
    """Whether a piece that was given back was a free block that fitted the request, so that the request did not cause it."""
    needed = settings.round(request.size) if request.action == "alloc" else request.size
    small = settings.segment_bytes(needed) == SMALL_SEGMENT_BYTES
    limit = settings.max_split_bytes
    if limit is not None and needed < limit:
        most = limit - 1
    else:
        most = needed + settings.non_split_rounding_bytes - 1 if limit is not None else 1 << 62
    return any(
        not piece.freed_late
        and needed <= piece.size <= most
        and piece.pool.stream == request.stream
        and piece.pool.small == small
        and piece.pool.private == request.pool_id
        and piece.expandable == settings.expandable
        for piece in burst.pieces
    )


def _overlap(entry: TraceEntry, piece: Piece) -> int:
    end = min(entry.address + entry.size, piece.address + piece.size)
    return max(end - max(entry.address, piece.address), 0)
