"""/metrics: valid, bounded, and gone when the job is gone."""

import subprocess

import pytest
from prometheus_client import generate_latest

from allocscope.collector.exposition import FleetCollector
from allocscope.collector.fleet import Fleet
from allocscope.collector.nodes import Hello, Nodes
from allocscope.collector.observation import Observation
from allocscope.model import (
    BillEntry,
    Device,
    DeviceBill,
    DeviceReading,
    Event,
    EventKind,
    Line,
    Process,
    Sample,
    metrics,
)
from tests.collector.harness import batch as claimed_batch
from tests.collector.harness import collector, stream
from tests.collector.harness import sample as claimed_sample
from tests.collector.made import PROCESS_ID, RECEIVED_US, UUID, batch
from tests.needs import promtool

ODD_JOB = 'a "job"\\with\nlines'


def process(process_id=PROCESS_ID, rank=0):
    return Process(process_id, ODD_JOB, 1, "host", 1, rank=rank, devices=(Device(UUID, 0, total_bytes=1000),))


def sample(sequence, **more):
    given = {
        "allocated_bytes": 600,
        "reserved_bytes": 700,
        "num_alloc_retries": 3,
        "device_total_bytes": 1000,
        "device_free_bytes": 250,
        **more,
    }
    return Sample(sequence, RECEIVED_US + sequence * 1_000_000, **given)


def reading():
    entries = (
        BillEntry(Line.STRANDED, 100, False, PROCESS_ID),
        BillEntry(Line.REQUESTED, 650, True, PROCESS_ID),
        BillEntry(Line.FREE, 250),
    )
    return DeviceReading(
        Device(UUID, 5, "H200", 1000), RECEIVED_US, True, free_bytes=250, bill=DeviceBill(1000, entries)
    )


class Scrape:
    def __init__(self):
        self.fleet, self.nodes, self.observation = Fleet(retire_after_us=300_000_000), Nodes(), Observation()
        self.observation.registry.register(FleetCollector(self.fleet, self.nodes.all))

    def value(self, metric, **labels):
        return self.observation.registry.get_sample_value(metric.name, labels)

    def text(self):
        return generate_latest(self.observation.registry).decode()


@pytest.fixture
def scrape():
    return Scrape()


LABELS = {"node": "n1", "gpu": "5", "uuid": UUID, "job": ODD_JOB, "rank": "0"}


def test_an_allocator_is_exposed_with_its_forecast_and_gone_with_its_process(scrape):
    scrape.fleet.take(batch(1, process(), [sample(1)], readings=(reading(),)))
    assert scrape.value(metrics.FORECAST_STATE, **LABELS) == 0
    assert scrape.value(metrics.RESERVED_BYTES, **LABELS) == 700
    assert scrape.value(metrics.ALLOCATED_BYTES, **LABELS) == 600
    assert scrape.value(metrics.ALLOC_RETRIES_TOTAL, **LABELS) == 3
    assert scrape.value(metrics.OOMS_TOTAL, **LABELS) is None
    assert scrape.value(metrics.PROCESSES) == 1
    assert scrape.value(metrics.FLEET_ALLOCATORS, state="ok") == 1
    scrape.fleet.take(batch(2, process(), [Event(PROCESS_ID, 2, 1, EventKind.STOPPED)]))
    assert "allocscope_forecast_state{" not in scrape.text()
    assert scrape.value(metrics.PROCESSES) == 0
    assert scrape.value(metrics.FLEET_ALLOCATORS, state="ok") == 0


def test_the_fleets_bill_is_the_sum_of_its_devices(scrape):
    scrape.fleet.take(batch(1, process(), [sample(1)], readings=(reading(),)))
    assert scrape.value(metrics.FLEET_BILL_BYTES, line="stranded") == 100
    assert scrape.value(metrics.FLEET_BILL_BYTES, line="requested") == 650
    assert scrape.value(metrics.FLEET_BILL_BYTES, line="free") == 250
    assert scrape.value(metrics.FLEET_DEVICE_MEMORY_TOTAL_BYTES) == 1000


