"""The folder for captures beside the jobs' socket: who may put files there, and which daemon takes them."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


class CapturePlace:
    """Made where it is not there; not used where it is another user's, or another daemon's."""

    def __init__(self, path: Path, *, group_id: int | None, socket_mode: int) -> None:
        """Open to whoever may write to a socket of that mode and group; None: the daemon's own group."""
        self.path, self._group_id = path, group_id
        writers = (0o030 if socket_mode & 0o020 else 0) | (0o003 if socket_mode & 0o002 else 0)
        # Jobs may neither list it nor take away others' files. Files in it have its group, so that a daemon without root reads them.
        self._mode = stat.S_ISVTX | stat.S_ISGID | 0o700 | writers
        self._folder: int | None = None
        """Held open, and locked."""

    @contextmanager
    def opened(self) -> Iterator[int]:
        """The folder itself, whatever its name leads to a moment later; OSError: it cannot be had. One thread does this."""
        if self._folder is None or not self._is_still_there(self._folder):
            self.close()
            self._folder = self._take()
        yield self._folder

    def close(self) -> None:
        """Let another daemon have it."""
        if self._folder is not None:
            os.close(self._folder)
            self._folder = None

    def _take(self) -> int:
        self.path.mkdir(mode=0o700, exist_ok=True)
        folder = os.open(self.path, _FOLDER)
        try:
            _check_owner(folder)
            _lock(folder)
            if self._group_id is not None:
                os.fchown(folder, -1, self._group_id)
            os.fchmod(folder, self._mode)  # those that hold now: they may have been others when it was made
        except BaseException:
            os.close(folder)
            raise
        return folder

    def _is_still_there(self, folder: int) -> bool:
        try:
            return os.path.samestat(os.fstat(folder), self.path.lstat())
        except FileNotFoundError:  # somebody took it away
            return False


def _check_owner(folder: int) -> None:
    """Another user could take away or exchange what is in it."""
    owner = os.fstat(folder).st_uid
    if owner != os.geteuid():
        raise PermissionError(errno.EPERM, f"the folder is user {owner}'s, not the daemon's; remove it")


def _lock(folder: int) -> None:
    """Nobody else can: who may not list a folder may not open it so."""
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        text = "another daemon takes them; give this one a socket in a folder of its own"
        raise OSError(errno.EBUSY, text) from error
