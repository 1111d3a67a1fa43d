"""What replaying a recorded history costs, the whole command: eight settings over 250,000 requests, and a million entries' memory."""

from __future__ import annotations

import gzip
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from allocscope.allocator.recording import read_recording
from allocscope.allocator.settings import AllocatorSettings
from allocscope.allocator.simulator import Device, Simulator
from allocscope.allocator.simulator.sources import source_of
from allocscope.allocator.simulator.what_if import script_of
from allocscope.allocator.snapshot import TraceEntry
from tests.allocator.made import SHIPPED, as_pytorch_writes
from tests.bench.figures import Figure

RUN = SHIPPED / "varlen-1-3372.run.json"
REQUESTS, ENTRIES = 250_000, 1_000_000
TIMES = 2
MIB = 1 << 20
CONFS = (
    "expandable_segments:True",
    "expandable_segments:True,roundup_power2_divisions:8",
    "max_split_size_mb:64",
    "max_split_size_mb:128",
    "max_split_size_mb:512",
    "roundup_power2_divisions:4",
    "roundup_power2_divisions:8",
    "large_segment_size_mb:64",
)


def figures() -> Iterator[Figure]:
    """Seconds by the clock, and memory as the kernel tells it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "requests.pickle.gz"
        write(path, requests=REQUESTS)
        runs = [_replay(path, CONFS) for _ in range(TIMES)]
        what = "eight settings and the recorded one over 250,000 requests, the whole command"
        yield Figure(what, [run.wall_s for run in runs], "s", "under 8")
        yield Figure(
            "  CPU time of its own process and of its busiest worker together", [run.path_s for run in runs], "s"
        )
        yield Figure("the recorded one alone", [_replay(path, ()).wall_s for _ in range(TIMES)], "s")
        write(path, requests=ENTRIES * 2 // 3)
        run = _replay(path, CONFS[:1])
        yield Figure("two settings over a million entries", [run.wall_s], "s")
        yield Figure("  memory at most, the largest process", [max(run.peaks_bytes) / MIB], "MiB", "under 1,536")
        yield Figure("  memory at most, all processes", [sum(run.peaks_bytes) / MIB], "MiB")


@dataclass(frozen=True, slots=True)
class Run:
    """One run of the command."""

    wall_s: float
    path_s: float
    """What it would take, about, with a processor for each of its processes: its own CPU time, and its busiest worker's."""
    peaks_bytes: tuple[int, ...]
    """Of resident memory, of each process."""


def _replay(path: Path, confs: tuple[str, ...]) -> Run:
    words = [word for conf in confs for word in ("--conf", conf)]
    command = [sys.executable, "-m", "allocscope.cli", "replay", str(path), "--device-total", "24GiB", "--json", *words]
    began = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        peaks: dict[int, int] = {}
        cpu_s: dict[int, float] = {}
        while process.poll() is None:
            for pid in (process.pid, *_descendants(process.pid)):
                peaks[pid] = max(peaks.get(pid, 0), _peak_bytes(pid))
                cpu_s[pid] = max(cpu_s.get(pid, 0.0), _cpu_s(pid))
            time.sleep(0.05)
    if process.returncode:
        raise SystemExit(f"allocscope replay ended with {process.returncode}")
    own = cpu_s.pop(process.pid)
    return Run(time.monotonic() - began, own + max(cpu_s.values(), default=0.0), tuple(peaks.values()))


def _cpu_s(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _descendants(pid: int) -> Iterator[int]:
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return
    for child in map(int, children):
        yield child
        yield from _descendants(child)


def _peak_bytes(pid: int) -> int:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmHWM:")), 0)


def write(path: Path, *, requests: int) -> None:
    """A snapshot whose history is a recorded run's requests, again and again, as the allocator would have written it."""
    history, script = script_of(source_of(read_recording(RUN)))
    simulator = Simulator(AllocatorSettings(), Device(script.device_total_bytes * 4), trace=True)
    made = 0
    while made < requests:
        live: dict[int, int] = {}
        for each in history.asked[: requests - made]:
            made += 1
            if each.what == "malloc":
                live[each.key] = simulator.malloc(each.size, each.stream)
            elif each.what == "free":
                simulator.free(live.pop(each.key))
        for address in live.values():
            simulator.free(address)
    snapshot = {
        "segments": simulator.segments(),
        "device_traces": [as_pytorch_writes(_stamped(simulator.trace))],
        "allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": ""},
    }
    with gzip.open(path, "wb", compresslevel=1) as file:
        pickle.dump(snapshot, file)


def _stamped(trace: list[TraceEntry]) -> Iterator[TraceEntry]:
    return (entry._replace(time_us=1_700_000_000_000_000 + 10 * at) for at, entry in enumerate(trace))
