"""Which process is which: a job's process by its own pid, the driver's by the host's. All that is read of /proc is read here."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from allocscope.model.identity import Process

SLACK_US = 2_000_000
"""A process's start is known to a clock tick, by a boot time that is known to the second."""
AGAIN_US = 60_000_000
"""After which a process that is still there is read again: it may have taken another name or user, and the clock may have been set."""
LONGEST_READ_BYTES = 1 << 20
"""Of one file in /proc. A path of a cgroup has at most 4 KiB, a line of mountinfo some KiB."""
LONGEST_NAME = 64


@dataclass(frozen=True, slots=True)
class HostProcess:
    """A process as the daemon's /proc tells it."""

    pid: int
    own_pid: int | None = None
    """As it sees itself: in the innermost pid namespace."""
    started_us: int | None = None
    name: str | None = None
    uids: frozenset[int] = frozenset()
    """Real, effective, saved and of its files; empty: not known."""
    uid: int | None = None
    """The effective one, as this daemon's user namespace has it."""


class Procfs:
    """Looks processes up in /proc. Anybody may name a process as he likes and end it at any moment; nothing here raises."""

    def __init__(self, root: Path = Path("/proc")) -> None:
        self._root = os.fspath(root)
        self._ticks = os.sysconf("SC_CLK_TCK")
        self._boot_us: int | None = None
        self.read_boot()

    @property
    def hides_processes(self) -> bool:
        """Whether other users' processes are hidden from this daemon (hidepid), so that one it does not see may live all the same."""
        return self.read(1, "stat") is None

    def look_up(self, pid: int) -> HostProcess | None:
        """None: there is no such process, as far as this daemon can see."""
        stat, status = self.read(pid, "stat"), self.read(pid, "status")
        if stat is None or status is None:
            return None
        name, _, rest = stat.rpartition(")")
        values = rest.split()
        # The kernel writes a newline in a name as \n here, but no other character that ends a line to str.splitlines.
        told = dict(line.split(":", 1) for line in status.split("\n") if ":" in line)
        pids, uids = _numbers(told.get("NSpid", "")), _numbers(told.get("Uid", ""))
        return HostProcess(
            pid,
            pids[-1] if pids else None,
            self._started_us(values[19]) if len(values) > 19 else None,
            printable(name.partition("(")[2])[:LONGEST_NAME] or None,
            frozenset(uids),
            uids[1] if len(uids) > 1 else None,
        )

    def identity(self, pid: int) -> tuple[int, int] | None:
        """What changes when another process takes the pid, for a fraction of what reading costs; None: it is not to be seen.

        An inode of /proc is one process's: the kernel (pid_revalidate in fs/proc/base.c) makes another for whoever comes later.
        """
        try:
            found = os.stat(f"{self._root}/{pid}")  # noqa: PTH116 (a Path costs as much again)
        except OSError:
            return None
        return found.st_ino, found.st_ctime_ns

    def read(self, pid: int | str, name: str) -> str | None:
        """A file of a process, up to the last whole line where it is longer than LONGEST_READ_BYTES; None: not to be read."""
        return _text(_read(f"{self._root}/{pid}/{name}"), b"\n")

    def environ(self, pid: int, names: Collection[str]) -> dict[str, str]:
        """Those variables that a process began with, and no other is kept: an environment is full of secrets.

        Empty where it is not to be read, as of another user's process without root. Nor is it of one that waits in the kernel
        (state D): reading waits for the process's memory map then, and may do so for ever.
        """
        state = (self.read(pid, "stat") or "").rpartition(") ")[2][:1]
        if state in ("", "D"):
            return {}
        told = (
            entry.partition("=") for entry in (_text(_read(f"{self._root}/{pid}/environ"), b"\0") or "").split("\0")
        )
        return {name: value for name, _, value in told if name in names}

    def read_boot(self) -> None:
        """When the machine started, by its clock as it goes now: it may have been set."""
        for line in (_text(_read(f"{self._root}/stat"), b"\n") or "").split("\n"):
            if line.startswith("btime ") and _is_number(line[6:]):
                self._boot_us = int(line[6:]) * 1_000_000

    def _started_us(self, ticks: str) -> int | None:
        if self._boot_us is None or not _is_number(ticks):
            return None
        return self._boot_us + int(ticks) * 1_000_000 // self._ticks


