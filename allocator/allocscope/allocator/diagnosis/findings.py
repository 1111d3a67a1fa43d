"""What does not add up in a snapshot."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter

from allocscope.allocator.settings import SMALL_SEGMENT_BYTES, AllocatorSettings
from allocscope.allocator.snapshot import AWAITING, DEFAULT_POOL, INACTIVE, LIVE, Snapshot, SnapshotSegment

_STATES = frozenset((LIVE, AWAITING, INACTIVE, "active_awaiting_free"))
MOST = 50
"""How many findings of one kind are told one by one."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that does not add up, or that is not known."""

    kind: str
    """not_filled, overlap, outside, disorder, sums, state, type, page, requested, segments_overlap, settings, unknown, history."""
    text: str
    """One sentence for people."""
    device: int | None = None
    address: int | None = None
    """Of the segment."""


def findings_of(snapshot: Snapshot) -> tuple[Finding, ...]:
    """All that does not add up in the segments and settings; of each kind the first so many, and how many more."""
    found: list[Finding] = []
    counts: dict[tuple[str, int | None], int] = {}
    for finding in _all(snapshot):
        key = (finding.kind, finding.device)
        counts[key] = counts.get(key, 0) + 1
        if counts[key] <= MOST:
            found.append(finding)
    found += (
        Finding(kind, f"{count - MOST} more segments have the same", device)
        for (kind, device), count in counts.items()
        if count > MOST
    )
    return tuple(found)


def _all(snapshot: Snapshot) -> Iterator[Finding]:
    if snapshot.settings_problem:
        yield Finding(
            "settings", f"the settings cannot be read, the defaults are taken to hold ({snapshot.settings_problem})"
        )
    if snapshot.more:
        yield Finding("unknown", f"the snapshot also holds {', '.join(snapshot.more[:10])}, which is passed over")
    for segment in snapshot.segments:
        yield from _of_segment(segment, snapshot.settings)
    yield from _overlaps(snapshot.segments)


def _of_segment(segment: SnapshotSegment, settings: AllocatorSettings) -> Iterator[Finding]:
    def finding(kind: str, text: str) -> Finding:
        return Finding(kind, f"segment {segment.address:#x}: {text}", segment.device, segment.address)

    covered = sum(block.size for block in segment.blocks)
    if covered != segment.total_size:
        yield finding("not_filled", f"has {segment.total_size} bytes, its blocks come to {covered}")
    for before, after in pairwise(segment.blocks):
        if after.address < before.address:
            yield finding("disorder", f"block {after.address:#x} comes after {before.address:#x}")
            break
        if before.address + before.size > after.address:
            yield finding(
                "overlap", f"block {before.address:#x} of {before.size} bytes reaches into {after.address:#x}"
            )
            break
    if segment.blocks and not _inside(segment):
        yield finding("outside", "has blocks outside of itself")
    yield from _sums(segment, finding)
    for block in segment.blocks:
        if block.state != INACTIVE and block.requested_size is not None and block.requested_size > block.size:
            yield finding("requested", f"block {block.address:#x} has {block.size} bytes for {block.requested_size}")
            break
    if unknown := sorted({block.state for block in segment.blocks} - _STATES):
        yield finding("state", f"has blocks in the state {', '.join(unknown)[:100]}, which is taken for waiting")
    if segment.segment_type not in ("small", "large"):
        yield finding("type", f"is of type {segment.segment_type[:40]!r}, which is taken for large")
    if segment.is_expandable:
        page = settings.page_bytes(small=segment.segment_type == "small")
        if segment.total_size % page:
            yield finding("page", f"has {segment.total_size} bytes mapped, no multiple of the page ({page} bytes)")
    elif (
        segment.segment_type == "small"
        and segment.total_size != SMALL_SEGMENT_BYTES
        and segment.pool_id == DEFAULT_POOL
    ):
        yield finding("type", f"is a small segment of {segment.total_size} bytes, not of {SMALL_SEGMENT_BYTES}")


def _inside(segment: SnapshotSegment) -> bool:
    first, last = segment.blocks[0], segment.blocks[-1]
    return first.address >= segment.address and last.address + last.size <= segment.address + segment.total_size


def _sums(segment: SnapshotSegment, finding: Callable[[str, str], Finding]) -> Iterator[Finding]:
    live = sum(block.size for block in segment.blocks if block.state == LIVE)
    active = [block for block in segment.blocks if block.state != INACTIVE]
    requested = [block.requested_size for block in active]
    sums = (
        ("allocated_size", segment.allocated_size, live),
        ("active_size", segment.active_size, sum(block.size for block in active)),
        ("requested_size", segment.requested_size, None if None in requested else sum(r for r in requested if r)),
    )
    for name, told, counted in sums:
        if told is not None and counted is not None and told != counted:
            yield finding("sums", f"says {name} {told}, its blocks come to {counted}")


def _overlaps(segments: Iterable[SnapshotSegment]) -> Iterator[Finding]:
    placed = sorted((s for s in segments if s.address), key=attrgetter("device", "address"))
    for before, after in pairwise(placed):
        if before.device == after.device and before.address + before.total_size > after.address:
            text = f"segment {before.address:#x} of {before.total_size} bytes reaches into segment {after.address:#x}"
            yield Finding("segments_overlap", text, before.device, before.address)
