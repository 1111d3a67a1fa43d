"""What jobs leave beside the socket: notes and snapshots. Whoever may use the socket may write there, so nothing in it is trusted.

Names go by pattern; only regular files are read, and only as bytes; there are never more of them, nor older ones, than a bound.
One thread does everything here.
"""

from __future__ import annotations

import os
import re
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import BinaryIO

from allocscope.daemon.capture_losses import CaptureLosses
from allocscope.daemon.capture_place import CapturePlace
from allocscope.daemon.packing import SnapshotUnusable, too_large
from allocscope.model.captures import NOTE_SUFFIX, SNAPSHOT_SUFFIX, UNFINISHED_SUFFIX

LARGEST_NOTE_BYTES = 4 << 20
MOST_FILES = 1024
MOST_LOOKED_AT = 8192
"""Entries in one look; more are for the next."""
OLDEST_S = 86400.0
"""A note that could not be kept for so long, since no disk has room, is dropped."""
UNFINISHED_S = 600.0
"""A part that nobody has written to for so long is a dead process's."""
ALONE_S = 600.0
"""A snapshot whose note has not come for so long is nobody's."""

_NAME = re.compile(
    f"(?P<hidden>\\.?)(?P<id>[0-9a-f]{{32}})(?P<suffix>{re.escape(NOTE_SUFFIX)}|{re.escape(SNAPSHOT_SUFFIX)})"
    f"(?P<part>(?:{re.escape(UNFINISHED_SUFFIX)})?)"
)


@dataclass(frozen=True, slots=True)
class Left:
    """A file that a job left, or still writes."""

    name: str
    capture_id: str
    bytes: int
    age_s: float
    """Since it was last written to, renamed or given other rights: ctime, which nobody can set."""
    uid: int
    """Its owner."""
    version: tuple[int, int]
    """Inode and ctime in nanoseconds. Another one: it was written anew, or is another file."""

    @property
    def order(self) -> tuple[int, str]:
        """Sorts the oldest first."""
        return self.version[1], self.name


@dataclass(frozen=True, slots=True)
class Look:
    """What is there, by capture id; notes the oldest first."""

    notes: dict[str, Left] = field(default_factory=dict)
    snapshots: dict[str, Left] = field(default_factory=dict)
    unfinished: dict[str, Left] = field(default_factory=dict)
    """Snapshots that are being written."""