@dataclass(slots=True)
class _Seen:
    identity: tuple[int, int]
    process: HostProcess
    read_us: int
    used_us: int


class Hosts:
    """The processes of a node as they were seen last: each is read when it is new, and once a minute; else only whether it is the same."""

    def __init__(self, procfs: Procfs) -> None:
        self._procfs = procfs
        self._now_us, self._boot_read_us = 0, 0
        self._seen: dict[int, _Seen] = {}
        self._absent: set[int] = set()

    def begin(self, now_us: int) -> None:
        """A new round: who was not looked up in the last one is forgotten."""
        self._seen = {pid: seen for pid, seen in self._seen.items() if seen.used_us == self._now_us}
        self._absent.clear()
        self._now_us = now_us
        if not 0 <= now_us - self._boot_read_us < AGAIN_US:
            self._boot_read_us = now_us
            self._procfs.read_boot()

    def look_up(self, pid: int) -> HostProcess | None:
        """As Procfs.look_up, at most once a round; a process is the same object for as long as nothing of it changed."""
        seen = self._seen.get(pid)
        if seen is not None and seen.used_us == self._now_us:
            return seen.process
        if pid in self._absent:
            return None
        identity = self._procfs.identity(pid)
        is_same_one = seen is not None and seen.identity == identity
        if seen is not None and is_same_one and 0 <= self._now_us - seen.read_us < AGAIN_US:
            seen.used_us = self._now_us
            return seen.process
        process = self._procfs.look_up(pid) if identity is not None else None
        if identity is None or process is None or self._procfs.identity(pid) != identity:  # it went while it was read
            self._seen.pop(pid, None)
            self._absent.add(pid)
            return None
        if seen is not None and is_same_one and seen.process == process:
            process = seen.process
        self._seen[pid] = _Seen(identity, process, self._now_us, self._now_us)
        return process


def is_same(host: HostProcess, process: Process) -> bool:
    """Whether a host's process can be the one with this probe: the same pid in its own eyes, and there before its probe."""
    if host.own_pid != process.pid:
        return False
    return host.started_us is None or host.started_us <= process.started_us + SLACK_US


def join(
    pids: Iterable[int], processes: Iterable[Process], look_up: Callable[[int], HostProcess | None]
) -> dict[int, str]:
    """Which of the driver's pids is which process: where two could be it (pid 7 in two containers), the one that started last
    before the probe.
    """
    by_own_pid: dict[int | None, list[HostProcess]] = {}
    for pid in pids:
        host = look_up(pid) or HostProcess(pid, own_pid=pid)
        by_own_pid.setdefault(host.own_pid, []).append(host)
    joined: dict[int, str] = {}
    for process in processes:
        candidates = by_own_pid.get(process.pid, ())
        fitting = [host for host in candidates if host.pid not in joined and is_same(host, process)]
        if fitting:
            joined[max(fitting, key=lambda host: host.started_us or 0).pid] = process.process_id
    return joined


def printable(text: str) -> str:
    """Without what could move a terminal's cursor or break a line."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def _read(path: str) -> bytes | None:
    """Without O_NONBLOCK a named pipe, as in a tree that somebody made, would be waited for."""
    whole = b""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            while len(whole) < LONGEST_READ_BYTES and (part := os.read(file, LONGEST_READ_BYTES - len(whole))):
                whole += part
        finally:
            os.close(file)
    except OSError:
        return None
    return whole


def _text(told: bytes | None, end: bytes) -> str | None:
    """Of what was cut off in the middle of something, all before that."""
    if told is None:
        return None
    if len(told) == LONGEST_READ_BYTES:
        told = told[: told.rfind(end) + 1]
    return told.decode("utf-8", "replace")


def _numbers(text: str) -> list[int]:
    return [int(word) for word in text.split() if _is_number(word)]


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= 20
