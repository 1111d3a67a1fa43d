"""What it costs a daemon to say whose the processes on its devices are: real processes in the real /proc, CPU time of each round."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager

from allocscope.daemon.devices import Devices
from allocscope.daemon.kubelet import Kubelet
from allocscope.daemon.node import Node
from allocscope.daemon.nvml import NvmlRound
from allocscope.daemon.nvml_device import NvmlDevice, NvmlProcess
from allocscope.daemon.owners import Owners
from allocscope.daemon.procfs import Procfs
from tests.bench.figures import Figure

ROUNDS, DEVICES = 30, 8
SECOND_US = 1_000_000
STARTED_US = 1_700_000_000 * SECOND_US


def figures() -> Iterator[Figure]:
    """Of a node as the daemon's aims have it, and of one with very many processes."""
    for count, aim in ((16, ""), (1000, "under 10 ms")):
        with _processes(count) as pids:
            yield from _figures(pids, aim)


def _figures(pids: list[int], aim: str) -> Iterator[Figure]:
    procfs = Procfs()
    owners = Owners(procfs, Kubelet())
    devices = Devices(Node(), procfs, owners)
    latest = NvmlRound(tuple(_device(index, pids[index::DEVICES]) for index in range(DEVICES)))
    what = f"{len(pids)} processes on {DEVICES} devices"
    yield Figure(f"{what}: the first round", [_ms(lambda: devices.read(latest, STARTED_US))], "ms")
    yield Figure(f"{what}: their owners, once and in a thread", [_ms(lambda: owners.look(0.0))], "ms")
    later = [_ms(lambda at=at: devices.read(latest, STARTED_US + at * SECOND_US)) for at in range(1, ROUNDS + 1)]
    yield Figure(f"{what}: a later round", later, "ms", aim)
    told = [p.owner for reading in devices.read(latest, STARTED_US + 40 * SECOND_US) for p in reading.processes]
    assert len(told) == len(pids)
    assert all(told)


def _device(index: int, pids: list[int]) -> NvmlDevice:
    processes = tuple(NvmlProcess(pid, 1 << 20) for pid in pids)
    return NvmlDevice(f"GPU-{index}", index, "bench", 80 << 30, 40 << 30, 1 << 30, processes)


def _ms(call) -> float:
    began = time.thread_time()
    call()
    return (time.thread_time() - began) * 1e3


@contextmanager
def _processes(count: int) -> Iterator[list[int]]:
    started = [subprocess.Popen(["sleep", "600"]) for _ in range(count)]
    try:
        yield [one.pid for one in started]
    finally:
        for one in started:
            one.kill()
            one.wait()
