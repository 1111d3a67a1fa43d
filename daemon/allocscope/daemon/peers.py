"""Whose a connection to the jobs' socket is, as the kernel tells: what a process says of itself is held against it."""

from __future__ import annotations

import errno
import os
import select
import socket
import struct
import sys
from dataclasses import dataclass
from typing import Protocol

from allocscope.daemon.procfs import HostProcess, Procfs

CREDENTIALS = struct.Struct("iII")
"""struct ucred (unix(7)): pid, uid, gid."""
SO_PEERPIDFD = 77
"""Linux 6.5, asm-generic/socket.h; Python's socket module does not have it yet."""


class Connected(Protocol):
    """A socket, or asyncio's view of one."""

    def getsockopt(self, level: int, name: int, buflen: int, /) -> bytes:
        """As of a socket."""
        ...


@dataclass(frozen=True, slots=True)
class Peer:
    """The process that connected, as it was when it did."""

    uid: int
    """As this daemon's user namespace has it; what that does not map is the overflow user, 65534."""
    gid: int
    pid: int | None = None
    """In this daemon's pid namespace; None: it is in another, and the kernel does not tell."""
    host: HostProcess | None = None
    """What /proc tells of it; None: it is hidden, or has ended already."""
    start_ticks: int | None = None
    """When it started, clock ticks since the machine's start: with the pid never two processes', whatever becomes of the clock."""

    @property
    def own_pid(self) -> int | None:
        """Its pid in its own eyes; None: not known."""
        return self.host.own_pid if self.host else None

    @property
    def uids(self) -> frozenset[int]:
        """Whose its files may be."""
        return (self.host.uids if self.host else frozenset()) | {self.uid}

    def may_be(self, other: Peer) -> bool:
        """Whether two connections can be one process's: by pid and start, where the kernel tells; else by user."""
        if self.pid is not None and other.pid is not None:
            both_known = self.start_ticks is not None and other.start_ticks is not None
            return self.pid == other.pid and (not both_known or self.start_ticks == other.start_ticks)
        return self.uid == other.uid


class Peers:
    """Asks the kernel."""

    def __init__(self, procfs: Procfs) -> None:
        self._procfs = procfs
        self._is_our_proc = (procfs.read("self", "stat") or "").split(" ", 1)[0] == str(os.getpid())

    @property
    def problem(self) -> str | None:
        """Why no process can be looked up; None: it can, unless it is in another pid namespace, or hidden."""
        if self._is_our_proc:
            return None
        return "/proc is of another pid namespace than this daemon, or is not there"

    def of(self, connection: Connected) -> Peer:
        """Whose a connection to a unix socket is; OSError: it is over."""
        raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
        pid, uid, gid = CREDENTIALS.unpack(raw)
        if pid <= 0:
            return Peer(uid, gid)
        if not self._is_our_proc:
            return Peer(uid, gid, pid)
        host, ticks = self._procfs.look_up(pid), self._start_ticks(pid)
        if _has_ended(connection):  # then what was read may be of another process, which was given its number
            return Peer(uid, gid, pid)
        return Peer(uid, gid, pid, host, ticks)

    def is_alive(self, peer: Peer) -> bool | None:
        """Whether the process is still there; None: that cannot be told."""
        if peer.pid is None or peer.start_ticks is None:
            return None
        ticks = self._start_ticks(peer.pid)
        if ticks is None and self._procfs.identity(peer.pid) is not None:  # as where no descriptor is left
            return None
        return ticks == peer.start_ticks

    def uids(self, peer: Peer) -> frozenset[int]:
        """Whose its files may be: those that it ran under when it connected, and runs under now."""
        now = self._procfs.look_up(peer.pid) if peer.pid is not None and self.is_alive(peer) else None
        return peer.uids | (now.uids if now is not None else frozenset())

    def _start_ticks(self, pid: int) -> int | None:
        """proc_pid_stat(5), the 22nd value; the second, in brackets, may hold anything."""
        values = (self._procfs.read(pid, "stat") or "").rpartition(")")[2].split()
        return int(values[19]) if len(values) > 19 and values[19].isdigit() else None


def _has_ended(connection: Connected) -> bool:
    """Whether the process that connected is known to have ended; a kernel before 6.5 does not tell, and nothing is known."""
    try:
        pidfd = int.from_bytes(connection.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD, 4), sys.byteorder)
    except OSError as error:
        return error.errno in (errno.EINVAL, errno.ESRCH)  # as for a process that is there no more
    try:
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        return bool(poll.poll(0))
    finally:
        os.close(pidfd)