def test_a_rank_that_was_restarted_is_one_series(scrape):
    scrape.fleet.take(batch(1, process(), [sample(1)]))
    again = process("b" * 32)
    from dataclasses import replace

    from allocscope.model import AllocatorRef, chunks

    scrape.fleet.take(
        replace(
            batch(2, again, []), chunks=tuple(chunks(AllocatorRef("b" * 32, UUID), [sample(1, reserved_bytes=750)]))
        )
    )
    lines = [line for line in scrape.text().splitlines() if line.startswith("allocscope_reserved_bytes{")]
    assert len(lines) == 1
    assert lines[0].endswith(" 750.0")


def test_an_oom_stays_for_a_scrape_to_see_though_its_job_has_ended(scrape):
    oom, stopped = (Event(PROCESS_ID, n, RECEIVED_US, kind) for n, kind in ((2, EventKind.OOM), (3, EventKind.STOPPED)))
    scrape.fleet.take(batch(1, process(), [sample(1)], readings=(reading(),)))
    assert scrape.value(metrics.LAST_OOM_TIMESTAMP_SECONDS, **LABELS) is None
    died = batch(2, process(), [oom, stopped])
    scrape.fleet.take(died)
    assert "allocscope_forecast_state{" not in scrape.text()
    assert scrape.value(metrics.LAST_OOM_TIMESTAMP_SECONDS, **LABELS) == died.received_us / 1e6
    for second in range(1, 601):
        assert scrape.value(metrics.LAST_OOM_TIMESTAMP_SECONDS, **LABELS) is not None
        scrape.fleet.tick(died.received_us + second * 1_000_000, {})
    assert scrape.value(metrics.LAST_OOM_TIMESTAMP_SECONDS, **LABELS) is None


def test_a_node_that_was_there_before_a_restart_is_not_forgotten_by_it(scrape):
    scrape.fleet.heard_before.update({"n1": 40_000_000, "n2": 50_000_000})
    scrape.nodes.attach(Hello("n1", "d1", "1", None), 90_000_000, lambda: None)
    assert scrape.value(metrics.NODE_LAST_SEEN_TIMESTAMP_SECONDS, node="n1") == 90
    assert scrape.value(metrics.NODE_LAST_SEEN_TIMESTAMP_SECONDS, node="n2") == 50


def test_nodes_say_how_far_their_clocks_are_ahead(scrape):
    state = scrape.nodes.attach(Hello("n1", "d1", "1", None), 1, lambda: None)
    scrape.nodes.heard(state, sent_us=90_000_000, now_us=60_000_000)
    assert scrape.value(metrics.NODE_CLOCK_OFFSET_SECONDS, node="n1") == 30
    assert scrape.value(metrics.NODE_LAST_SEEN_TIMESTAMP_SECONDS, node="n1") == 60


def test_the_least_delay_lately_tells_of_the_clock():
    """A request that had to wait for us says nothing of its sender's clock."""
    nodes = Nodes()
    state = nodes.attach(Hello("n1", "d1", "1", None), 0, lambda: None)
    nodes.heard(state, sent_us=1_000_000, now_us=1_100_000)
    nodes.heard(state, sent_us=2_000_000, now_us=9_000_000)
    assert state.clock_offset_us == -100_000
    nodes.heard(state, sent_us=70_000_000, now_us=72_000_000)
    assert state.clock_offset_us == -2_000_000


def test_every_family_is_in_the_catalogue(scrape):
    families = {line.split()[2] for line in scrape.text().splitlines() if line.startswith("# TYPE")}
    catalogued = {metric.name for metric in metrics.CATALOGUE if "collector" in metric.by}
    created = {name for name in families if name.endswith("_created")}
    assert families - created - catalogued == set()


def test_prometheus_finds_nothing_to_say_against_it(tmp_path):
    tool = promtool()
    with collector(tmp_path) as running, stream(running.grpc) as it:
        it.batch(claimed_batch(1, claimed_sample(1), job=ODD_JOB))
        it.until(1)
        text = running.get("/metrics").text
    checked = subprocess.run(
        [tool, "check", "metrics"], input=text, text=True, capture_output=True, timeout=20, check=False
    )
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, "")
    assert "allocscope_samples_ingested_total 1.0" in text
    assert "allocscope_ingest_seconds_bucket" in text
