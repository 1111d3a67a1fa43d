"""The whole daemon on a driver that a test plays: bills by NVML, and what becomes of them when the driver hangs."""

from __future__ import annotations

import asyncio
import os
import threading
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from allocscope.daemon import intake, outbox
from allocscope.daemon.app import Daemon
from allocscope.daemon.config import DaemonSettings
from tests.daemon.fake_kubelet import WORKER, Lister, kubelet
from tests.daemon.fake_nvml import FakeDevice, FakeNvml
from tests.daemon.fakes import GIB, WAIT_S, FakeCollector, FakeProbe, process, sample

OTHER_PID = 2**22 + 1
"""Beyond any pid_max: nobody has it."""


class InProcess:
    """A daemon in a thread of the test's."""

    def __init__(self, folder, collector: FakeCollector, nvml: FakeNvml, **more: Any) -> None:
        settings = DaemonSettings(
            node="node-1",
            socket=folder / "daemon.sock",
            spool=folder / "spool",
            collector=collector.address,
            metrics_listen="127.0.0.1:0",
            interval_s=0.05,
            nvml_interval_s=0.1,
            nvml_timeout_s=0.3,
            **more,
        )
        self.socket = folder / "daemon.sock"
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run(settings, nvml)))
        self._thread.start()
        assert self._ready.wait(WAIT_S)
        collector.wait_for(lambda fake: bool(fake.hellos))  # the last thing it starts

    async def _run(self, settings: DaemonSettings, nvml: FakeNvml) -> None:
        self._loop, self._stopping = asyncio.get_running_loop(), asyncio.Event()
        daemon = Daemon(settings, nvml.load)
        self.metrics = daemon.metrics_address
        self._ready.set()
        await daemon.run(self._stopping)

    def figures(self, prefix: str) -> dict[str, float]:
        with urllib.request.urlopen(f"http://{self.metrics}/metrics", timeout=WAIT_S) as response:
            lines = [line for line in response.read().decode().splitlines() if line.startswith(prefix)]
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()


def readings(collector: FakeCollector, **wanted):
    """Readings by their devices, once all in a batch say what is wanted: each device is read for itself."""

    def fits(device) -> bool:
        return all(getattr(device, name) == value for name, value in wanted.items())

    def fitting(fake: FakeCollector):
        for batch in fake.batches:
            if batch.devices and all(map(fits, batch.devices)):
                yield batch.devices

    collector.wait_for(lambda fake: any(fitting(fake)))
    return {reading.device.uuid: reading for reading in list(fitting(collector))[-1]}


@pytest.fixture
def collector():
    fake = FakeCollector()
    yield fake
    fake.stop()


def test_processes_are_told_with_their_pods_and_one_without_a_probe_as_such(tmp_path, collector):
    """On a node of Kubernetes: pids by NVML and a copy of its /proc, names by a kubelet's own server."""
    nvml = FakeNvml(FakeDevice("GPU-1", free=40 * GIB, processes={48210: 22 * GIB, 3100: GIB, OTHER_PID: None}))
    proc = Path(__file__).parent / "trees" / "kubernetes_systemd_v2"
    with kubelet(tmp_path / "kubelet.sock", lister=Lister(WORKER)):
        daemon = InProcess(tmp_path, collector, nvml, proc=proc, kubelet_socket=tmp_path / "kubelet.sock")
        try:
            in_container = process(pid=7, host="llama-worker-0", started_us=2**60)
            probe = FakeProbe(daemon.socket, in_container)
            probe.samples(sample(1))
            collector.wait_for(lambda c: any(_told(b, process_id="a" * 32, pod="llama-worker-0") for b in c.batches))
            batch = next(b for b in collector.batches if _told(b, process_id="a" * 32, pod="llama-worker-0"))
            of = {p.pid: p for p in batch.devices[0].processes}
            assert (of[48210].owner.namespace, of[48210].owner.container) == ("team-a", "trainer")
            assert of[48210].owner.pod_uid == "0c5d5f2a-6d0e-4f1b-9a4b-2f6f6a1c9e01"
            assert of[48210].used_bytes == 22 * GIB
            assert (of[3100].process_id, of[3100].name, of[3100].used_bytes) == ("", "nv-hostengine", GIB)
            assert of[3100].owner.user == "root"
            assert not of[3100].owner.pod
            assert not of[OTHER_PID].HasField("owner")
            labels = 'gpu="0",node="node-1",uuid="GPU-1"'
            counted = daemon.figures("allocscope_processes_without_probe")
            assert counted == {f"allocscope_processes_without_probe{{{labels}}}": 2}
            assert daemon.figures("allocscope_kubelet_seconds_count") == {"allocscope_kubelet_seconds_count": 1}
            probe.break_off()
        finally:
            daemon.stop()


