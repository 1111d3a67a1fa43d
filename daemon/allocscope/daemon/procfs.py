"""Which process is which: a job's process by its own pid, the driver's by the host's."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from allocscope.model.identity import Process

SLACK_US = 2_000_000
"""A process's start is known to a clock tick, by a boot time that is known to the second."""


@dataclass(frozen=True, slots=True)
class HostProcess:
    """A process as the daemon's /proc tells it."""

    pid: int
    own_pid: int | None = None
    """As it sees itself: in the innermost pid namespace."""
    started_us: int | None = None
    name: str | None = None


class Procfs:
    """Looks processes up in /proc."""

    def __init__(self, root: Path = Path("/proc")) -> None:
        self._root = root
        self._boot_us = self._read_boot_us()
        self._ticks = os.sysconf("SC_CLK_TCK")

    def look_up(self, pid: int) -> HostProcess | None:
        """None: there is no such process, as far as this daemon can see."""
        try:
            stat = (self._root / str(pid) / "stat").read_text(errors="replace")
            status = (self._root / str(pid) / "status").read_text(errors="replace")
        except OSError:
            return None
        name, _, rest = stat.rpartition(")")
        values = rest.split()
        pids = next((line.split()[1:] for line in status.splitlines() if line.startswith("NSpid:")), [])
        started_us = None
        if self._boot_us is not None and len(values) > 19:
            started_us = self._boot_us + int(values[19]) * 1_000_000 // self._ticks
        return HostProcess(pid, int(pids[-1]) if pids else None, started_us, name.partition("(")[2] or None)

    def _read_boot_us(self) -> int | None:
        try:
            lines = (self._root / "stat").read_text().splitlines()
        except OSError:
            return None
        return next((int(line.split()[1]) * 1_000_000 for line in lines if line.startswith("btime ")), None)


def is_same(host: HostProcess, process: Process) -> bool:
    """Whether a host's process can be the one with this probe: the same pid in its own eyes, and there before its probe."""
    if host.own_pid != process.pid:
        return False
    return host.started_us is None or host.started_us <= process.started_us + SLACK_US


def join(pids: Iterable[int], processes: Iterable[Process], procfs: Procfs) -> dict[int, str]:
    """Which of the driver's pids is which process: where two could be it (pid 7 in two containers), the one that started last
    before the probe.
    """
    hosts = [procfs.look_up(pid) or HostProcess(pid, own_pid=pid) for pid in pids]
    joined: dict[int, str] = {}
    for process in processes:
        fitting = [host for host in hosts if host.pid not in joined and is_same(host, process)]
        if fitting:
            joined[max(fitting, key=lambda host: host.started_us or 0).pid] = process.process_id
    return joined
