"""A reading puts together what NVML and the jobs know; its bill adds up to the device's total, whatever they say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allocscope.daemon.devices import Devices
from allocscope.daemon.node import Node
from allocscope.daemon.nvml import SWITCHED_OFF, NvmlRound
from allocscope.daemon.nvml_device import NvmlDevice, NvmlProcess
from allocscope.daemon.nvml_problems import NvmlProblem, ProblemKind
from allocscope.daemon.peers import Peer
from allocscope.daemon.procfs import HostProcess, Procfs
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
    (reading,) = Devices(node, NO_PROC).read(SWITCHED_OFF, 5)
    assert lines(reading) == {
        ("requested", "a"): 20 * GIB,
        ("outside", "a"): GIB,
        ("other_processes", ""): 9 * GIB,
        ("free", ""): 50 * GIB,
    }
    assert (reading.from_nvml, reading.driver_bytes, reading.device.index) == (False, None, 3)


@pytest.mark.parametrize("missing", [ProblemKind.HANGS, ProblemKind.LOST])
def test_a_device_whose_reading_is_absent_goes_on_with_what_jobs_know(missing):
    node = node_of(process("a", 1), samples={"a": sample(20 * GIB, 20 * GIB, free=50 * GIB)})
    device = nvml().devices[0].without_figures(NvmlProblem(missing, "GPU is lost"))
    (reading,) = Devices(node, NO_PROC).read(NvmlRound((device,)), 5)
    assert (reading.problem, reading.problem_kind) == ("GPU is lost", missing)
    assert (reading.from_nvml, reading.free_bytes) == (False, 50 * GIB)
    assert sum(entry.bytes for entry in entries(reading)) == 80 * GIB


def test_a_device_of_unknown_size_has_no_bill():
    (reading,) = Devices(Node(), NO_PROC).read(nvml(total_bytes=None, free_bytes=None, driver_bytes=None), 5)
    assert (reading.bill, reading.device.total_bytes, reading.free_bytes) == (None, None, None)


def test_of_a_device_in_mig_mode_its_instances_have_the_bytes_and_it_has_none():
    whole = NvmlDevice("GPU-1", 0, "NVIDIA H200", in_mig_mode=True)
    part = replace(nvml().devices[0], uuid="MIG-1", model="NVIDIA H200 MIG 3g.71gb", parent_uuid="GPU-1")
    told = NvmlRound((whole, part, replace(part, uuid="MIG-2", total_bytes=10 * GIB, free_bytes=9 * GIB)))
    readings = Devices(Node(), NO_PROC).read(told, 5)
    assert [(r.device.uuid, r.device.index, r.device.parent_uuid) for r in readings] == [
        ("GPU-1", 0, None),
        ("MIG-1", 0, "GPU-1"),
        ("MIG-2", 0, "GPU-1"),
    ]
    assert [reading.bill and reading.bill.total_bytes for reading in readings] == [None, 80 * GIB, 10 * GIB]
    assert [reading.device.total_bytes for reading in readings] == [None, 80 * GIB, 10 * GIB]


def test_a_job_in_an_instance_is_billed_there():
    device = Device("MIG-1", 0, None, 80 * GIB)
    node = node_of(replace(process("a", 100), devices=(device,)), samples={"a": sample(20 * GIB, 20 * GIB)})
    whole = NvmlDevice("GPU-1", 0, "NVIDIA H200", in_mig_mode=True)
    part = replace(
        nvml(processes=(NvmlProcess(100, 21 * GIB),)).devices[0], uuid="MIG-1", free_bytes=58 * GIB, parent_uuid="GPU-1"
    )
    parent, instance = Devices(node, NO_PROC).read(NvmlRound((whole, part)), 5)
    assert (parent.bill, parent.processes) == (None, ())
    assert lines(instance) == {
        ("requested", "a"): 20 * GIB,
        ("outside", "a"): GIB,
        ("driver", ""): GIB,
        ("free", ""): 58 * GIB,
    }


def test_where_only_memory_is_not_supported_a_job_tells_it_and_nvml_who_else_uses_it():
    """Parts with unified memory, such as GB10."""
    node = node_of(process("a", 100), samples={"a": sample(20 * GIB, 20 * GIB, free=30 * GIB)})
    told = nvml(
        total_bytes=None,
        free_bytes=None,
        driver_bytes=None,
        processes=(NvmlProcess(100, 21 * GIB), NvmlProcess(200, 18 * GIB)),
        problem=NvmlProblem(ProblemKind.NOT_SUPPORTED, "Not Supported"),
    )
    (reading,) = Devices(node, NO_PROC).read(told, 5)
    assert lines(reading) == {
        ("requested", "a"): 20 * GIB,
        ("outside", "a"): GIB,
        ("other_processes", ""): 29 * GIB,
        ("free", ""): 30 * GIB,
    }
    assert [e.exact for e in entries(reading) if e.line is Line.OTHER_PROCESSES] == [False]
    assert (reading.from_nvml, reading.problem_kind) == (False, "not_supported")


def test_what_others_use_is_not_told_where_the_driver_does_not_tell_it_of_one_of_them():
    node = node_of(process("a", 100), samples={"a": sample(20 * GIB, 20 * GIB, used=21 * GIB)})
    told = nvml(processes=(NvmlProcess(100), NvmlProcess(200), NvmlProcess(300, GIB)))
    (reading,) = Devices(node, NO_PROC).read(told, 5)
    assert lines(reading)["other_processes", ""] == 18 * GIB, "what nobody else has"
    assert [(p.pid, p.used_bytes) for p in reading.processes] == [(100, 21 * GIB), (300, GIB), (200, None)]


def test_a_device_that_could_never_be_named_is_in_no_reading():
    unnamed = NvmlDevice("", 3, problem=NvmlProblem(ProblemKind.LOST, "GPU is lost"))
    assert [r.device.uuid for r in Devices(Node(), NO_PROC).read(NvmlRound((*nvml().devices, unnamed)), 5)] == ["GPU-1"]


def test_nvmls_total_outweighs_what_a_job_says():
    node = node_of(process("a", 1), samples={})
    devices = Devices(node, NO_PROC)
    assert devices.total_bytes("GPU-1") == 80 * GIB
    devices.read(nvml(total_bytes=79 * GIB), 5)
    assert devices.total_bytes("GPU-1") == 79 * GIB
    assert devices.total_bytes("GPU-2") is None


TREE = Procfs(Path(__file__).parent / "trees" / "kubernetes_systemd_v2")


def connected(node: Node, job: Process, host_pid: int) -> None:
    node.attach(job, process_to_wire(job), object(), 0.0, Peer(0, 0, host_pid, TREE.look_up(host_pid)))


def pids(reading: DeviceReading) -> dict[int | None, str]:
    return {p.pid: (p.process_id or "")[:1] for p in reading.processes}


def test_whose_a_connection_is_outweighs_what_pid_and_start_would_say():
    """Two containers have a pid 7, and only one of the two is known to the driver."""
    node = Node()
    connected(node, replace(process("a", 7), started_us=2**60), 48210)
    connected(node, replace(process("b", 7), started_us=2**60), 52100)
    told = nvml(processes=(NvmlProcess(52100, GIB), NvmlProcess(3100, GIB)))
    (reading,) = Devices(node, TREE).read(told, 5)
    assert pids(reading) == {48210: "a", 52100: "b", 3100: ""}
    assert [p.used_bytes for p in reading.processes] == [None, GIB, GIB]


def test_a_pid_is_that_of_one_process_with_a_probe_alone():
    """One that started its probe anew: its bytes are counted once."""
    node = Node()
    connected(node, process("a", 7), 48210)
    connected(node, process("b", 7), 48210)
    (reading,) = Devices(node, TREE).read(nvml(processes=(NvmlProcess(48210, GIB),)), 5)
    assert [(p.pid, p.process_id, p.used_bytes) for p in reading.processes] == [
        (None, "a" * 32, None),
        (48210, "b" * 32, GIB),
    ]


def test_a_pid_that_another_took_after_its_connection_is_not_its_own():
    node = Node()
    was = HostProcess(48210, 7, 1, "python3")
    job = replace(process("a", 9), started_us=2**60)
    node.attach(job, process_to_wire(job), object(), 0.0, Peer(0, 0, 48210, was))
    (reading,) = Devices(node, TREE).read(nvml(processes=(NvmlProcess(48210, GIB),)), 5)
    assert pids(reading) == {None: "a", 48210: ""}


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
