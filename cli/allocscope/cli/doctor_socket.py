"""The daemon's socket as its jobs meet it: who listens, and who may connect."""

from __future__ import annotations

import errno
import grp
import os
import pwd
import socket
import stat
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from allocscope.cli.doctor_findings import Finding, State

ABOUT = "daemon"
NOBODY = ("ENOENT", "ECONNREFUSED")
"""Problems by which there is no daemon."""
_START = "start it: `allocscope daemon`, or the service of that name; `--socket` or `--config` name another place"


@dataclass(frozen=True, slots=True)
class SocketSight:
    """The jobs' socket."""

    path: Path
    problem: str | None = None
    """An errno's name, or not_a_socket; None: somebody listens."""
    mode: int | None = None
    owner: str | None = None
    group: str | None = None
    pid: int | None = None
    """Of who listens; 0: in another pid namespace."""


def socket_finding(seen: SocketSight) -> Finding:
    """Whether somebody listens, and who may report."""
    facts = {"socket": os.fspath(seen.path), "pid": seen.pid}
    rights = f"{seen.mode or 0:04o} {seen.owner}:{seen.group}"
    if seen.problem == "EACCES" and seen.mode is None:
        text = f"you may not look into {seen.path.parent}, and neither may your jobs"
        return Finding(
            ABOUT, State.WRONG, text, "let the jobs' users into that folder, or name a socket elsewhere", facts
        )
    if seen.problem is None:
        by = f"pid {seen.pid} listens" if seen.pid else "somebody in another pid namespace listens"
        return Finding(
            ABOUT, State.WELL, f"{by} for jobs on {seen.path}; {_who_may(seen)} may report ({rights})", facts=facts
        )
    text, remedy = {
        "ENOENT": (f"no daemon: there is no socket {seen.path}", _START),
        "ECONNREFUSED": (f"no daemon: it left its socket {seen.path}, and nobody listens there", _START),
        "not_a_socket": (f"{seen.path} is no socket", "remove it, or name another by --socket"),
        "EACCES": (
            f"you may not connect to {seen.path} ({rights}), and neither may your jobs",
            f"join the group {seen.group}, or give the daemon --socket-group or --socket-mode",
        ),
    }.get(seen.problem, (f"{seen.path} cannot be connected to: {seen.problem}", _START))
    return Finding(ABOUT, State.WRONG, text, remedy, facts)


def _who_may(seen: SocketSight) -> str:
    mode = seen.mode or 0
    if mode & 0o002:
        return "every user"
    return f"{seen.owner} and the group {seen.group}" if mode & 0o020 else f"only {seen.owner}"


def look_at_socket(path: Path, within_s: float) -> SocketSight:
    """Connects, and says nothing."""
    try:
        found = path.stat()
    except OSError as error:
        return SocketSight(path, _name(error))
    about: dict[str, Any] = {
        "mode": stat.S_IMODE(found.st_mode),
        "owner": _user(found.st_uid),
        "group": _group(found.st_gid),
    }
    if not stat.S_ISSOCK(found.st_mode):
        return SocketSight(path, "not_a_socket", **about)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as attempt:
        attempt.settimeout(within_s)
        try:
            attempt.connect(os.fspath(path))
            peer = attempt.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        except OSError as error:
            return SocketSight(path, _name(error), **about)
    return SocketSight(path, pid=struct.unpack("3i", peer)[0], **about)


def _name(error: OSError) -> str:
    if isinstance(error, TimeoutError):
        return "it does not take the connection"
    return errno.errorcode.get(error.errno or 0, str(error))


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _group(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)
