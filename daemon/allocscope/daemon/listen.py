"""The unix socket that jobs connect to: who may, and what becomes of one that is there already."""

from __future__ import annotations

import grp
import os
import socket
import stat
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import structlog

from allocscope.daemon.errors import GroupError, SocketError

LONGEST_SOCKET_PATH = 107
"""sockaddr_un.sun_path, its closing NUL left out."""
BACKLOG = 1024
"""Connections that wait to be taken: those of a node's jobs may come at once, and a probe that finds no room tries again only later."""
AGAIN_S = 10.0
"""After an attempt to listen anew that failed."""

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Listener:
    """A socket that listens, and its name in the file system."""

    socket: socket.socket
    path: Path
    file: tuple[int, int]
    """Device and inode."""

    @property
    def is_there(self) -> bool:
        """Whether the name is still this socket's."""
        try:
            found = self.path.lstat()
        except OSError:
            return False
        return (found.st_dev, found.st_ino) == self.file

    def unlink(self) -> None:
        """Take the name away, unless it is another's by now."""
        with suppress(OSError):
            if self.is_there:
                self.path.unlink()


class JobsSocket:
    """The socket for as long as the daemon runs. Whoever takes its name away (somebody who tidies up /run) takes it from jobs that
    start later: it is made anew.
    """

    def __init__(
        self,
        path: Path,
        serve: Callable[[socket.socket], Awaitable[None]],
        *,
        group: str | None = None,
        mode: int = 0o660,
    ) -> None:
        """`serve` serves who connects to a socket, in place of the one before."""
        self._path, self._serve, self._group, self._mode = path, serve, group, mode
        self._listener: Listener | None = None
        self._again_s = 0.0
        self._problem = ""

    async def open(self) -> None:
        """Listen; SocketError, GroupError."""
        self._listener = None
        listener = listen(self._path, group=self._group, mode=self._mode)
        await self._serve(listener.socket)
        self._listener = listener

    async def look_after(self, now_s: float) -> None:
        """Listen anew where its name is gone, or is another's. Never raises; `now_s`: any clock that only goes forward."""
        if (self._listener is not None and self._listener.is_there) or now_s < self._again_s:
            return
        try:
            await self.open()
        except (SocketError, GroupError) as error:
            self._again_s = now_s + AGAIN_S
            if str(error) != self._problem:
                log.error("jobs that start now find no daemon", why=str(error))
            self._problem = str(error)
        else:
            self._problem = ""
            log.warning("somebody took the jobs' socket away; it is made anew", socket=os.fspath(self._path))

    def unlink(self) -> None:
        """Take its name away."""
        if self._listener is not None:
            self._listener.unlink()


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
        except (BlockingIOError, TimeoutError) as error:  # as many wait as may (unix(7), EAGAIN)
            raise SocketError(path, "another daemon listens there, and takes no connection: is it stopped?") from error
    raise SocketError(path, "another daemon listens there")
