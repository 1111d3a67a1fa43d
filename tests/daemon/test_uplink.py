"""Toward the collector: one batch must not hold up the others, and what waited for hours not what is new."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
from structlog.testing import capture_logs

from allocscope.daemon.collector_way import CollectorWay
from allocscope.daemon.intake import Intake
from allocscope.daemon.losses import Losses
from allocscope.daemon.observed import Observed
from allocscope.daemon.outbox import Outbox
from allocscope.daemon.spool import Spool
from allocscope.daemon.uplink import CollectorUplink
from allocscope.proto.v1.collector_service_pb2 import NodeHello
from allocscope.proto.v1.event_pb2 import Event
from allocscope.proto.v1.identity_pb2 import Process
from tests.daemon.fakes import WAIT_S, FakeCollector
from tests.e2e.processes import until

LARGEST_BYTES = 10_000


class Sender:
    """A daemon's way to its collector, and what it closed."""

    def __init__(self, folder: Path) -> None:
        self.observed, self.intake = Observed(), Intake(lambda: None)
        self.spool = Spool(folder, 1 << 20)
        self.losses = Losses(self.observed, self.intake)
        self.outbox = Outbox(self.spool, self.intake, self.losses, self.observed)
        self.closed = 0

    async def close_batches(self, *sizes: int) -> None:
        """Each of one event, of so many bytes."""
        for size in sizes:
            self.closed += 1
            process = Process(process_id="a" * 32)
            self.intake.add_event(process, Event(process_id="a" * 32, sequence=self.closed, message="x" * size))
            self.outbox.close_batch(self.closed)
        await self.outbox.write()

    def uplink(
        self, collector: FakeCollector, *, address: str | None = None, backlog_bytes_per_s: float = 1e9
    ) -> CollectorUplink:
        """`address`: of somebody else in the collector's place."""
        return CollectorUplink(
            CollectorWay(address or collector.address),
            NodeHello(node="n"),
            self.outbox,
            self.observed,
            self.losses,
            lambda *_: True,
            backlog_bytes_per_s=backlog_bytes_per_s,
        )

    def dropped(self, what: str, reason: str) -> float | None:
        return self.observed.registry.get_sample_value("allocscope_dropped_total", {"what": what, "reason": reason})


class Waiting:
    """A job's stream that waits for an acknowledgement."""

    def __init__(self) -> None:
        self.acknowledged: list[int] = []

    def acknowledge(self, sequence: int) -> None:
        self.acknowledged.append(sequence)


@pytest.fixture
async def sender(tmp_path):
    made = Sender(tmp_path)
    yield made
    await made.outbox.close()


@pytest.fixture
def collector():
    fake = FakeCollector(largest_message_bytes=LARGEST_BYTES)
    yield fake
    fake.stop()


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr("allocscope.daemon.uplink.FIRST_BACKOFF_S", 0.001)
    monkeypatch.setattr("allocscope.daemon.uplink.LONGEST_BACKOFF_S", 0.001)
    monkeypatch.setattr("allocscope.daemon.uplink.REFUSED_BACKOFF_S", 0.001)
    monkeypatch.setattr("allocscope.daemon.backfill.START_WITHIN_S", 0)
    monkeypatch.setattr("allocscope.daemon.backfill.BACKOFF_S", 0.001)


@asynccontextmanager
async def running(uplink: CollectorUplink) -> AsyncIterator[None]:
    task = asyncio.create_task(uplink.run())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def late(collector: FakeCollector) -> list[int]:
    """Of each batch that came late the event, in the order in which they came."""
    return [event.sequence for batch in collector.late for event in batch.events]


async def came(collector: FakeCollector, *, late_events: int = 0, new: int = 0) -> None:
    """Until so much has come."""
    await asyncio.to_thread(collector.wait_for, lambda c: len(late(c)) >= late_events and len(c.batches) >= new)


