"""A daemon's resident memory and CPU with 8 devices and 16 jobs, each a process that plays ten recorded minutes."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.bench.figures import Figure
from tests.e2e.processes import Machine, Service, recording

RUNS = (
    "islands_grow-4-5518",
    "varlen-1-2985",
    "leak-1-3771",
    "leak_small-1-3570",
    "longtail-1-7723",
    "neighbour_calm-2-7422",
    "steady-1-2216",
    "streams-2-3890",
)
"""Each lasts longer than ten minutes, and is played twice."""
DEVICES, JOBS = 8, 16
SPEED = 10.0
START_IN_S = 30.0
"""Until then all sixteen are ready: they begin together."""
AT_MINUTES = (1, 3, 6, 10)
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Reading:
    """A process at a moment."""

    resident_bytes: int
    cpu_s: float

    @classmethod
    def of(cls, pid: int) -> Reading:
        """By /proc."""
        stat = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        ticks = os.sysconf("SC_CLK_TCK")
        return cls(pages * os.sysconf("SC_PAGE_SIZE"), (int(stat[11]) + int(stat[12])) / ticks)


def figures(*, real_time: bool) -> Iterator[Figure]:
    """At 1, 3, 6 and 10 recorded minutes."""
    speed = 1.0 if real_time else SPEED
    with tempfile.TemporaryDirectory(prefix="as-") as folder:
        machine = Machine(Path(folder))
        try:
            collector = machine.collector()
            daemon = machine.daemon("n1", collector)
            before = Reading.of(daemon.process.pid)
            starts = time.time() + START_IN_S
            for number in range(JOBS):
                _play(machine, daemon, number, speed, starts)
            readings = {minute: _reading_at(daemon, starts + minute * 60 / speed) for minute in AT_MINUTES}
            machine.assert_all_could_play()
            sent = sum(_ingested(daemon).values())
        finally:
            machine.close()
    yield Figure("resident when started", [before.resident_bytes / MIB], "MiB")
    for minute, reading in readings.items():
        aim = "under 80, and flat" if minute == AT_MINUTES[-1] else ""
        yield Figure(f"resident after {minute} minutes", [reading.resident_bytes / MIB], "MiB", aim)
    spent = readings[AT_MINUTES[-1]].cpu_s - readings[AT_MINUTES[0]].cpu_s
    lasted = (AT_MINUTES[-1] - AT_MINUTES[0]) * 60 / speed
    yield Figure(
        f"CPU, at {speed:g} samples a second from each of {JOBS} jobs", [100 * spent / lasted], "% of one core"
    )
    yield Figure("samples taken", [sent], "")


def _play(machine: Machine, daemon: Service, number: int, speed: float, starts: float) -> None:
    path, job = recording(RUNS[number % len(RUNS)]), f"job-{number}"
    index = number % DEVICES
    where = ("--gpu-index", str(index), "--start-at", f"{starts:.6f}")
    machine.play(path, daemon, *where, job=job, speed=speed, uuid=f"GPU-{index}")


def _reading_at(daemon: Service, moment: float) -> Reading:
    threading.Event().wait(max(moment - time.time(), 0))
    return Reading.of(daemon.process.pid)


def _ingested(daemon: Service) -> dict[str, float]:
    lines = [
        line for line in daemon.get("/metrics").splitlines() if line.startswith("allocscope_samples_ingested_total")
    ]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}
