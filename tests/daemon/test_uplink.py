"""Toward a collector that does not take everything: one batch must not hold up the others."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from allocscope.daemon.observed import Observed
from allocscope.daemon.spool import Counts, SpooledBatch
from allocscope.daemon.uplink import CollectorUplink
from allocscope.proto.v1.collector_service_pb2 import Batch, NodeHello
from allocscope.proto.v1.event_pb2 import Event
from tests.daemon.fakes import WAIT_S, FakeCollector

LARGEST_BYTES = 10_000


class Source:
    """Batches in memory."""

    def __init__(self, *sizes: int) -> None:
        self.batches = [self._batch(number, size) for number, size in enumerate(sizes, 1)]
        self.acknowledged: list[int] = []

    @staticmethod
    def _batch(sequence: int, size: int) -> SpooledBatch:
        batch = Batch(sequence=sequence, events=[Event(message="x" * size)])
        return SpooledBatch(sequence, batch.SerializeToString(), Counts(samples=3, events=1))

    async def after(self, sequence: int) -> SpooledBatch | None:
        return next((batch for batch in self.batches if batch.sequence > sequence), None)

    async def acknowledge(self, through: int) -> None:
        self.acknowledged.append(through)


@pytest.fixture
def collector():
    fake = FakeCollector(largest_message_bytes=LARGEST_BYTES)
    yield fake
    fake.stop()


async def test_what_the_collector_never_takes_for_its_size_is_passed_over_and_counted(collector, monkeypatch):
    monkeypatch.setattr("allocscope.daemon.uplink.FIRST_BACKOFF_S", 0.001)
    monkeypatch.setattr("allocscope.daemon.uplink.LONGEST_BACKOFF_S", 0.001)
    observed, source = Observed(), Source(10, 10, 2 * LARGEST_BYTES, 10, 2 * LARGEST_BYTES)
    uplink = CollectorUplink(collector.address, NodeHello(node="n"), source, observed, lambda *_: True)
    running = asyncio.create_task(uplink.run())
    await asyncio.wait_for(uplink.drain(5), WAIT_S)
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running
    assert {batch.sequence for batch in collector.batches} == {1, 2, 4}
    assert source.acknowledged[-1] == 5
    dropped = {
        what: observed.registry.get_sample_value("allocscope_dropped_total", {"what": what, "reason": "too_large"})
        for what in ("batches", "samples", "block_maps", "events")
    }
    assert dropped == {"batches": 2, "samples": 6, "block_maps": None, "events": 2}
