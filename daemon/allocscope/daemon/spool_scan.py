"""What a spool's folder holds when a daemon starts: what is whole is taken, what is not is cut off, and counted."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from allocscope.daemon.spool_frames import OVERHEAD_BYTES, Counts, is_unfinished, next_frame
from allocscope.daemon.spool_segment import SUFFIX, Loss, Segment
from allocscope.daemon.spool_state import LARGEST_SEQUENCE, SpoolState


@dataclass(slots=True)
class Found:
    """A folder's content."""

    segments: list[Segment] = field(default_factory=list)
    """In order; none is empty."""
    lost: list[Loss] = field(default_factory=list)
    unused: int = 0
    """Numbers directly before the next one that no batch ever had."""


def scan(folder: Path, state: SpoolState, written_s: Callable[[Path], float]) -> Found:
    """Also moves `state` on beyond every number that may have been used. `written_s`: when a file was written last. OSError."""
    for path in folder.glob(f"*{SUFFIX}.new"):  # of a start that was broken off
        path.unlink()
    found = Found()
    paths = deque(path for path in sorted(folder.glob(f"*{SUFFIX}")) if _is_segment(path))  # others' stay
    while paths:
        path = paths.popleft()
        rest = _scan_segment(Segment(path, written_s(path)), state, found)
        if rest and rest not in paths:  # else a start that was broken off made it
            paths.appendleft(rest)
    return found


def _is_segment(path: Path) -> bool:
    """By a name such as this daemon gives: whatever else is there may claim any number."""
    name = path.stem
    return len(name) == 20 and name.isascii() and name.isdecimal() and int(name) <= LARGEST_SEQUENCE and path.is_file()


def _scan_segment(segment: Segment, state: SpoolState, found: Found) -> Path | None:
    """Take what is whole up to the first damage; the segment that what is whole behind it was moved to, which may be its own file."""
    moved = _cut(segment, segment.scan(), state, found)
    if moved == segment.path:
        return moved
    state.next_sequence = max(state.next_sequence, segment.last + 1)
    if not len(segment):
        segment.remove()
        return moved
    if damages := segment.scan_maps():
        found.lost.append(Loss("damaged", 0, Counts(block_maps=damages), 0))
    found.segments.append(segment)
    return moved


def _cut(segment: Segment, tail: bytes, state: SpoolState, found: Found) -> Path | None:
    """End a segment where it does not go on with its next frame."""
    moved, first = None, segment.last + 1
    if behind := next_frame(tail, first, first + len(tail) // OVERHEAD_BYTES):
        sequence, start = behind
        lost = sum(map(len, state.waiting(first, sequence - 1)))
        if lost:
            found.lost.append(Loss("damaged", lost, Counts(), start))
        moved = segment.move(tail[start:], sequence)
    elif written := len(tail.rstrip(b"\0")):  # zeros: the file was made longer, and nothing written there yet
        lost = 0 if is_unfinished(tail) else 1
        found.lost.append(Loss("torn", lost, Counts(), len(tail)))
        # As many numbers as can have been in it are not used again: on a disk that lies about fsync the collector may know them.
        first_new = max(state.next_sequence, first)
        state.next_sequence = max(first_new, first + -(-written // OVERHEAD_BYTES))
        found.unused = max(state.next_sequence - first_new - lost, 0)
    if tail and moved != segment.path:
        segment.cut()
    return moved