def _told(batch, *, process_id: str, pod: str) -> bool:
    return any(p.process_id == process_id and p.owner.pod == pod for d in batch.devices for p in d.processes)


def test_bills_by_nvml_and_without_it_while_it_hangs(tmp_path, collector):
    nvml = FakeNvml(
        FakeDevice("GPU-1", free=40 * GIB, processes={os.getpid(): 22 * GIB, OTHER_PID: 17 * GIB}), FakeDevice("GPU-2")
    )
    daemon = InProcess(tmp_path, collector, nvml)
    try:
        hello = process(started_us=2**60)  # after this process, by which it is known as the one with this pid
        probe = FakeProbe(daemon.socket, hello)
        probe.samples(sample(1))
        probe.wait_acknowledged(1)
        collector.wait_for(
            lambda c: c.sequences() == [1]
        )  # and with it, or later, what NVML says of a process that is known
        by_uuid = readings(collector, from_nvml=True)
        assert sorted(by_uuid) == ["GPU-1", "GPU-2"]
        assert [(p.process_id, p.used_bytes) for p in by_uuid["GPU-1"].processes] == [
            ("a" * 32, 22 * GIB),
            ("", 17 * GIB),
        ]
        device = 'gpu="0",job="",line="{}",node="node-1",rank="",uuid="GPU-1"'
        bill = daemon.figures("allocscope_bill_bytes")
        assert bill[f"allocscope_bill_bytes{{{device.format('driver')}}}"] == GIB
        assert bill[f"allocscope_bill_bytes{{{device.format('free')}}}"] == 40 * GIB
        assert bill[f"allocscope_bill_bytes{{{device.format('other_processes')}}}"] == 17 * GIB
        assert sum(figure for name, figure in bill.items() if "GPU-1" in name) == 80 * GIB
        assert daemon.figures("allocscope_nvml_up") == {"allocscope_nvml_up": 1}

        nvml.hang.begin()
        hung = readings(collector, problem="NVML has not answered within 0.3 s")
        assert not hung["GPU-1"].from_nvml
        assert hung["GPU-1"].problem_kind == "hangs"
        assert hung["GPU-1"].free_bytes == 50 * GIB  # as the job says
        assert not hung["GPU-2"].HasField("free_bytes")
        assert hung["GPU-2"].device.total_bytes == 80 * GIB
        probe.samples(sample(2))
        probe.wait_acknowledged(2)
        assert daemon.figures("allocscope_nvml_up") == {"allocscope_nvml_up": 0}

        before = len(collector.batches)
        nvml.hang.end()
        collector.wait_for(lambda c: any(b.devices[0].from_nvml for b in c.batches[before:] if b.devices))
        probe.end()
    finally:
        nvml.hang.end()
        daemon.stop()


def test_it_ends_while_the_driver_hangs(tmp_path, collector):
    nvml = FakeNvml(FakeDevice("GPU-1"))
    nvml.hang.begin()
    daemon = InProcess(tmp_path, collector, nvml)
    assert nvml.hang.reached.wait(WAIT_S)
    daemon.stop()
    nvml.hang.end()


def came(collector: FakeCollector) -> set[int]:
    """The sequences of samples, also of those that newer ones overtook."""
    batches = [*collector.batches, *collector.late]
    return {sequence for batch in batches for chunk in batch.samples for sequence in chunk.sequence}


def test_a_burst_larger_than_what_waits_for_a_bad_disk_is_written_to_a_good_one(tmp_path, collector, monkeypatch):
    monkeypatch.setattr(outbox, "UNWRITTEN_BYTES", 1)
    monkeypatch.setattr(intake, "LARGEST_BATCH_BYTES", 1)  # each message is a batch
    daemon = InProcess(tmp_path, collector, FakeNvml(FakeDevice("GPU-1")))
    try:
        probe = FakeProbe(daemon.socket, process())
        for sequence in range(1, 201):
            probe.samples(sample(sequence))
        probe.wait_acknowledged(200)
        collector.wait_for(lambda c: came(c) == set(range(1, 201)))
        assert daemon.figures("allocscope_dropped_total") == {}
        probe.end()
    finally:
        daemon.stop()
