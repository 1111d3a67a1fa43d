"""What handing on a sample costs the thread of a job that does it, beside making the sample."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path

from allocscope.allocator.player import Player
from allocscope.allocator.recording import read_recording
from allocscope.model import AllocatorRef, Device, Process, Sample
from allocscope.probe.uplink import Uplink
from tests.bench.figures import Figure
from tests.e2e.processes import Machine, recording

ROUNDS, CALLS = 15, 2000
REF = AllocatorRef("0" * 32, "GPU-0")
PROCESS = Process(REF.process_id, "bench", pid=1, host="node", started_us=1, devices=(Device(REF.device_uuid, 0),))


def figures() -> Iterator[Figure]:
    """With nobody there, and with a daemon."""
    with tempfile.TemporaryDirectory(prefix="as-") as folder:
        machine = Machine(Path(folder))
        try:
            yield from _figures("no daemon there", str(machine.folder / "nobody.sock"))
            collector = machine.collector()
            machine.kill(collector)
            daemon = machine.daemon("n1", collector)
            yield from _figures("a daemon takes it", str(daemon.addresses["socket"]))
        finally:
            machine.close()


def _figures(where: str, socket: str) -> Iterator[Figure]:
    run = Player(read_recording(recording("kv_serve-1-4114")))
    given = {f.name: getattr(sample, f.name) for sample in run if isinstance(sample, Sample) for f in fields(Sample)}
    uplink = Uplink(socket, PROCESS)
    uplink.start()
    try:
        making, handing = [], []
        for _ in range(ROUNDS):
            making.append(_each(lambda: Sample(**given)))
            handing.append(_each(lambda: uplink.sample(REF, Sample(**{**given, "sequence": uplink.next_sequence()}))))
    finally:
        uplink.close(0.1)
    on_top = [h - m for h, m in zip(handing, making, strict=True)]
    yield Figure(f"{where}: handing on / making a sample", [t / m for t, m in zip(on_top, making, strict=True)], "")
    yield Figure(f"{where}: handing on", [t * 1e6 for t in on_top], "µs")


def _each(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    for _ in range(CALLS):
        call()
    return (time.perf_counter() - began) / CALLS
