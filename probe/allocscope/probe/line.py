"""A connection to a unix socket: written and read without ever blocking a writer, and waited on by one thread that others may wake."""

from __future__ import annotations

import grp
import select
import socket as sockets
import stat
from contextlib import suppress
from pathlib import Path

from allocscope.probe.call import CallBroken

LONGEST_READ = 1 << 16


class Line:
    """`write`, then `wait`; `wake` comes from other threads. OSError or ValueError: nobody listens at `path`, or it cannot be a name."""

    def __init__(self, path: str) -> None:
        self._socket = sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM)
        self._wakes, self._woken = sockets.socketpair()
        self._is_woken = False
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)
        self._poll.register(self._woken, select.POLLIN)
        try:
            for each in (self._socket, self._wakes, self._woken):
                each.setblocking(False)
            self._socket.connect(path)
        except (OSError, ValueError):
            self.close()
            raise

    def close(self) -> None:
        """Hang up."""
        for each in (self._socket, self._wakes, self._woken):
            each.close()

    def wake(self) -> None:
        """Have `wait` come back, now or the next time it is called."""
        if not self._is_woken:
            self._is_woken = True
            with suppress(OSError):
                self._wakes.send(b"\0")

    def write(self, outgoing: bytearray) -> None:
        """Write what the socket takes of it, and take that off."""
        with suppress(BlockingIOError):
            while outgoing:
                del outgoing[: self._socket.send(outgoing)]

    def wait(self, *, for_room: bool) -> bytes:
        """What was read; nothing where it was woken, or where `for_room` was asked for and there is some. CallBroken: it hung up."""
        self._poll.modify(self._socket, select.POLLIN | select.POLLOUT if for_room else select.POLLIN)
        ready = dict(self._poll.poll())
        if self._woken.fileno() in ready:
            self._woken.recv(16)
            self._is_woken = False
        if not ready.get(self._socket.fileno(), 0) & ~select.POLLOUT:
            return b""
        data = self._socket.recv(LONGEST_READ)
        if not data:
            raise CallBroken("it hung up")
        return data


def who_may(socket: str, refusal: PermissionError) -> str:
    """Why a socket may not be opened, and whose members may."""
    try:
        found = Path(socket).stat()
    except OSError:
        return f"{refusal.strerror}, in a folder on the way to it"
    try:
        group = grp.getgrgid(found.st_gid).gr_name
    except KeyError:
        group = str(found.st_gid)
    return f"{refusal.strerror}; its mode is {stat.filemode(found.st_mode)}, its group {group}"
