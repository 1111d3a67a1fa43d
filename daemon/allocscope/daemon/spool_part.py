"""One of the files that a segment of the spool is made of."""

from __future__ import annotations

import os
from array import array
from io import BytesIO
from pathlib import Path
from typing import BinaryIO

from allocscope.daemon.spool_frames import Counts, Frame, frames, is_unfinished, next_frame, pack

_NOWHERE = 0xFFFF_FFFF


class Part:
    """One of a segment's two files: frames, and of which batch each is."""

    def __init__(self, path: Path) -> None:
        """A file that is there, or will be."""
        self.path = path
        self.offsets = array("I")
        """Where each batch's frame starts."""
        self.bytes = 0
        self.counts = Counts()
        self._file: BinaryIO | None = None
        self._is_synced = True

    @property
    def is_taken_away(self) -> bool:
        """Whether somebody removed it while it is written."""
        return self._file is not None and not os.fstat(self._file.fileno()).st_nlink

    def begin(self) -> None:
        """Make the file."""
        self._file = self.path.open("wb", buffering=0)

    def pass_over(self) -> None:
        """A batch has nothing here."""
        self.offsets.append(_NOWHERE)

    def append(self, frame: Frame) -> None:
        """OSError: its beginning may be there."""
        if self._file is None:
            self.begin()
        assert self._file is not None
        packed = pack(frame)
        left = memoryview(packed)
        self._is_synced = False
        while left:
            left = left[self._file.write(left) :]
        self.found(frame, self.bytes, self.bytes + len(packed))

    def found(self, frame: Frame, start: int, end: int) -> None:
        """A batch's frame is there."""
        self.offsets.append(start)
        self.bytes, self.counts = end, self.counts + frame.counts

    def sync(self) -> None:
        """Return when it is on the disk."""
        if self._file and not self._is_synced:
            os.fdatasync(self._file.fileno())
            self._is_synced = True

    def close(self) -> None:
        """Nothing more is added."""
        if self._file:
            self._file.close()
            self._file = None

    def read(self, index: int) -> Frame | None:
        """None: it is damaged, or somebody took the file away."""
        try:
            with self.path.open("rb") as file:
                file.seek(self.offsets[index])
                return next((frame for frame, _ in frames(file)), None)
        except FileNotFoundError:
            return None

    def has(self, index: int) -> bool:
        """Whether a batch has something here."""
        return self.offsets[index] != _NOWHERE

    def remove(self) -> None:
        """OSError: it is still there."""
        self.path.unlink(missing_ok=True)
        self.close()
        self.offsets = array("I", [_NOWHERE]) * len(self.offsets)
        self.bytes, self.counts = 0, Counts()


def found_frames(path: Path, first: int, last: int) -> tuple[list[tuple[Frame, int]], int]:
    """The whole frames of these batches, each with its start, and at how many places there is damage between or behind them."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return [], 0
    file, found = BytesIO(content), list[tuple[Frame, int]]()
    start, damages, least = 0, 0, 0
    while start < len(content):
        file.seek(start)
        frame = next((frame for frame, _ in frames(file)), None)
        if frame is None or frame.sequence < least:
            tail = content[start:]
            behind = next_frame(tail, least, last)
            damages += behind is not None or not is_unfinished(tail)
            if behind is None:
                break
            start += behind[1]
            continue
        if (
            first <= frame.sequence <= last
        ):  # one beyond was being written when the process was killed: its batch is not there
            found.append((frame, start))
        start, least = file.tell(), frame.sequence + 1
    return found, damages
