"""The unix socket that jobs connect to: who may, and what becomes of one that is there already."""

from __future__ import annotations

import grp
import os
import socket
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from allocscope.daemon.errors import GroupError, SocketError

LONGEST_SOCKET_PATH = 107
"""sockaddr_un.sun_path, its closing NUL left out."""
BACKLOG = 1024
"""Connections that wait to be taken: those of a node's jobs may come at once, and a probe that finds no room tries again only later."""


@dataclass(frozen=True, slots=True)
class Listener:
    """A socket that listens, and its name in the file system."""

    socket: socket.socket
    path: Path
    file: tuple[int, int]
    """Device and inode."""

    def unlink(self) -> None:
        """Take the name away, unless it is another's by now."""
        with suppress(OSError):
            found = self.path.lstat()
            if (found.st_dev, found.st_ino) == self.file:
                self.path.unlink()


def listen(path: Path, *, group: str | None = None, mode: int = 0o660) -> Listener:
    """A socket there; one that a dead daemon left is replaced. Who may report is who may write to it.

    Nobody can connect before its rights are what they are to be, whatever the umask is. SocketError, GroupError.
    """
    group_id = find_group(group) if group else None
    if len(os.fsencode(path)) > LONGEST_SOCKET_PATH:
        raise SocketError(path, f"the path is longer than {LONGEST_SOCKET_PATH} bytes, the system's limit")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _clear(path)
        os.fchmod(
            listener.fileno(), 0o600
        )  # unix(7) on Linux: bind gives the file the socket's own mode, less the umask
        listener.bind(os.fspath(path))
        file = _give(path, group, group_id, mode)
        listener.listen(BACKLOG)
    except BaseException as error:
        listener.close()
        if isinstance(error, FileExistsError | NotADirectoryError):
            raise SocketError(path, f"{path.parent} is no folder") from error
        if isinstance(error, OSError):
            raise SocketError(path, error.strerror or str(error)) from error
        raise
    listener.setblocking(False)
    return Listener(listener, path, file)


def find_group(group: str) -> int:
    """A group's number, by its name or number; GroupError: there is no such group."""
    if group.isascii() and group.isdigit():
        return int(group)
    try:
        return grp.getgrnam(group).gr_gid
    except KeyError as error:
        raise GroupError(group, "there is no such group") from error


def _give(path: Path, group: str | None, group_id: int | None, mode: int) -> tuple[int, int]:
    """Set its rights; the file itself, not what its name leads to by then: others may write to the folder."""
    file = os.open(path, os.O_PATH | os.O_NOFOLLOW)
    try:
        found = os.fstat(file)
        if not stat.S_ISSOCK(found.st_mode) or found.st_uid != os.geteuid():
            raise SocketError(path, "somebody else put something in its place; the folder is open to others")
        opened = f"/proc/self/fd/{file}"
        if group and group_id is not None:
            try:
                os.chown(opened, -1, group_id)
            except (OSError, OverflowError) as error:
                path.unlink(missing_ok=True)
                raise GroupError(group, getattr(error, "strerror", None) or str(error)) from error
        os.chmod(opened, mode)  # noqa: PTH101 (an open file)
        return found.st_dev, found.st_ino
    finally:
        os.close(file)


def _clear(path: Path) -> None:
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise SocketError(path, "there is a file of that name, which is no socket")
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as attempt:
        attempt.settimeout(2)
        try:
            attempt.connect(os.fspath(path))
        except (ConnectionRefusedError, FileNotFoundError):
            path.unlink(missing_ok=True)
            return
    raise SocketError(path, "another daemon listens there")
