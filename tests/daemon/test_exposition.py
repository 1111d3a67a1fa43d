"""/metrics: what is known with its labels, what is not known not at all; bounded, and never in anybody's way."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
from prometheus_client import CollectorRegistry

from allocscope.daemon.exposition import AllocatorView, NodeCollector, NodeView
from allocscope.daemon.nvml import NvmlRound
from allocscope.daemon.nvml_device import NvmlDevice
from allocscope.daemon.nvml_problems import NvmlProblem, ProblemKind
from allocscope.daemon.observed import Observed
from allocscope.model import BillEntry, Device, DeviceBill, DeviceProcess, DeviceReading, Line, Process, Sample
from allocscope.model.metrics import DROPPED_TOTAL

WAIT_S = 20
DEVICE = Device("GPU-1", 3, None, 100)
A, B = (Process(letter * 32, "train", 7, "host", 1) for letter in "ab")
NODE_FIGURES = {
    "allocscope_build_info": 1,
    "allocscope_capture_spool_bytes": 0,
    "allocscope_capture_spool_captures": 0,
    "allocscope_capture_spool_limit_bytes": 0,
    "allocscope_collector_connected": 0,
    "allocscope_nvml_problem": 1,
    "allocscope_nvml_up": 0,
    "allocscope_processes": 0,
    "allocscope_spool_batches": 0,
    "allocscope_spool_bytes": 0,
    "allocscope_spool_limit_bytes": 0,
}


def series(view: NodeView) -> dict[tuple[str, ...], float]:
    """By name and label values, in the order of the catalogue."""
    families = NodeCollector("n", "1", lambda: view).collect()
    return {(s.name, *s.labels.values()): s.value for family in families for s in family.samples if len(s.labels) > 1}


def reading(*entries: BillEntry, **changes) -> DeviceReading:
    bill = DeviceBill(100, entries) if entries else None
    return DeviceReading(**{"device": DEVICE, "time_us": 1, "from_nvml": False, "bill": bill, **changes})


def test_what_is_not_known_is_not_there():
    unknown = reading(device=Device("GPU-1", 3))
    view = NodeView(readings=(unknown,), allocators=(AllocatorView(A, "GPU-1", Sample(1, 1)),), processes=(A,))
    assert series(view) == {}
    families = {family.name: family.samples[0].value for family in NodeCollector("n", "1", NodeView).collect()}
    assert families == NODE_FIGURES


def test_a_bill_has_its_owners_labels_even_before_their_first_sample():
    view = NodeView(
        readings=(reading(BillEntry(Line.OUTSIDE, 40, True, "a" * 32), BillEntry(Line.FREE, 60)),), processes=(A,)
    )
    assert series(view) == {
        ("allocscope_device_memory_total_bytes", "n", "3", "GPU-1", ""): 100,
        ("allocscope_bill_bytes", "n", "3", "GPU-1", "train", "", "outside"): 40,
        ("allocscope_bill_bytes", "n", "3", "GPU-1", "", "", "free"): 60,
    }


def test_processes_of_one_job_that_tell_no_ranks_share_a_series():
    """Two series with the same labels would make Prometheus refuse the whole scrape."""
    views = (
        AllocatorView(A, "GPU-1", Sample(1, 1, reserved_bytes=30, num_ooms=1), 5, 2),
        AllocatorView(B, "GPU-1", Sample(1, 1, reserved_bytes=12), 9, 1),
    )
    labels = ("n", "3", "GPU-1", "train", "")
    found = series(NodeView(readings=(reading(),), allocators=views, processes=(A, B)))
    del found["allocscope_device_memory_total_bytes", "n", "3", "GPU-1", ""]
    assert found == {
        ("allocscope_reserved_bytes", *labels): 42,
        ("allocscope_ooms_total", *labels): 1,
        ("allocscope_headroom_bytes", *labels): 9,
        ("allocscope_largest_free_block_bytes", *labels): 2,
    }


def test_a_devices_problem_is_told_by_its_kind_and_gone_when_it_is_over():
    lost = NvmlProblem(ProblemKind.LOST, "GPU is lost")
    devices = (NvmlDevice("GPU-1", 0), NvmlDevice("GPU-2", 1, problem=lost), NvmlDevice("", 2, problem=lost))
    assert series(NodeView(nvml=NvmlRound(devices))) == {
        ("allocscope_device_problem", "n", "1", "GPU-2", "lost"): 1,
        ("allocscope_device_problem", "n", "2", "", "lost"): 1,
    }
    assert series(NodeView(nvml=NvmlRound(devices[:1]))) == {}


def test_processes_without_a_probe_are_counted_where_nvml_tells_a_devices_processes():
    """Where it does not there is no count: 0 would say that nobody is there."""
    others = (DeviceProcess(7, "a" * 32), DeviceProcess(8, name="Xorg"), DeviceProcess(9))
    readings = (
        reading(device=Device("GPU-1", 0), processes=others),
        reading(device=Device("GPU-2", 1)),
        reading(device=Device("GPU-3", 2), processes=others[:1]),
    )
    devices = (NvmlDevice("GPU-1", 0), NvmlDevice("GPU-2", 1), NvmlDevice("GPU-3", 2, processes=None))
    assert series(NodeView(readings=readings, nvml=NvmlRound(devices))) == {
        ("allocscope_processes_without_probe", "n", "0", "GPU-1"): 2,
        ("allocscope_processes_without_probe", "n", "1", "GPU-2"): 0,
    }


@pytest.mark.parametrize(
    ("problem", "up", "kinds"),
    [(None, 1, {}), (NvmlProblem(ProblemKind.NO_DRIVER, "Driver Not Loaded"), 0, {"no_driver": 1})],
)
def test_a_problem_of_nvml_as_a_whole_is_told_by_its_kind(problem, up, kinds):
    registry = CollectorRegistry()
    registry.register(NodeCollector("n", "1", lambda: NodeView(nvml=NvmlRound(problem=problem))))
    told = {family.name: family.samples for family in registry.collect()}
    assert told["allocscope_nvml_up"][0].value == up
    assert {s.labels["kind"]: s.value for s in told.get("allocscope_nvml_problem", ())} == kinds


def test_reasons_that_others_name_cannot_fill_the_memory():
    observed = Observed()
    for i in range(1000):
        observed.dropped.add(1, "rejected", f"reason-{i}")
    (family,) = (f for f in observed.registry.collect() if f.name + "_total" == DROPPED_TOTAL.name)
    by_reason = {s.labels["reason"]: s.value for s in family.samples if s.name == DROPPED_TOTAL.name}
    assert len(by_reason) == 65
    assert by_reason["other"] == 936


def test_a_loop_tells_when_it_last_went_well_only_once_it_has():
    observed = Observed()
    name = "allocscope_bill_last_success_timestamp_seconds"
    with pytest.raises(ZeroDivisionError), observed.bill.round():
        raise ZeroDivisionError
    assert observed.registry.get_sample_value(name) is None
    assert observed.registry.get_sample_value("allocscope_bill_failures_total") == 1
    with observed.bill.round():
        pass
    assert (observed.registry.get_sample_value(name) or 0) > 1.7e9
    assert observed.registry.get_sample_value("allocscope_bill_seconds_count") == 1


def test_a_loop_is_told_of_by_several_threads_at_once(monkeypatch):
    """As the devices' are, each in its own thread; the second would find the series registered already."""
    loop, together = Observed().nvml, threading.Barrier(2, timeout=WAIT_S)
    new_success = loop._new_success

    def slowly():
        with suppress(threading.BrokenBarrierError):  # the other one has to wait until this one is done
            together.wait(0.2)
        return new_success()

    monkeypatch.setattr(loop, "_new_success", slowly)
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(loop.took, (1.0, 2.0))) == [None, None]
