"""/metrics: what is known with its labels, what is not known not at all; bounded, and never in anybody's way."""

from __future__ import annotations

import socket
import urllib.error
import urllib.request

import pytest
from prometheus_client import CollectorRegistry

from allocscope.daemon.errors import ListenError
from allocscope.daemon.exposition import AllocatorView, MetricsServer, NodeCollector, NodeView
from allocscope.daemon.observed import Observed
from allocscope.model import BillEntry, Device, DeviceBill, DeviceReading, Line, Process, Sample
from allocscope.model.metrics import DROPPED_TOTAL

WAIT_S = 20
DEVICE = Device("GPU-1", 3, None, 100)
A, B = (Process(letter * 32, "train", 7, "host", 1) for letter in "ab")
NODE_FIGURES = {
    "allocscope_build_info": 1,
    "allocscope_collector_connected": 0,
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


@pytest.mark.parametrize(
    ("changes", "problem"),
    [({"problem": "GPU is lost"}, 1), ({"from_nvml": True}, 0), ({"from_nvml": False}, None)],
)
def test_a_devices_problem_is_told_where_nvml_knows_the_device(changes, problem):
    found = series(NodeView(readings=(reading(**changes),)))
    assert found.get(("allocscope_device_problem", "n", "3", "GPU-1")) == problem


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


def test_scrapers_that_hang_are_turned_away_beyond_a_few():
    server = MetricsServer("127.0.0.1:0", CollectorRegistry())
    server.start()
    host, _, port = server.address.rpartition(":")
    hanging = [socket.create_connection((host, int(port)), timeout=WAIT_S) for _ in range(8)]
    try:
        for connection in hanging:
            connection.sendall(b"GET /metrics HTTP/1.1\r\n")
        with pytest.raises(OSError, match=r"."):
            urllib.request.urlopen(f"http://{server.address}/metrics", timeout=WAIT_S)
    finally:
        for connection in hanging:
            connection.close()
        server.close()


def test_it_listens_on_ipv6_where_there_is_any():
    try:
        server = MetricsServer("[::1]:0", CollectorRegistry())
    except ListenError as error:
        assert str(error).startswith("cannot serve /metrics on [::1]:0: ")  # noqa: PT017 (there is no IPv6 here)
        return
    server.start()
    with urllib.request.urlopen(f"http://{server.address}/metrics", timeout=WAIT_S) as response:
        assert response.status == 200
    server.close()


def test_others_are_told_the_hosts_name_where_it_listens_everywhere():
    for listen, expected in (("0.0.0.0:0", "gpu7"), ("127.0.0.1:0", "127.0.0.1")):
        server = MetricsServer(listen, CollectorRegistry())
        assert server.reachable_address("gpu7") == f"{expected}:{server.address.rpartition(':')[2]}"
        server.close()
