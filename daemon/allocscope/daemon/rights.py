"""What a daemon may not, and what is lost by that; and who could come between it and its jobs. No root is needed, but it is not nothing."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from allocscope.daemon.procfs import Procfs

SYS_PTRACE = 19
"""CAP_SYS_PTRACE (linux/capability.h), with which other users' environments may be read."""
ROOT = 0


def what_is_lost(procfs: Procfs, kubelet_socket: Path, pid: int | str = "self") -> tuple[str, ...]:
    """For want of which right a daemon cannot tell what, in sentences; empty: nothing, or its process is not to be seen."""
    status = dict(line.split(":", 1) for line in (procfs.read(pid, "status") or "").split("\n") if ":" in line)
    uids, capabilities = status.get("Uid", "").split(), status.get("CapEff", "").strip()
    if len(uids) < 2 or not capabilities:
        return ()
    uid, lost = int(uids[1]), []
    if not int(capabilities, 16) >> SYS_PTRACE & 1:
        lost.append(
            "without root or CAP_SYS_PTRACE the environments of other users' processes are closed:"
            " a Slurm job that has no cgroup of its own is not known by its number, and an exec into a pod not by its host name"
        )
    if procfs.hides_processes:
        lost.append(
            "other users' processes are hidden in /proc (hidepid): they have no name, no owner and no pid,"
            " a job's connection is held against its user alone, and its end shows late"
        )
    if not _may_write(kubelet_socket, uid):
        lost.append(f"{kubelet_socket} is closed to it: pods have the names only that the kubelet's log folders tell")
    return tuple(lost)


def folder_risk(socket: Path, uid: int) -> str | None:
    """Who else could put a socket in the place of a daemon's that runs as `uid`; None: nobody, or it cannot be looked at."""
    try:
        found = socket.parent.stat()
    except OSError:
        return None
    sticky, mode = found.st_mode & stat.S_ISVTX, f"mode {stat.S_IMODE(found.st_mode):04o}"
    if found.st_uid not in (ROOT, uid):
        return f"{socket.parent} is user {found.st_uid}'s, who could put another socket in the daemon's place"
    if found.st_mode & 0o002 and not sticky:
        return (
            f"every user may write to {socket.parent} ({mode}), and so could put another socket in the daemon's place"
        )
    if found.st_mode & 0o020 and not sticky:
        text = f"the group {found.st_gid} may write to {socket.parent} ({mode}), and so could put another socket"
        return f"{text} in the daemon's place"
    return None


def _may_write(socket: Path, uid: int) -> bool:
    """Also where there is none; by owner and others, since sockets like that have no group to speak of."""
    try:
        found = os.stat(socket)  # noqa: PTH116
    except FileNotFoundError:
        return True
    except OSError:
        return uid == ROOT
    return uid in (ROOT, found.st_uid) or bool(found.st_mode & 0o002)
