"""What the collector has not acknowledged, on disk: numbered batches in append-only segment files.

    lock            held by the daemon that uses the folder
    state.json      the daemon's id; the next batch's number and the last one acknowledged, where the segments cannot tell;
                    and the batches that come late
    N.spool         frames of consecutive batches from number N on (`spool_frames`)
    N.maps          those batches' block maps, which are the first to be given up

A batch counts only once it is whole on the disk. What a crash left of an unfinished frame is cut off at the next start; where
bytes in the middle are damaged, the whole frames after them go into a segment of their own.
Batches are sent in the order of their numbers, until those that wait are postponed: then the newer go first, and the
postponed ones follow beside them, in their own order (`postpone`, `late_after`, `acknowledge_late`).
One thread writes, reads and acknowledges; another may ask how much there is.
"""

from __future__ import annotations

import fcntl
import math
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import BinaryIO

from allocscope.daemon.durable import sync_folder, write_atomically
from allocscope.daemon.errors import SpoolError, SpoolTaken
from allocscope.daemon.spool_frames import Counts
from allocscope.daemon.spool_scan import scan
from allocscope.daemon.spool_segment import SUFFIX, Loss, Mark, Segment, SpooledBatch
from allocscope.daemon.spool_state import SpoolState

SEGMENT_BYTES = 4 << 20
"""At which size a segment is closed; what is dropped, or given free, is whole segments, or their block maps."""
UNHURRIED_S = 3600.0
"""How old a segment is, which is found at a start, is told by a clock that may be wrong then: it is not dropped sooner."""


