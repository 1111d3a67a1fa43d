"""Where captures are left for the daemon: `captures` beside its socket. A job may create files there, and not list them.

A file is written as `.<name>.part` and has its name once it is whole. Nothing here waits for anybody, but for the disk.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from allocscope.model.captures import FOLDER, UNFINISHED_SUFFIX

HELD_BYTES = 1 << 30
"""Of this process's files that no daemon has taken yet; also the largest snapshot, as daemons have it by default."""
KEPT_FREE_SHARE, KEPT_FREE_BYTES = 0.05, 256 << 20
"""Of the file system, which others need too (it may be the machine's memory); on a tiny one half of it."""
BYTES_BETWEEN_LOOKS = 16 << 20
"""Written between two looks at how much is free."""
FOR_GROUP, FOR_ALL = 0o640, 0o644
CLOSED = -1


class NoRoom(OSError):  # noqa: N818 (it names what happened)
    """A file would take what is kept free for others, or more than one process may leave."""


class Part:
    """A file that is being written; unless it is kept, nothing of it stays."""

    def __init__(self, folder: int, name: str, room_bytes: int) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        self._folder, self._name, self._part = folder, name, f".{name}{UNFINISHED_SUFFIX}"
        self._room_bytes, self._look_at_bytes = room_bytes, BYTES_BETWEEN_LOOKS
        self.bytes = 0
        self._file = os.open(self._part, flags, FOR_GROUP, dir_fd=folder)

    def let_daemon_read(self) -> None:
        """By the folder's group, or as its owner; else by all, since nobody else knows the name: the folder cannot be listed."""
        of_folder = os.fstat(self._folder)
        with suppress(OSError):
            os.fchown(self._file, -1, of_folder.st_gid)
        of_file = os.fstat(self._file)
        is_shared = of_file.st_gid == of_folder.st_gid or of_file.st_uid == of_folder.st_uid
        os.fchmod(self._file, FOR_GROUP if is_shared else FOR_ALL)

    def write(self, data: Any) -> int:
        """All of these bytes; NoRoom and OSError say why not."""
        view = memoryview(data).cast("B")
        self.bytes += len(view)
        if self.bytes > self._room_bytes:
            raise NoRoom(f"it is larger than {self._room_bytes} bytes, which is all that this process may leave there")
        if self.bytes >= self._look_at_bytes:
            self._look_at_bytes = self.bytes + BYTES_BETWEEN_LOOKS
            check_free(self._folder)
        at = 0
        while at < len(view):
            at += os.write(self._file, view[at:])
        return at

    def keep(self) -> None:
        """It is whole: give it its name."""
        self._close()
        os.rename(self._part, self._name, src_dir_fd=self._folder, dst_dir_fd=self._folder)

    def discard(self) -> None:
        """Take it away, where it was not kept."""
        self._close()
        with suppress(OSError):
            os.unlink(self._part, dir_fd=self._folder)

    def _close(self) -> None:
        file, self._file = self._file, CLOSED
        if file != CLOSED:
            os.close(file)


class CaptureFolder:
    """The daemon's folder, as one process uses it."""

    def __init__(self, socket: str) -> None:
        self.path = Path(socket).parent / FOLDER
        self._ours: dict[str, int] = {}
        """Bytes by name, of what we left there."""

    @property
    def exists(self) -> bool:
        """Whether a daemon that takes captures ever was here."""
        return self.path.is_dir()

    def leave(self, name: str, data: bytes) -> None:
        """A small file, whole or not at all; FileNotFoundError: there is no folder; OSError says why not."""
        with self.part(name) as part:
            part.write(data)
            part.keep()

    @contextmanager
    def part(self, name: str) -> Iterator[Part]:
        """A file to be written, and kept; OSError says why it cannot be."""
        with self._opened() as folder:
            part = Part(folder, name, HELD_BYTES - self._held_bytes(folder))
            try:
                part.let_daemon_read()
                yield part
                self._ours[name] = part.bytes
            finally:
                part.discard()

    def check_free(self) -> None:
        """NoRoom where too little is free for a large file."""
        with self._opened() as folder:
            check_free(folder)

    def _held_bytes(self, folder: int) -> int:
        for name in list(self._ours):
            try:
                os.stat(name, dir_fd=folder, follow_symlinks=False)
            except OSError:
                self._ours.pop(name, None)
        return sum(self._ours.values())

    @contextmanager
    def _opened(self) -> Iterator[int]:
        """The folder itself; it need not be readable for us."""
        folder = os.open(self.path, getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            yield folder
        finally:
            os.close(folder)


def check_free(folder: int) -> None:
    """NoRoom where a file system has too little left for others."""
    found = os.statvfs(folder)
    total = found.f_blocks * found.f_frsize
    kept = max(total * KEPT_FREE_SHARE, min(KEPT_FREE_BYTES, total / 2))
    free = found.f_bavail * found.f_frsize
    if free < kept:
        raise NoRoom(f"the daemon's file system has only {free} of {total} bytes free")
