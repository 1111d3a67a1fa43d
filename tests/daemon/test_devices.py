"""A reading puts together what NVML and the jobs know; its bill adds up to the device's total, whatever they say."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allocscope.daemon.devices import Devices
from allocscope.daemon.node import Node
from allocscope.daemon.nvml import NvmlDevice, NvmlProcess, NvmlRound
from allocscope.daemon.procfs import Procfs
from allocscope.model import BillEntry, Device, DeviceProcess, DeviceReading, Line, Process, Sample
from allocscope.model.wire import process_to_wire

GIB = 1 << 30
NO_PROC = Procfs(Path("/nowhere"))


def node_of(*processes: Process, samples: dict[str, Sample]) -> Node:
    node = Node()
    for process in processes:
        attached = node.attach(process, process_to_wire(process), object(), 0.0)
        for allocator in attached.allocators.values():
            allocator.sample = samples.get(process.process_id[0])
    return node


def process(letter: str, pid: int) -> Process:
    device = Device("GPU-1", 3, "NVIDIA H200", 80 * GIB)
    return Process(letter * 32, f"job-{letter}", pid, "host", 1, rank=0, allocator_conf="", devices=(device,))


def sample(reserved: int, allocated: int, split: int = 0, free: int | None = None, used: int | None = None) -> Sample:
    return Sample(
        1,
        10,
        allocated_bytes=allocated,
        active_bytes=allocated,
        requested_bytes=allocated,
        reserved_bytes=reserved,
        inactive_split_bytes=split,
        private_pools_reserved_bytes=0,
        device_total_bytes=80 * GIB,
        device_free_bytes=free,
        process_used_bytes=used,
    )


def nvml(**changes) -> NvmlRound:
    known = {"total_bytes": 80 * GIB, "free_bytes": 40 * GIB, "driver_bytes": GIB, "processes": ()}
    return NvmlRound((NvmlDevice("GPU-1", 0, "NVIDIA H200", **{**known, **changes}),))


def entries(reading: DeviceReading) -> tuple[BillEntry, ...]:
    assert reading.bill is not None
    assert reading.bill.total_bytes == 80 * GIB
    return reading.bill.entries


def lines(reading: DeviceReading) -> dict[tuple[str, str], int]:
    return {(e.line.value, (e.process_id or "")[:1]): e.bytes for e in entries(reading) if e.bytes}


def test_with_nvml_other_processes_are_those_without_a_probe():
    node = node_of(process("a", 100), samples={"a": sample(20 * GIB, 15 * GIB, split=2 * GIB)})
    latest = nvml(processes=(NvmlProcess(100, 21 * GIB), NvmlProcess(200, 18 * GIB)))
    (reading,) = Devices(node, NO_PROC).read(latest, 5)
    assert lines(reading) == {
        ("requested", "a"): 15 * GIB,
        ("stranded", "a"): 2 * GIB,
        ("releasable", "a"): 3 * GIB,
        ("outside", "a"): GIB,
        ("other_processes", ""): 18 * GIB,
        ("driver", ""): GIB,
        ("free", ""): 40 * GIB,
    }
    assert (reading.from_nvml, reading.time_us, reading.problem) == (True, 5, None)
    assert reading.device == Device("GPU-1", 0, "NVIDIA H200", 80 * GIB)
    assert reading.processes == (
        DeviceProcess(100, "a" * 32, None, 21 * GIB),
        DeviceProcess(200, None, None, 18 * GIB),
    )


def test_without_nvml_the_newest_sample_tells_of_the_device():
    node = node_of(process("a", 1), samples={"a": sample(20 * GIB, 20 * GIB, free=50 * GIB, used=21 * GIB)})
    (reading,) = Devices(node, NO_PROC).read(NvmlRound(problem="NVML is switched off"), 5)
    assert lines(reading) == {
        ("requested", "a"): 20 * GIB,
        ("outside", "a"): GIB,
        ("other_processes", ""): 9 * GIB,
        ("free", ""): 50 * GIB,
    }
    assert (reading.from_nvml, reading.driver_bytes, reading.device.index) == (False, None, 3)


@pytest.mark.parametrize("missing", ["hung", "lost"])
def test_a_device_whose_reading_is_absent_goes_on_with_what_jobs_know(missing):
    node = node_of(process("a", 1), samples={"a": sample(20 * GIB, 20 * GIB, free=50 * GIB)})
    device = nvml().devices[0].without_figures(missing)
    (reading,) = Devices(node, NO_PROC).read(NvmlRound((device,)), 5)
    assert (reading.problem, reading.from_nvml, reading.free_bytes) == (missing, False, 50 * GIB)
    assert sum(entry.bytes for entry in entries(reading)) == 80 * GIB


def test_a_device_of_unknown_size_has_no_bill():
    (reading,) = Devices(Node(), NO_PROC).read(nvml(total_bytes=None, free_bytes=None, driver_bytes=None), 5)
    assert (reading.bill, reading.device.total_bytes, reading.free_bytes) == (None, None, None)


def test_nvmls_total_outweighs_what_a_job_says():
    node = node_of(process("a", 1), samples={})
    devices = Devices(node, NO_PROC)
    assert devices.total_bytes("GPU-1") == 80 * GIB
    devices.read(nvml(total_bytes=79 * GIB), 5)
    assert devices.total_bytes("GPU-1") == 79 * GIB
    assert devices.total_bytes("GPU-2") is None


amounts = st.integers(0, 100 * GIB)
unsure = st.none() | amounts


@given(
    st.lists(st.tuples(amounts, amounts, amounts, unsure, unsure), max_size=4),
    unsure,
    unsure,
    st.none() | st.lists(unsure, max_size=4),
)
def test_a_bill_adds_up_whatever_is_said(told, free, driver, seen):
    """Readings taken a moment apart, or lies that passed, never make a bill of more or less than the device."""
    letters = "abcd"
    jobs = [process(letter, i + 1) for i, letter in zip(range(len(told)), letters, strict=False)]
    node = node_of(*jobs, samples=dict(zip(letters, (sample(*figures) for figures in told), strict=False)))
    processes = None if seen is None else tuple(NvmlProcess(i + 3, used) for i, used in enumerate(seen))
    (reading,) = Devices(node, NO_PROC).read(nvml(free_bytes=free, driver_bytes=driver, processes=processes), 5)
    assert sum(entry.bytes for entry in entries(reading)) == 80 * GIB
    assert all(entry.bytes >= 0 for entry in entries(reading))
    assert {entry.process_id for entry in entries(reading) if entry.line is Line.REQUESTED} == {
        job.process_id for job in jobs
    }