async def test_what_the_collector_never_takes_for_its_size_is_passed_over_counted_and_told(sender, collector):
    await sender.close_batches(10, 10, 2 * LARGEST_BYTES, 10, 2 * LARGEST_BYTES)
    uplink = sender.uplink(collector)
    async with running(uplink):
        await asyncio.wait_for(uplink.drain(5), WAIT_S)
        await sender.close_batches(10)
        uplink.wake()
        await asyncio.wait_for(uplink.drain(6), WAIT_S)
    assert {batch.sequence for batch in collector.batches} == {1, 2, 4, 6}
    assert sender.spool.batches == 0
    dropped = {what: sender.dropped(what, "too_large") for what in ("batches", "samples", "block_maps", "events")}
    assert dropped == {"batches": 2, "samples": None, "block_maps": None, "events": 2}
    told = {(one.what, one.reason): one.count for one in collector.batches[-1].dropped}
    assert told == {("batches", "too_large"): 2, ("events", "too_large"): 2}


async def test_after_an_outage_what_is_new_comes_first_and_what_waited_beside_it_in_order(sender, collector):
    await sender.close_batches(*[10] * 100)
    uplink = sender.uplink(collector, backlog_bytes_per_s=1)  # the first of them, and then none for a minute
    async with running(uplink):
        await came(collector, late_events=1)
        await sender.close_batches(10, 10)
        uplink.wake()
        await asyncio.wait_for(uplink.drain(102), WAIT_S)
    first, second = collector.batches
    assert (first.sequence, second.sequence, second.unused_before) == (101, 102, 0)
    assert first.unused_before in (99, 100), "all but what came late before it, if it did"
    assert late(collector) == [1]
    async with running(sender.uplink(collector)):
        await came(collector, late_events=100)
    assert late(collector) == list(range(1, 101))
    assert [batch.sequence for batch in collector.late] == [1, 100], "what may go fast goes as one"


async def test_what_comes_late_is_let_go_once_it_is_acknowledged(sender, collector):
    await sender.close_batches(*[10] * 100)
    async with running(sender.uplink(collector)):
        await came(collector, late_events=100)
        await asyncio.to_thread(collector.wait_for, lambda c: c.late_over)
    assert sender.spool.batches == 0
    assert collector.batches == []


async def test_a_few_that_wait_come_in_order(sender, collector):
    await sender.close_batches(*[10] * 60)
    uplink = sender.uplink(collector)
    async with running(uplink):
        await asyncio.wait_for(uplink.drain(60), WAIT_S)
    assert [batch.sequence for batch in collector.batches] == list(range(1, 61))
    assert collector.late == []


@pytest.mark.parametrize("through", [2**62 + 1, 2**64 - 1])
async def test_who_acknowledges_what_no_daemon_can_have_sent_is_not_believed(sender, collector, through):
    collector.acknowledges, collector.stored = False, through
    await sender.close_batches(10, 10)
    uplink = sender.uplink(collector)
    async with running(uplink):
        await asyncio.to_thread(collector.wait_for, lambda c: len(c.hellos) >= 2)
        assert (sender.spool.batches, sender.spool.next_sequence) == (2, 3)
        collector.stored, collector.acknowledges = 0, True
        await asyncio.wait_for(uplink.drain(2), WAIT_S)
    assert [batch.sequence for batch in collector.batches] == [1, 2]


async def test_who_takes_the_stream_and_says_nothing_is_told_of_and_waited_for(sender, collector, monkeypatch):
    monkeypatch.setattr("allocscope.daemon.uplink.ANSWERS_WITHIN_S", 0.05)
    await sender.close_batches(10)
    uplink = sender.uplink(collector)
    with capture_logs() as log:
        async with running(uplink):
            with collector.changed:  # so it cannot answer
                assert (
                    await problem_in(log) == "it took the stream, and has not answered within 0.05 s; it is waited for"
                )
            await asyncio.wait_for(uplink.drain(1), WAIT_S)
    assert [hello.node for hello in collector.hellos] == ["n"], "on the same stream"