class Spool:
    """A folder of batches in the order of their numbers."""

    def __init__(
        self,
        folder: Path,
        limit_bytes: int,
        segment_bytes: int = SEGMENT_BYTES,
        *,
        limit_age_s: float = math.inf,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """`clock` tells how old batches are; `wall` only how old those are that are found."""
        self._folder, self._limit, self._limit_age_s = folder, limit_bytes, limit_age_s
        self._clock, self._wall = clock, wall
        self._segment_bytes = min(segment_bytes, limit_bytes // 8)
        self._segments: list[Segment]
        self._is_open = False
        """Whether the newest segment is being written."""
        self.lost: list[Loss]
        """What was lost since the caller last emptied this list."""
        self.unused_at_start: int
        """Numbers directly before the next one, as it was at the start, that no batch ever had."""
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock = _lock(folder)
        except OSError as error:
            raise SpoolError(folder, error.strerror or str(error)) from error
        try:
            self._state = self._read_state()
            before = self._state.to_json()
            found = scan(folder, self._state, self._written_s)
            self._segments, self.lost, self.unused_at_start = found.segments, found.lost, found.unused
            self._write_changed_state(before)
        except OSError as error:
            self._lock.close()
            raise SpoolError(folder, error.strerror or str(error)) from error
        except SpoolError:
            self._lock.close()
            raise

    # what is there

    @property
    def daemon_id(self) -> str:
        """Drawn once and kept here."""
        return self._state.daemon_id

    @property
    def next_sequence(self) -> int:
        """The number of the next batch."""
        return self._state.next_sequence

    @property
    def size_bytes(self) -> int:
        """On disk, the little that is acknowledged but not yet worth deleting included."""
        return sum(segment.size_bytes for segment in list(self._segments))

    @property
    def batches(self) -> int:
        """Not acknowledged, count."""
        return sum(len(numbers) for segment in list(self._segments) for numbers in self._waiting(segment))

    @property
    def in_order(self) -> int:
        """Of those, how many are sent in order, count."""
        return self.batches - self.late

    @property
    def late(self) -> int:
        """Of those, how many come late, count."""
        late = self._state.late
        held = ((s.first, s.last) for s in list(self._segments))
        return sum(
            max(min(numbers.stop, last + 1) - max(numbers.start, first), 0) for first, last in held for numbers in late
        )

    def after(self, sequence: int) -> SpooledBatch | None:
        """The first batch that is held with a number above `sequence`, of those that are sent in order."""
        first = max(sequence, self._state.acknowledged) + 1
        return self._first(range(first, self._state.next_sequence))

    def late_after(self, sequence: int) -> SpooledBatch | None:
        """The same, of those that come late."""
        late = (range(max(numbers.start, sequence + 1), numbers.stop) for numbers in self._state.late)
        return next((batch for numbers in late if (batch := self._first(numbers))), None)

    def late_before(self, sequence: int) -> int:
        """How many numbers directly before this one come late, count."""
        return next((len(numbers) for numbers in self._state.late if numbers.stop == sequence), 0)

    # what is done

    def write(self, batches: Sequence[SpooledBatch]) -> None:
        """Add batches, and return when they are on disk, all of them; OSError: none of them is."""
        if not batches:
            return
        if self._is_open and self._segments[-1].is_taken_away:
            self._close_newest()
        known = len(self._segments)
        newest = self._segments[-1] if self._segments else None
        mark = newest.mark() if newest else None
        try:
            for batch in batches:
                self._append(batch)
            self._segments[-1].sync()
        except OSError:
            self._undo(known, mark)
            raise
        self._state.next_sequence = max(self._state.next_sequence, batches[-1].sequence + 1)
        with suppress(OSError):  # they are on disk, whatever becomes of others; tried again with the next ones
            self._shrink()

    def postpone(self) -> None:
        """What waits comes late from now on; what is written from now on is sent at once. OSError: all is as it was."""
        postponed = self._state.postponed()
        write_atomically(self._state_file, postponed.to_json())
        self._state = postponed

    def acknowledge(self, through: int) -> None:
        """The collector has every batch up to this number, but for those that come late.

        It may know of more than this folder does, which was put back from a copy.
        """
        self._state.acknowledge(through)
        self._release()

    def acknowledge_late(self, through: int) -> None:
        """The collector has every batch up to this number that comes late."""
        self._state.acknowledge_late(through)
        self._release()

    def close(self) -> None:
        """Let go of the folder."""
        with suppress(OSError):  # it only saves sending again
            self._write_state()
        self._close_newest()
        self._lock.close()

    # segments

    def _waiting(self, segment: Segment) -> list[range]:
        return list(self._state.waiting(segment.first, segment.last))

    def _first(self, numbers: range) -> SpooledBatch | None:
        """Of these, the first that can be read."""
        for segment in self._segments:
            held = range(max(numbers.start, segment.first), min(numbers.stop, segment.last + 1))
            for sequence in held:
                batch = segment.read(sequence)
                if batch:
                    return batch
                if sequence not in segment.told_lost:  # it is looked for again whenever the collector returns
                    segment.told_lost.add(sequence)
                    self.lost.append(Loss("damaged", 1, Counts(), 0))
        return None

    def _release(self) -> None:
        """Remove segments that are wholly acknowledged; the newest only once it is worth a new file, else each batch would make one."""
        with suppress(OSError):  # what stays is sent again after a restart, and known to the collector
            for segment in [segment for segment in self._segments if not self._waiting(segment)]:
                if segment is self._segments[-1]:
                    if segment.size_bytes * 16 < self._segment_bytes:
                        continue
                    self._write_state()  # first: nothing else tells then which numbers were used
                self._remove(segment)

    def _append(self, batch: SpooledBatch) -> None:
        now_s = self._clock()
        segment = self._segments[-1] if self._is_open else None
        if segment is None or self._is_full(segment, now_s) or batch.sequence != segment.last + 1:
            segment = self._begin(batch.sequence, now_s)
        segment.append(batch, now_s)

    def _is_full(self, segment: Segment, now_s: float) -> bool:
        return segment.size_bytes >= self._segment_bytes or now_s - segment.began_s > self._limit_age_s / 16

    def _begin(self, first: int, now_s: float) -> Segment:
        if self._is_open:
            self._segments[-1].sync()
            self._close_newest()
        segment = Segment(self._folder / f"{first:020d}{SUFFIX}", now_s)
        try:
            segment.begin()
        except FileNotFoundError:
            self._make_anew()
            segment.begin()
        self._segments.append(segment)
        self._is_open = True
        sync_folder(self._folder)
        return segment

    def _make_anew(self) -> None:
        """Somebody took the folder away, with what was in it."""
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = _lock(self._folder)
        self._lock.close()
        self._lock = lock
        self._write_state()

    def _close_newest(self) -> None:
        if self._is_open:
            self._segments[-1].close()
        self._is_open = False

    def _undo(self, known: int, mark: Mark | None) -> None:
        """Forget what a failed write left."""
        self._close_newest()
        for segment in self._segments[known:]:
            segment.close()
            with suppress(OSError):  # its numbers are used again, and then its files written anew
                segment.remove()
        del self._segments[known:]
        if mark is not None and self._segments:
            self._segments[-1].rewind(mark)

    def _shrink(self) -> None:
        """While there is too much, drop the oldest block maps, and then the oldest batches; and what is too old."""
        while self.size_bytes > self._limit and len(self._segments) > 1:
            if segment := next((segment for segment in self._segments[:-1] if segment.map_bytes), None):
                self._drop_maps(segment)
            else:
                self._drop(self._segments[0], "spool_full")
        too_old_s = self._clock() - self._limit_age_s
        while len(self._segments) > 1 and self._segments[0].newest_s < too_old_s:
            self._drop(self._segments[0], "too_old")

    def _drop_maps(self, segment: Segment) -> None:
        waiting = self._waiting(segment)
        counts = self._counts(segment, waiting, only_maps=True) if waiting else Counts()
        size = segment.map_bytes
        segment.drop_maps()
        if counts.block_maps:
            self.lost.append(Loss("spool_full", 0, counts, size))

    def _drop(self, segment: Segment, reason: str) -> None:
        waiting = self._waiting(segment)
        counts, size = self._counts(segment, waiting), segment.size_bytes
        self._remove(segment)
        if waiting:
            self.lost.append(Loss(reason, sum(map(len, waiting)), counts, size))

    def _counts(self, segment: Segment, waiting: Iterable[range], *, only_maps: bool = False) -> Counts:
        """What is in those of its batches."""
        waiting = list(waiting)
        if sum(map(len, waiting)) == len(segment):
            return segment.map_counts if only_maps else segment.counts
        return segment.counts_of(chain.from_iterable(waiting), only_maps=only_maps)

    def _remove(self, segment: Segment) -> None:
        segment.remove()
        if segment is self._segments[-1]:
            self._close_newest()
        self._segments.remove(segment)

    # starting

    def _written_s(self, path: Path) -> float:
        """When, by this daemon's clock, which began anew. The wall's may have been set since, or be wrong yet."""
        old_s = self._wall() - path.stat().st_mtime
        return self._clock() - min(max(old_s, 0), max(self._limit_age_s - UNHURRIED_S, 0))

    def _write_changed_state(self, before: str) -> None:
        """A daemon that was here before starts on a full disk, too: what it cannot write now the segments tell, nearly always."""
        if not self._state_file.exists():
            self._write_state()
        elif self._state.to_json() != before:
            with suppress(OSError):
                self._write_state()

    @property
    def _state_file(self) -> Path:
        return self._folder / "state.json"

    def _read_state(self) -> SpoolState:
        try:
            return SpoolState.from_json(self._state_file.read_text(encoding="ascii"))
        except FileNotFoundError:
            return SpoolState(uuid.uuid4().hex)
        except ValueError as error:
            raise SpoolError(
                self._folder, f"{self._state_file} is damaged; move the folder away to start anew"
            ) from error

    def _write_state(self) -> None:
        write_atomically(self._state_file, self._state.to_json())


def _lock(folder: Path) -> BinaryIO:
    file = (folder / "lock").open("wb")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise SpoolTaken(folder) from None
    return file
