"""What the collector has not acknowledged, on disk: numbered batches in append-only segment files.

    lock            held by the daemon that uses the folder
    state.json      the daemon's id; the next batch's number and the last one acknowledged, where the segments cannot tell
    N.spool         frames of consecutive batches from number N on: header, payload; header: length and CRC-32 of the rest

A batch counts only once it is fsync'd whole. What a crash left of an unfinished frame is cut off at the next start; where
bytes in the middle are damaged, the whole frames after them go into a segment of their own.
One thread writes, reads and acknowledges; another may ask how much there is.
"""

from __future__ import annotations

import fcntl
import json
import os
import struct
import uuid
import zlib
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import BinaryIO

from allocscope.daemon.errors import SpoolError, SpoolTaken
from allocscope.model.wire import LARGEST_STORED

SEGMENT_BYTES = 4 << 20
"""At which size a segment is closed; what is dropped, or given free, is whole segments."""
LARGEST_BATCH_BYTES = 64 << 20
"""A frame that claims more is no frame."""
SOUGHT_BYTES = 64 << 20
"""So much is read, of all frames that might be, to find the next whole one after damaged bytes."""

_FRAME = struct.Struct("<II")
_HEAD = struct.Struct("<QIII")
_BEGINNING = struct.Struct("<IIQ")
"""Of a frame: length, CRC-32, number."""
_OVERHEAD = _FRAME.size + _HEAD.size


@dataclass(frozen=True, slots=True)
class Counts:
    """What a batch holds."""

    samples: int = 0
    block_maps: int = 0
    events: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(self.samples + other.samples, self.block_maps + other.block_maps, self.events + other.events)


@dataclass(frozen=True, slots=True)
class SpooledBatch:
    """A batch as it is kept."""

    sequence: int
    payload: bytes
    """An allocscope.proto.v1.Batch."""
    counts: Counts = Counts()


@dataclass(frozen=True, slots=True)
class Loss:
    """What was lost, and why: "spool_full", "torn" (what a crash left unfinished), "damaged" (on disk)."""

    reason: str
    batches: int
    counts: Counts
    bytes: int


@dataclass(slots=True)
class _Segment:
    path: Path
    first: int
    offsets: array[int] = field(default_factory=lambda: array("I"))
    """Where each frame starts; batches in a segment are consecutive."""
    size: int = 0
    counts: Counts = Counts()

    @property
    def last(self) -> int:
        return self.first + len(self.offsets) - 1