class Garbled(grpc.GenericRpcHandler):
    """Answers every message of any call with bytes that are none."""

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        return grpc.stream_stream_rpc_method_handler(lambda requests, _: (b"\xff" for _ in requests))


async def test_who_answers_what_cannot_be_read_is_told_of_once_and_without_a_traceback(sender, collector):
    server = grpc.server(ThreadPoolExecutor(8), handlers=[Garbled()])
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    failures = lambda: sender.observed.registry.get_sample_value("allocscope_uplink_failures_total")  # noqa: E731
    try:
        with capture_logs() as log:
            async with running(sender.uplink(collector, address=address)):
                await asyncio.to_thread(until, lambda: failures() >= 3, "it was tried three times")
    finally:
        server.stop(0).wait()
    told = [line for line in log if line["log_level"] != "info"]
    assert [(line["event"], line["why"]) for line in told] == [
        ("nothing goes to the collector", "its answer cannot be read: what answers there?")
    ]


async def problem_in(log: list[Any]) -> str:
    """The first that is told."""
    found = lambda: next((line["why"] for line in log if line["event"] == "nothing goes to the collector"), None)  # noqa: E731
    return str(await asyncio.to_thread(until, found, "a problem is told"))


async def test_an_older_collector_gets_all_in_order(sender, collector):
    collector.takes_late = False
    await sender.close_batches(*[10] * 200)
    uplink = sender.uplink(collector)
    async with running(uplink):
        await asyncio.wait_for(uplink.drain(200), WAIT_S)
    assert [batch.sequence for batch in collector.batches] == list(range(1, 201))


async def test_where_it_cannot_be_kept_what_is_late_all_goes_in_order(sender, collector, monkeypatch):
    def full() -> None:
        raise OSError(28, "No space left on device")

    await sender.close_batches(*[10] * 100)
    monkeypatch.setattr(sender.spool, "postpone", full)
    uplink = sender.uplink(collector)
    async with running(uplink):
        await asyncio.wait_for(uplink.drain(100), WAIT_S)
    assert [batch.sequence for batch in collector.batches] == list(range(1, 101))


async def test_a_collector_that_is_slow_for_long_gets_what_is_new_first_too(sender, collector):
    collector.acknowledges = False
    await sender.close_batches(*[10] * 10)
    uplink = sender.uplink(collector)
    async with running(uplink):
        await came(collector, new=10)
        await sender.close_batches(*[10] * 80)
        uplink.wake()
        await came(collector, late_events=1)
        collector.acknowledges = True
        await sender.close_batches(10)
        uplink.wake()
        await asyncio.wait_for(uplink.drain(91), WAIT_S)
    assert collector.batches[-1].sequence == 91


async def test_while_the_disk_takes_nothing_the_collector_gets_what_there_is_and_jobs_are_told(
    sender, collector, monkeypatch
):
    def full(_: object) -> None:
        raise OSError(28, "No space left on device")

    job = Waiting()
    with monkeypatch.context() as disk:
        disk.setattr(sender.spool, "write", full)
        sender.intake.owe(job, 7)
        uplink = sender.uplink(collector)
        async with running(uplink):
            await sender.close_batches(10, 10)
            uplink.wake()
            await asyncio.wait_for(uplink.drain(2), WAIT_S)
    assert [batch.sequence for batch in collector.batches] == [1, 2]
    sender.outbox.tell(at_once=True)
    assert job.acknowledged == [7]
    await sender.close_batches(10)
    assert (sender.spool.next_sequence, sender.spool.batches) == (4, 1)


async def test_jobs_are_told_every_second_round_and_at_once_where_somebody_waits_for_it(sender):
    job = Waiting()
    for number in range(1, 7):
        sender.intake.owe(job, number)
        await sender.close_batches(10)
        sender.outbox.tell(at_once=number == 5)
    assert job.acknowledged == [2, 4, 5]
