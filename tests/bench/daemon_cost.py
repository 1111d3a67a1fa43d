"""What a daemon costs a node with 8 devices and 16 jobs: CPU at their real pace, memory over an hour and over a thousand jobs."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from tests.bench.daemon_feeder import DEVICES, JOBS
from tests.bench.figures import Figure
from tests.e2e.processes import Machine, Service, until
from tests.gpuless import install
from tests.gpuless.rig import Device as RigDevice
from tests.gpuless.rig import Rig
from tests.needs import REPO

START_IN_S = 20.0
"""Until then all sixteen are ready: they begin together."""
SETTLES_S, REAL_S = 10.0, 60.0
HOUR_IN_S = 60.0
AT_MINUTES = (5, 20, 40, 60)
CHURNED_BEFORE, CHURNED = 100, 1000
NO_PID = 1 << 22
"""No process has it, nor one above (proc(5), pid_max): the daemon looks, and finds nothing."""
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Reading:
    """A process at a moment."""

    resident_bytes: int
    cpu_s: float
    descriptors: int

    @classmethod
    def of(cls, pid: int) -> Reading:
        """By /proc."""
        stat = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        ticks = os.sysconf("SC_CLK_TCK")
        descriptors = sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())
        return cls(pages * os.sysconf("SC_PAGE_SIZE"), (int(stat[11]) + int(stat[12])) / ticks, descriptors)


def figures() -> Iterator[Figure]:
    """A minute, an hour in a minute, a thousand jobs; each with a daemon of its own."""
    yield from _at_real_pace(with_nvml=False)
    if install.is_complete():
        yield from _at_real_pace(with_nvml=True)
    yield from _over_an_hour()
    yield from _over_many_jobs()


def _at_real_pace(*, with_nvml: bool) -> Iterator[Figure]:
    """NVML is the stand-in of `tests/gpuless`: what its binding and the daemon take is real, what a driver takes is not in it."""
    with _pretended_nvml() if with_nvml else nullcontext(()) as options, _daemon(*options) as daemon:
        starts = time.time() + START_IN_S
        feeder = feed(daemon, "play", starts, SETTLES_S + REAL_S + 2, 1)
        before = _at(daemon, starts + SETTLES_S)
        after = _at(daemon, starts + SETTLES_S + REAL_S)
        feeder.wait()
    share = 100 * (after.cpu_s - before.cpu_s) / REAL_S
    how = "with a pretended NVML" if with_nvml else "NVML switched off"
    yield Figure(f"CPU, {JOBS} jobs at 1 Hz on {DEVICES} devices, {how}", [share], "% of one core", "under 1")
    yield Figure("resident then", [after.resident_bytes / MIB], "MiB", "under 80")


def _over_an_hour() -> Iterator[Figure]:
    speed = 3600 / HOUR_IN_S
    with _daemon() as daemon:
        starts = time.time() + START_IN_S
        feeder = feed(daemon, "play", starts, HOUR_IN_S + 2, speed)
        readings = {minute: _at(daemon, starts + minute * 60 / speed) for minute in AT_MINUTES}
        feeder.wait()
        taken = _figure(daemon, "allocscope_samples_ingested_total")
    for minute, reading in readings.items():
        aim = "as after 5" if minute == AT_MINUTES[-1] else ""
        yield Figure(f"resident after {minute} minutes, {speed:g} times as fast", [_mib(reading)], "MiB", aim)
    yield Figure("samples taken in that hour", [taken], "")


def _over_many_jobs() -> Iterator[Figure]:
    with _daemon("--gone-after-s", "1") as daemon:
        _churn(daemon, CHURNED_BEFORE)
        before, text_before = _at(daemon, time.time()), len(daemon.get("/metrics"))
        _churn(daemon, CHURNED)
        after, text_after = _at(daemon, time.time()), len(daemon.get("/metrics"))
    yield Figure(f"resident after {CHURNED_BEFORE} jobs that began and ended", [_mib(before)], "MiB")
    yield Figure(f"resident after {CHURNED} more", [_mib(after)], "MiB", "as before")
    yield Figure("/metrics, bytes more", [text_after - text_before], "", "digits only")
    yield Figure("descriptors more", [after.descriptors - before.descriptors], "", "0")


def _churn(daemon: Service, jobs: int) -> None:
    """Returns once all are gone from /metrics."""
    feeder = feed(daemon, "churn", jobs)
    assert feeder.wait() == 0
    until(lambda: "job-" not in daemon.get("/metrics"), "the last job is gone from /metrics")


@contextmanager
def _pretended_nvml() -> Iterator[tuple[str, ...]]:
    """The jobs' devices as NVML has them, each with two processes on it; yields what a daemon is to be told."""
    with tempfile.TemporaryDirectory(prefix="as-") as folder:
        rig = Rig(Path(folder), [RigDevice(uuid=f"GPU-{index}") for index in range(DEVICES)])
        for number in range(JOBS):
            rig.make_up(NO_PID + number, MIB << 10, number % DEVICES)
        before = os.environ.copy()
        os.environ.update(rig.nvml_settings)
        try:
            yield ("--nvml", "true")
        finally:
            os.environ.clear()
            os.environ.update(before)


@contextmanager
def _daemon(*options: str) -> Iterator[Service]:
    with tempfile.TemporaryDirectory(prefix="as-") as folder:
        machine = Machine(Path(folder))
        try:
            yield machine.daemon("n1", machine.collector(), *options)
        finally:
            machine.close()


def feed(daemon: Service, *what: object) -> subprocess.Popen[bytes]:
    """A process that is the daemon's jobs (`daemon_feeder`)."""
    name, *numbers = what
    command = (str(name), str(daemon.addresses["socket"]), *map(str, numbers))
    return subprocess.Popen([sys.executable, "-m", "tests.bench.daemon_feeder", *command], cwd=REPO)


def _at(daemon: Service, moment: float) -> Reading:
    threading.Event().wait(max(moment - time.time(), 0))
    return Reading.of(daemon.process.pid)


def _mib(reading: Reading) -> float:
    return reading.resident_bytes / MIB


def _figure(daemon: Service, name: str) -> float:
    lines = (line for line in daemon.get("/metrics").splitlines() if line.startswith(name + " "))
    return float(next(lines).rpartition(" ")[2])
