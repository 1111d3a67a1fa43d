"""What jobs say reaches the collector value by value, whatever happens to the daemon and the collector meanwhile; real processes."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest

from allocscope.model import AllocatorRef, Event, EventKind
from allocscope.model.wire import chunk_from_wire, process_to_wire
from allocscope.probe.uplink import Uplink
from allocscope.proto.v1.collector_service_pb2 import Batch
from tests.daemon.fakes import DaemonProcess, FakeCollector, FakeProbe, process, sample

REF = AllocatorRef(process().process_id, "GPU-1")


def values(batches: Iterable[Batch]) -> dict[int, int | None]:
    """Of each sample, by its number, a figure that no other has; a sample that came twice came the same."""
    found: dict[int, int | None] = {}
    for batch in batches:
        for chunk in map(chunk_from_wire, batch.samples):
            for one in chunk.samples():
                assert found.setdefault(one.sequence, one.allocated_bytes) == one.allocated_bytes
    return found


@pytest.fixture
def collector():
    fake = FakeCollector()
    yield fake
    fake.stop()


def test_a_daemon_killed_at_random_moments_loses_nothing(tmp_path, collector):
    chance = random.Random(5)
    uplink = Uplink(str(tmp_path / "daemon.sock"), process())
    uplink.start()
    sent: dict[int, int | None] = {}
    for _ in range(5):
        with DaemonProcess(tmp_path, collector.address) as daemon:
            probe = FakeProbe(daemon.socket, process("b"))
            for sequence in range(1, chance.randrange(2, 12)):
                for _ in range(chance.randrange(1, 30)):
                    number = uplink.next_sequence()
                    sent[number] = number * 1000
                    uplink.sample(REF, sample(number, allocated_bytes=number * 1000))
                probe.samples(sample(sequence))
                probe.wait_acknowledged(sequence)
            daemon.kill()
            probe.break_off()
    with DaemonProcess(tmp_path, collector.address) as daemon:
        assert uplink.close(20) == 0
        assert daemon.stop() == 0
        assert not any("lost" in line["event"] for line in daemon.log)
    collector.wait_for(lambda c: len(values(_of([*c.batches, *c.late], REF.process_id))) >= len(sent))
    assert values([*_of(collector.batches, REF.process_id), *_of(collector.late, REF.process_id)]) == sent


def _of(batches: Iterable[Batch], process_id: str) -> Iterable[Batch]:
    """What they say of one process."""
    for batch in batches:
        yield Batch(samples=[chunk for chunk in batch.samples if chunk.allocator.process_id == process_id])


def test_after_an_outage_what_is_new_does_not_wait_for_what_waited_and_all_of_it_comes(tmp_path):
    with DaemonProcess(tmp_path) as daemon:  # no collector
        probe = FakeProbe(daemon.socket, process())
        for sequence in range(1, 101):
            probe.samples(sample(sequence, allocated_bytes=sequence))
            probe.wait_acknowledged(sequence)  # a batch each, or two
        daemon.kill()
        probe.break_off()
    collector = FakeCollector()
    with DaemonProcess(tmp_path, collector.address, backlog_bytes_per_s=10_000) as daemon:
        daemon.wait_log("what is new goes first; what waited follows beside it")
        probe = FakeProbe(daemon.socket, process())
        probe.samples(sample(101, allocated_bytes=101))
        collector.wait_for(lambda c: 101 in c.sequences())
        with collector.changed:
            waits = 100 - len(values(collector.late))
        assert waits > 0
        collector.wait_for(lambda c: len(values(c.late)) == 100)
        assert values(collector.late) == {sequence: sequence for sequence in range(1, 101)}
        assert [batch.sequence for batch in collector.late] == sorted(batch.sequence for batch in collector.late)
        assert 1 not in collector.sequences()
        probe.end()
        assert daemon.stop() == 0
    collector.stop()


def test_what_happened_does_not_wait_for_the_interval(tmp_path, collector):
    with DaemonProcess(tmp_path, collector.address, interval_s=10) as daemon:
        probe = FakeProbe(daemon.socket, process())
        probe.event(Event(process().process_id, 1, 1, EventKind.OOM, device_uuid="GPU-1"))
        collector.wait_for(lambda c: any(batch.events for batch in c.batches))
        assert [event.sequence for batch in collector.batches for event in batch.events] == [1]
        assert collector.batches[0].processes[0] == process_to_wire(process())
        probe.end()


def test_what_a_full_spool_gave_up_is_told_to_the_collector(tmp_path):
    with DaemonProcess(tmp_path, spool_limit_bytes=1 << 20) as daemon:
        probe = FakeProbe(daemon.socket, process())
        for start in range(1, 24001, 2000):
            probe.samples(*(sample(sequence) for sequence in range(start, start + 2000)))
            probe.wait_acknowledged(start + 1999)
        dropped = daemon.figures('allocscope_dropped_total{reason="spool_full",what="samples"}')
        daemon.kill()
        probe.break_off()
    collector = FakeCollector()
    with DaemonProcess(tmp_path, collector.address, spool_limit_bytes=1 << 20):
        collector.wait_for(lambda c: len(values([*c.batches, *c.late])) == 24000 - sum(dropped.values()))
        told = [one for batch in collector.batches for one in batch.dropped if one.what == "samples"]
        assert 0 < sum(one.count for one in told) <= sum(dropped.values())
        assert {one.reason for one in told} == {"spool_full"}
    collector.stop()