class CaptureFolder:
    """What is in the folder."""

    def __init__(
        self,
        place: CapturePlace,
        losses: CaptureLosses,
        *,
        limit_bytes: int,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`clock` in seconds, unix time."""
        self._place, self._losses = place, losses
        self._limit_bytes, self._clock = limit_bytes, clock
        self.path = place.path
        self._stuck: dict[str, tuple[int, int]] = {}
        """What could not be removed, and was told of: names and versions."""

    # looking

    def look(self) -> Look:
        """What is there, once everything is removed that may not be; OSError: the folder cannot be used."""
        with self._place.opened() as folder:
            found = list(self._files(folder))
            found = self._without_old(folder, found)
            return _sorted(self._without_excess(folder, found))

    def _files(self, folder: int) -> Iterator[Left]:
        with os.scandir(folder) as entries:
            names = [entry.name for entry in islice(entries, MOST_LOOKED_AT)]
        self._stuck = {name: self._stuck[name] for name in names if name in self._stuck}
        for name in names:
            with suppress(FileNotFoundError):
                left = self._file(folder, name)
                if left:
                    yield left

    def _file(self, folder: int, name: str) -> Left | None:
        """None: it is none of ours, and is removed."""
        found = os.stat(name, dir_fd=folder, follow_symlinks=False)
        version = (found.st_ino, found.st_ctime_ns)
        if self._stuck.get(name) == version:
            return None
        match = _NAME.fullmatch(name)
        if match is None or bool(match["hidden"]) != bool(match["part"]):
            self._drop(folder, name, "not_a_capture", "jobs leave only captures there; what else puts files there?")
        elif not stat.S_ISREG(found.st_mode):
            self._drop(folder, name, "not_a_file", "only regular files are taken; what puts others there?")
        else:
            age_s = max(self._clock() - found.st_ctime, 0.0)
            return Left(name, match["id"], found.st_size, age_s, found.st_uid, version)
        return None

    def _without_old(self, folder: int, found: list[Left]) -> list[Left]:
        noted = {left.capture_id for left in found if left.name.endswith(NOTE_SUFFIX)}
        kept = []
        for left in found:
            if left.name.endswith(UNFINISHED_SUFFIX) and left.age_s > UNFINISHED_S:
                self._drop(folder, left.name, "unfinished", "its process ended, or was stopped, before it was whole")
            elif left.name.endswith(SNAPSHOT_SUFFIX) and left.capture_id not in noted and left.age_s > ALONE_S:
                self._drop(folder, left.name, "no_note", "there is no note with it, or it came too late")
            elif left.age_s > OLDEST_S:
                self._drop(folder, left.name, "too_old", "it could not be kept in the spool; has its disk room?")
            else:
                kept.append(left)
        return kept

    def _without_excess(self, folder: int, found: list[Left]) -> list[Left]:
        """The newest that are within the bounds."""
        kept: list[Left] = []
        bytes_ = 0
        for left in sorted(found, key=lambda left: left.order, reverse=True):
            bytes_ += left.bytes
            if len(kept) < MOST_FILES and bytes_ <= self._limit_bytes:
                kept.append(left)
                continue
            bytes_ -= left.bytes
            why = "jobs leave more captures than can be kept; has the spool's disk room? (captures_limit_bytes)"
            self._drop(folder, left.name, "folder_full", why)
        return kept

    def _drop(self, folder: int, name: str, reason: str, why: str) -> None:
        """A name that cannot be removed, such as that of another user's folder with files in it, is told of and stays."""
        try:
            _remove(folder, name)
        except FileNotFoundError:
            return
        except OSError as error:
            with suppress(FileNotFoundError):
                found = os.stat(name, dir_fd=folder, follow_symlinks=False)
                self._stuck[name] = (found.st_ino, found.st_ctime_ns)
            why = f"{why} It cannot be removed ({error.strerror}): remove {os.fspath(self.path / name)!a} by hand"
        self._losses.add(reason, name, why)

    # reading

    def read_note(self, capture_id: str) -> tuple[bytes, int]:
        """A note and its owner's user id; ValueError: it cannot be one; FileNotFoundError: it is gone."""
        with self._place.opened() as folder, _regular(folder, capture_id + NOTE_SUFFIX) as file:
            found = os.fstat(file.fileno())
            if found.st_size > LARGEST_NOTE_BYTES:
                raise ValueError(f"a note of {found.st_size} bytes (at most {LARGEST_NOTE_BYTES})")
            return file.read(LARGEST_NOTE_BYTES), found.st_uid

    def open_snapshot(self, capture_id: str, uid: int, largest_bytes: int) -> BinaryIO:
        """A snapshot of that owner; SnapshotUnusable: it cannot be taken."""
        with self._place.opened() as folder:
            file = _open_snapshot(folder, capture_id + SNAPSHOT_SUFFIX)
        found = os.fstat(file.fileno())
        wrong = None
        if found.st_uid != uid:
            wrong = SnapshotUnusable("foreign_owner", f"the snapshot is user {found.st_uid}'s, the note user {uid}'s")
        elif found.st_size > largest_bytes:
            wrong = SnapshotUnusable("too_large", too_large(found.st_size, largest_bytes))
        if wrong:
            file.close()
            raise wrong
        return file

    # removing

    def remove(self, capture_id: str) -> None:
        """Everything of one capture, the note last: while it is there, the rest is not forgotten."""
        whole = (capture_id + SNAPSHOT_SUFFIX, capture_id + NOTE_SUFFIX)
        parts = (f".{name}{UNFINISHED_SUFFIX}" for name in whole)
        with self._place.opened() as folder:
            for name in (*parts, *whole):
                with suppress(FileNotFoundError):
                    _remove(folder, name)

    def drop(self, capture_id: str, reason: str, why: str) -> None:
        """Remove everything of a capture that cannot be taken, and count it."""
        with suppress(OSError):
            self.remove(capture_id)
        self._losses.add(reason, capture_id, why)


def _sorted(found: list[Left]) -> Look:
    look = Look()
    for left in sorted(found, key=lambda left: left.order):
        if left.name.endswith(NOTE_SUFFIX):
            look.notes[left.capture_id] = left
        elif left.name.endswith(SNAPSHOT_SUFFIX):
            look.snapshots[left.capture_id] = left
        elif left.name.endswith(SNAPSHOT_SUFFIX + UNFINISHED_SUFFIX):
            look.unfinished[left.capture_id] = left
    return look


def _regular(folder: int, name: str) -> BinaryIO:
    """A regular file, open to be read; ValueError: it is none. A pipe's writer is not waited for."""
    try:
        descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY, dir_fd=folder)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ValueError(
            f"{name} cannot be read ({error.strerror}); may the daemon's user or group read it?"
        ) from error
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1:  # a link may lead to what only the daemon may read
        os.close(descriptor)
        raise ValueError(f"{name} is no regular file with one name")
    return os.fdopen(descriptor, "rb")


def _open_snapshot(folder: int, name: str) -> BinaryIO:
    try:
        return _regular(folder, name)
    except (OSError, ValueError) as error:
        raise SnapshotUnusable("unreadable", f"the snapshot cannot be read: {error}") from error


def _remove(folder: int, name: str) -> None:
    try:
        os.unlink(name, dir_fd=folder)
    except IsADirectoryError:
        os.rmdir(name, dir_fd=folder)