class Spool:
    """A folder of batches in the order of their numbers."""

    def __init__(self, folder: Path, limit_bytes: int, segment_bytes: int = SEGMENT_BYTES) -> None:
        self._folder, self._limit = folder, limit_bytes
        self._segment_bytes = min(segment_bytes, limit_bytes // 8)
        self._segments: list[_Segment] = []
        self._file: BinaryIO | None = None
        self.lost: list[Loss] = []
        """What was lost since the caller last emptied this list."""
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock = _lock(folder)
        except OSError as error:
            raise SpoolError(folder, error.strerror or str(error)) from error
        try:
            self.daemon_id, self._next, self._acknowledged = self._read_state()
            self._scan()
            self._write_state()
        except OSError as error:
            self._lock.close()
            raise SpoolError(folder, error.strerror or str(error)) from error
        except SpoolError:
            self._lock.close()
            raise

    # what is there

    @property
    def next_sequence(self) -> int:
        """The number of the next batch."""
        return self._next

    @property
    def bytes(self) -> int:
        """On disk, the little that is acknowledged but not yet worth deleting included."""
        return sum(segment.size for segment in list(self._segments))

    @property
    def batches(self) -> int:
        """Not acknowledged, count."""
        first = self._acknowledged + 1
        return sum(max(segment.last + 1 - max(segment.first, first), 0) for segment in list(self._segments))

    def after(self, sequence: int) -> SpooledBatch | None:
        """The first batch that is held with a number above `sequence`."""
        wanted = max(sequence, self._acknowledged) + 1
        for segment in self._segments:
            for index in range(max(wanted - segment.first, 0), len(segment.offsets)):
                batch = self._read(segment, index)
                if batch:
                    return batch
                self.lost.append(Loss("damaged", 1, Counts(), 0))
        return None

    # what is done

    def write(self, batches: Sequence[SpooledBatch]) -> None:
        """Add batches, and return when they are on disk, all of them; OSError: none of them is."""
        if not batches:
            return
        if self._file and not os.fstat(self._file.fileno()).st_nlink:  # somebody took it away
            self._close_file()
        kept = [(segment, len(segment.offsets), segment.size, segment.counts) for segment in self._segments[-1:]]
        known = len(self._segments)
        try:
            for batch in batches:
                self._append(batch)
            self._sync()
        except OSError:
            self._undo(known, kept)
            raise
        self._next = batches[-1].sequence + 1
        self._shrink()

    def acknowledge(self, through: int) -> None:
        """The collector has every batch up to this number."""
        self._acknowledged = max(self._acknowledged, through)
        self._next = max(self._next, through + 1)  # it knows more than this folder does, which was put back from a copy
        with suppress(OSError):  # what stays is sent again after a restart, and known to the collector
            for segment in self._done():
                if segment is self._segments[-1]:
                    self._write_state()  # first: nothing else tells then which numbers were used
                self._remove(segment)

    def close(self) -> None:
        """Let go of the folder."""
        with suppress(OSError):  # it only saves sending again
            self._write_state()
        self._close_file()
        self._lock.close()

    # segments

    def _done(self) -> list[_Segment]:
        """Segments that are wholly acknowledged; the newest only once it is worth a new file, else each batch would make one."""
        done = [segment for segment in self._segments if segment.last <= self._acknowledged]
        if done and done[-1] is self._segments[-1] and done[-1].size * 16 < self._segment_bytes:
            done.pop()
        return done

    def _append(self, batch: SpooledBatch) -> None:
        segment = self._segments[-1] if self._segments and self._file else None
        if segment is None or segment.size >= self._segment_bytes or batch.sequence != segment.last + 1:
            segment = self._begin(batch.sequence)
        assert self._file is not None
        frame = _frame(batch)
        left = memoryview(frame)
        while left:
            left = left[self._file.write(left) :]
        segment.offsets.append(segment.size)
        segment.size += len(frame)
        segment.counts += batch.counts

    def _begin(self, first: int) -> _Segment:
        if self._file:
            self._sync()
            self._close_file()
        path = self._folder / f"{first:020d}.spool"
        self._file = path.open("wb", buffering=0)
        segment = _Segment(path, first)
        self._segments.append(segment)
        _sync_folder(self._folder)
        return segment

    def _sync(self) -> None:
        if self._file:
            os.fsync(self._file.fileno())

    def _close_file(self) -> None:
        if self._file:
            self._file.close()
            self._file = None

    def _undo(self, known: int, kept: list[tuple[_Segment, int, int, Counts]]) -> None:
        """Forget what a failed write left. Its file is not written to again: after a failed fsync nobody knows what it holds."""
        self._close_file()
        for segment in self._segments[known:]:
            segment.path.unlink(missing_ok=True)
        del self._segments[known:]
        for segment, frames, size, counts in kept:
            del segment.offsets[frames:]
            segment.size, segment.counts = size, counts
            os.truncate(segment.path, size)

    def _shrink(self) -> None:
        """Drop the oldest segments while there is too much."""
        while self.bytes > self._limit and len(self._segments) > 1:
            oldest = self._segments[0]
            lost = max(oldest.last - max(self._acknowledged, oldest.first - 1), 0)
            if lost:
                self.lost.append(Loss("spool_full", lost, self._counts_after(oldest, self._acknowledged), oldest.size))
            self._remove(oldest)

    def _counts_after(self, segment: _Segment, sequence: int) -> Counts:
        """What of a segment comes after a number."""
        if sequence < segment.first:
            return segment.counts
        found = Counts()
        for index in range(sequence + 1 - segment.first, len(segment.offsets)):
            batch = self._read(segment, index)
            found += batch.counts if batch else Counts()
        return found

    def _remove(self, segment: _Segment) -> None:
        if segment is self._segments[-1]:
            self._close_file()
        self._segments.remove(segment)
        segment.path.unlink(missing_ok=True)

    def _read(self, segment: _Segment, index: int) -> SpooledBatch | None:
        """None: it is damaged, or somebody took its file away."""
        try:
            with segment.path.open("rb") as file:
                file.seek(segment.offsets[index])
                return next((batch for batch, _ in _frames(file)), None)
        except FileNotFoundError:
            return None

    # starting

    def _scan(self) -> None:
        paths = deque(path for path in sorted(self._folder.glob("*.spool")) if path.stem.isdecimal())  # others' stay
        while paths:
            path = paths.popleft()
            rest = self._scan_segment(_Segment(path, int(path.stem)))
            if rest and rest not in paths:  # else a start that was broken off made it
                paths.appendleft(rest)

    def _scan_segment(self, segment: _Segment) -> Path | None:
        """Take what is whole up to the first damage; the segment that what is whole behind it was moved to."""
        with segment.path.open("rb") as file:
            for batch, end in _frames(file):
                if batch.sequence != segment.last + 1:
                    break
                segment.offsets.append(segment.size)
                segment.size, segment.counts = end, segment.counts + batch.counts
        moved = self._cut(segment)
        self._next = max(self._next, segment.last + 1)
        if segment.offsets:
            self._segments.append(segment)
        else:
            segment.path.unlink()
        return moved

    def _cut(self, segment: _Segment) -> Path | None:
        """End a segment where it does not go on with its next frame."""
        with segment.path.open("rb") as file:
            file.seek(segment.size)
            tail = file.read()
        moved = None
        if found := _next_frame(tail, segment.last + 1):
            sequence, start = found
            lost = sequence - 1 - max(segment.last, self._acknowledged)
            if lost > 0:
                self.lost.append(Loss("damaged", lost, Counts(), start))
            moved = self._folder / f"{sequence:020d}.spool"
            _write_bytes_atomically(moved, tail[start:])
        elif written := len(tail.rstrip(b"\0")):  # zeros: the file was made longer, and nothing written there yet
            self.lost.append(Loss("torn", 1, Counts(), len(tail)))
            # As many numbers as can have been in it are not used again: on a disk that lies about fsync the collector may know them.
            self._next = max(self._next, segment.last + 1 + -(-written // _OVERHEAD))
        if tail:
            os.truncate(segment.path, segment.size)
        return moved

    def _read_state(self) -> tuple[str, int, int]:
        path = self._folder / "state.json"
        try:
            state = json.loads(path.read_text(encoding="ascii"))
            daemon_id, first, acknowledged = (
                str(state["daemon_id"]),
                int(state["next_batch"]),
                int(state["acknowledged"]),
            )
            if not 0 <= acknowledged < first <= LARGEST_STORED:
                raise ValueError(f"batch {first} cannot be the next after {acknowledged}")
            return daemon_id, first, acknowledged
        except FileNotFoundError:
            return uuid.uuid4().hex, 1, 0
        except (ValueError, KeyError, TypeError) as error:
            raise SpoolError(self._folder, f"{path} is damaged; move the folder away to start anew") from error

    def _write_state(self) -> None:
        path = self._folder / "state.json"
        state = {"daemon_id": self.daemon_id, "next_batch": self._next, "acknowledged": self._acknowledged}
        write_atomically(path, json.dumps(state) + "\n")


def write_atomically(path: Path, text: str) -> None:
    """Write a file so that it is there whole, or as it was."""
    _write_bytes_atomically(path, text.encode())


def _write_bytes_atomically(path: Path, content: bytes) -> None:
    beside = path.with_name(path.name + ".new")
    with beside.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)
    _sync_folder(path.parent)


def _frame(batch: SpooledBatch) -> bytes:
    counts = batch.counts
    body = _HEAD.pack(batch.sequence, counts.samples, counts.block_maps, counts.events) + batch.payload
    return _FRAME.pack(len(body), zlib.crc32(body)) + body


def _frames(file: BinaryIO) -> Iterator[tuple[SpooledBatch, int]]:
    """The whole frames from where the file stands, each with where it ends."""
    while len(start := file.read(_FRAME.size)) == _FRAME.size:
        length, checksum = _FRAME.unpack(start)
        if not _HEAD.size <= length <= LARGEST_BATCH_BYTES:
            return
        body = file.read(length)
        if len(body) < length or zlib.crc32(body) != checksum:
            return
        sequence, *counts = _HEAD.unpack_from(body)
        yield SpooledBatch(sequence, body[_HEAD.size :], Counts(*counts)), file.tell()


def _next_frame(tail: bytes, least: int) -> tuple[int, int] | None:
    """The number and place of the first whole frame of a batch from number `least` on that can be in there; None: none is found."""
    most, left_bytes = least + len(tail) // _OVERHEAD, SOUGHT_BYTES
    for start in range(len(tail) - _OVERHEAD + 1):
        length, _, sequence = _BEGINNING.unpack_from(tail, start)
        if not (least <= sequence <= most and _HEAD.size <= length <= len(tail) - start - _FRAME.size):
            continue
        left_bytes -= length
        if left_bytes < 0:
            return None
        if next(_frames(BytesIO(tail[start : start + _FRAME.size + length])), None):
            return sequence, start
    return None


def _lock(folder: Path) -> BinaryIO:
    file = (folder / "lock").open("wb")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise SpoolTaken(folder) from None
    return file


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
