"""One segment of the spool: consecutive batches, in two files so that their block maps can be given up alone.

A batch's block maps are written first: what stands in N.spool is whole. A segment that an older daemon wrote has no N.maps.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from allocscope.daemon.durable import write_atomically
from allocscope.daemon.spool_frames import OVERHEAD_BYTES, Counts, Frame, frames, pack
from allocscope.daemon.spool_part import Part, found_frames

SUFFIX, MAPS_SUFFIX = ".spool", ".maps"


@dataclass(frozen=True, slots=True)
class SpooledBatch:
    """A batch as it is kept."""

    sequence: int
    payload: bytes
    """An allocscope.proto.v1.Batch, but for what is in `block_maps`."""
    counts: Counts = field(default_factory=Counts)
    """Of all of it."""
    block_maps: bytes = b""
    """An allocscope.proto.v1.Batch of nothing but block maps; empty: there are none, or they were given up."""

    @property
    def whole(self) -> bytes:
        """An allocscope.proto.v1.Batch: messages that follow each other are one (protobuf's encoding, "last one wins")."""
        return self.payload + self.block_maps

    def without_maps(self) -> SpooledBatch:
        """The rest of it."""
        counts = Counts(self.counts.samples, 0, self.counts.events)
        return SpooledBatch(self.sequence, self.payload, counts) if self.block_maps else self


@dataclass(frozen=True, slots=True)
class Loss:
    """What was lost, and why: "spool_full", "too_old", "torn" (what a crash left unfinished), "damaged" (on disk).

    Torn and of no batches: it was never on disk as a whole, so nobody was told that it is, and whoever sent it sends it again.
    Else of no batches: their block maps only.
    """

    reason: str
    batches: int
    counts: Counts
    bytes: int


@dataclass(frozen=True, slots=True)
class Mark:
    """How far a segment was written."""

    frames: int
    sizes: tuple[int, int]
    counts: tuple[Counts, Counts]


class Segment:
    """Batches from number `first` on."""

    def __init__(self, path: Path, now_s: float) -> None:
        """`now_s`: any clock that only goes forward."""
        self.path = path
        self.first = int(path.stem)
        self.began_s = self.newest_s = now_s
        """When its first batch was written, and its newest."""
        self.told_lost = set[int]()
        """Numbers of batches that could not be read, and were counted."""
        self._batches, self._maps = Part(path), Part(path.with_suffix(MAPS_SUFFIX))

    def __len__(self) -> int:
        return len(self._batches.offsets)

    @property
    def last(self) -> int:
        """The newest batch's number; the one before the first: there is none."""
        return self.first + len(self) - 1

    @property
    def size_bytes(self) -> int:
        """On disk."""
        return self._batches.bytes + self._maps.bytes

    @property
    def map_bytes(self) -> int:
        """Of them, what can be given up alone."""
        return self._maps.bytes

    @property
    def counts(self) -> Counts:
        """Of all that is here."""
        return self._batches.counts + self._maps.counts

    @property
    def map_counts(self) -> Counts:
        """Of what can be given up alone."""
        return self._maps.counts

    # writing

    def begin(self) -> None:
        """Make its file; FileNotFoundError: its folder is gone."""
        self._batches.begin()

    def append(self, batch: SpooledBatch, now_s: float) -> None:
        """Add the next one; OSError: some of it may be there (`rewind`)."""
        of_maps = Counts(block_maps=batch.counts.block_maps) if batch.block_maps else Counts()
        if batch.block_maps:
            self._maps.append(Frame(batch.sequence, batch.block_maps, of_maps))
        else:
            self._maps.pass_over()
        rest = batch.without_maps()
        self._batches.append(Frame(batch.sequence, batch.payload, rest.counts))
        self.newest_s = now_s

    def sync(self) -> None:
        """Return when what was added is on the disk, block maps first."""
        self._maps.sync()
        self._batches.sync()

    def close(self) -> None:
        """Nothing more is added."""
        self._maps.close()
        self._batches.close()

    @property
    def is_taken_away(self) -> bool:
        """Whether somebody removed a file that is being written."""
        return self._batches.is_taken_away or self._maps.is_taken_away

    def mark(self) -> Mark:
        """How far it is written."""
        parts = self._batches, self._maps
        return Mark(len(self), (parts[0].bytes, parts[1].bytes), (parts[0].counts, parts[1].counts))

    def rewind(self, mark: Mark) -> None:
        """Forget what came after; nothing is added any more: after a failed fsync nobody knows what its files hold."""
        self.close()
        for part, size, counts in zip((self._batches, self._maps), mark.sizes, mark.counts, strict=True):
            del part.offsets[mark.frames :]
            part.bytes, part.counts = size, counts
            with suppress(FileNotFoundError):
                os.truncate(part.path, size)

    def drop_maps(self) -> None:
        """Give up its block maps; OSError: they are still there."""
        self._maps.remove()

    def remove(self) -> None:
        """OSError: some of it is still there."""
        self._batches.remove()
        self._maps.remove()

    # reading

    def read(self, sequence: int) -> SpooledBatch | None:
        """None: it is damaged, or somebody took its file away. So it may be with its block maps alone."""
        index = sequence - self.first
        batch = self._batches.read(index)
        if batch is None:
            return None
        maps = self._maps.read(index) if self._maps.has(index) else None
        if maps is None or maps.sequence != sequence:
            return SpooledBatch(sequence, batch.payload, batch.counts)
        return SpooledBatch(sequence, batch.payload, batch.counts + maps.counts, maps.payload)

    def counts_of(self, sequences: Iterable[int], *, only_maps: bool = False) -> Counts:
        """How much is in some of its batches, as far as they can be read."""
        found = Counts()
        for sequence in sequences:
            batch = self.read(sequence)
            if batch:
                found += Counts(block_maps=batch.counts.block_maps) if only_maps else batch.counts
        return found

    # starting

    def scan(self) -> bytes:
        """Take what is whole up to the first damage; what lies behind it."""
        with self.path.open("rb") as file:
            for batch, end in frames(file):
                if batch.sequence != self.last + 1:
                    break
                self._batches.found(batch, self._batches.bytes, end)
            file.seek(self._batches.bytes)
            return file.read()

    def cut(self) -> None:
        """End its file where what is whole ends."""
        os.truncate(self.path, self._batches.bytes)

    def move(self, tail: bytes, first: int) -> Path:
        """What is whole behind a damage becomes a segment, with its block maps; its path."""
        moved = self.path.with_name(f"{first:020d}{SUFFIX}")
        maps, _ = found_frames(self._maps.path, first, first + len(tail) // OVERHEAD_BYTES)
        if maps:
            write_atomically(moved.with_suffix(MAPS_SUFFIX), b"".join(pack(frame) for frame, _ in maps))
        write_atomically(moved, tail)
        return moved

    def scan_maps(self) -> int:
        """Find its batches' block maps; at how many places they are damaged, which are cut out."""
        found, damages = found_frames(self._maps.path, self.first, self.last)
        if damages:
            write_atomically(self._maps.path, b"".join(pack(frame) for frame, _ in found))
            found, _ = found_frames(self._maps.path, self.first, self.last)
        placed = {frame.sequence: (frame, start) for frame, start in found}
        for sequence in range(self.first, self.last + 1):
            if sequence not in placed:
                self._maps.pass_over()
                continue
            frame, start = placed[sequence]
            self._maps.found(frame, start, start + OVERHEAD_BYTES + len(frame.payload))
        if self._maps.path.exists():
            os.truncate(self._maps.path, self._maps.bytes)
        return damages
