"""Captures toward a collector that takes them, or does not: each gets there whole, and none holds up another, or the batches."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import grpc
import pytest
from structlog.testing import capture_logs

from allocscope.daemon import capture_uplink as capture_uplink_module
from allocscope.daemon.capture_losses import CaptureLosses
from allocscope.daemon.capture_spool import CaptureSpool
from allocscope.daemon.capture_thread import CaptureThread
from allocscope.daemon.capture_uplink import CaptureUplink
from allocscope.daemon.collector_way import CollectorWay
from allocscope.daemon.observed import Observed
from allocscope.daemon.packing import Packing
from allocscope.model import CaptureReason
from allocscope.model.wire import capture_to_wire, process_to_wire
from allocscope.proto.v1.capture_service_pb2 import CaptureHello
from tests.daemon.capture_fakes import ID, FakeCaptures, dropped, note
from tests.daemon.fakes import WAIT_S, FakeCollector, process

A, B = "a" * 32, "b" * 32
RANDOM = os.urandom(3 << 20)
"""Does not shrink: four pieces."""


@pytest.fixture(autouse=True)
def quickly(monkeypatch):
    for name in ("FIRST_BACKOFF_S", "LONGEST_BACKOFF_S", "REFUSED_BACKOFF_S"):
        monkeypatch.setattr(capture_uplink_module, name, 0.01)


@pytest.fixture
def captures():
    return FakeCaptures()


@pytest.fixture
def collector(captures):
    fake = FakeCollector(also=[captures.add_to])
    yield fake
    captures.go_on.set()
    fake.stop()


class Sender:
    """An uplink and what it sends from."""

    def __init__(self, folder: Path, address: str, bytes_per_s: int = 1 << 40) -> None:
        self.observed, self.thread = Observed(), CaptureThread()
        self.losses = CaptureLosses(self.observed)
        self.spool = CaptureSpool(folder, 1 << 30, self.losses)
        self.uplink = CaptureUplink(
            CollectorWay(address),
            "node-1",
            self.spool,
            self.thread,
            self.observed,
            self.losses,
            bytes_per_s=bytes_per_s,
        )

    def add(self, capture_id: str = ID, snapshot: bytes | None = None, **changes) -> None:
        hello = CaptureHello(
            capture=capture_to_wire(note(process(), capture_id, **changes).capture), process=process_to_wire(process())
        )
        file = None
        if snapshot is not None:
            path = self.spool.folder.parent / "snapshot"
            path.write_bytes(snapshot)
            file = path.open("rb")
        packing = Packing(self.spool, hello, file, largest_bytes=1 << 30)
        while packing.step():
            pass
        packing.finish()
        self.uplink.wake()

    def failures(self) -> float:
        return self.observed.registry.get_sample_value("allocscope_capture_uplink_failures_total") or 0

    @asynccontextmanager
    async def sending(self) -> AsyncIterator[None]:
        running = asyncio.create_task(self.uplink.run())
        try:
            yield
        finally:
            running.cancel()
            with suppress(asyncio.CancelledError):
                await running
            self.thread.close()

    async def until(self, holds) -> None:
        async with asyncio.timeout(WAIT_S):
            while not holds():  # noqa: ASYNC110 (what a server's thread does)
                await asyncio.sleep(0.005)

    async def until_sent(self) -> None:
        await self.until(lambda: not len(self.spool))


async def test_a_capture_is_sent_in_pieces_and_removed_once_it_is_kept(tmp_path, collector, captures):
    sender = Sender(tmp_path / "spool", collector.address)
    async with sender.sending():
        sender.add(A, RANDOM)
        sender.add(B, b"snapshot" * 1000)
        sender.add(ID)
        await sender.until_sent()
    assert {id_: len(kept.packed) > 0 for id_, kept in captures.kept.items()} == {A: True, B: True, ID: False}
    assert captures.kept[A].snapshot == RANDOM
    assert captures.kept[A].hello.node == "node-1"
    assert captures.kept[A].hello.capture.snapshot_bytes == len(RANDOM)
    assert max(captures.pieces) <= 1 << 20
    assert list(sender.spool.folder.iterdir()) == []
    assert len(captures.hellos) == 3


async def test_what_is_kept_already_is_done_with_at_once(tmp_path, collector, captures):
    """Though it is not sent whole: a crash came between the answer and the removal."""
    sender = Sender(tmp_path / "spool", collector.address)
    async with sender.sending():
        for _ in range(5):
            sender.add(A, RANDOM)
            await sender.until_sent()
    assert captures.kept[A].snapshot == RANDOM
    assert len(captures.hellos) == 5
    assert dropped(sender.observed) == {}


@pytest.mark.parametrize(
    ("code", "reason"),
    [(grpc.StatusCode.INVALID_ARGUMENT, "refused"), (grpc.StatusCode.RESOURCE_EXHAUSTED, "too_large")],
)
async def test_of_a_snapshot_that_is_never_taken_the_rest_is_sent_and_says_why(
    tmp_path, collector, captures, code, reason
):
    captures.refuse = lambda hello: (code, "no") if hello.capture.HasField("snapshot_bytes") else None
    sender = Sender(tmp_path / "spool", collector.address)
    async with sender.sending():
        sender.add(A, RANDOM)
        await sender.until_sent()
    hello = captures.kept[A].hello
    assert (hello.capture.HasField("snapshot_bytes"), hello.capture.problem) == (False, "the collector refused it: no")
    assert hello.process == process_to_wire(process())
    assert dropped(sender.observed) == {reason: 1}


async def test_what_is_never_taken_at_all_is_dropped_and_counted(tmp_path, collector, captures):
    captures.refuse = lambda _: (grpc.StatusCode.INVALID_ARGUMENT, "no")
    sender = Sender(tmp_path / "spool", collector.address)
    async with sender.sending():
        sender.add(A, RANDOM)
        await sender.until_sent()
    assert (captures.kept, dropped(sender.observed)) == ({}, {"refused": 2})


@pytest.mark.parametrize(
    "code",
    [
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.PERMISSION_DENIED,
    ],
)
async def test_any_other_refusal_is_tried_again(tmp_path, collector, captures, code):
    captures.refuse = lambda _: (code, "not now") if len(captures.hellos) < 4 else None
    sender = Sender(tmp_path / "spool", collector.address)
    async with sender.sending():
        sender.add(A, RANDOM)
        await sender.until_sent()
    assert captures.kept[A].snapshot == RANDOM
    assert dropped(sender.observed) == {}


async def test_one_that_fails_again_and_again_holds_up_no_other(tmp_path, collector, captures):
    captures.refuse = lambda hello: (grpc.StatusCode.INTERNAL, "a bug") if hello.capture.capture_id == A else None
    sender = Sender(tmp_path / "spool", collector.address)
    sender.add(A, b"one")
    for letter in "bcdef":
        sender.add(letter * 32, b"another")
    async with sender.sending():
        await sender.until(lambda: [capture.capture_id for capture in sender.spool.captures()] == [A])
    assert sorted(captures.kept) == [letter * 32 for letter in "bcdef"]


async def test_what_somebody_waits_for_goes_first(tmp_path, collector, captures):
    sender = Sender(tmp_path / "spool", collector.address)
    for letter, reason in (("a", CaptureReason.OOM), ("b", CaptureReason.FORECAST), ("c", CaptureReason.ASKED)):
        sender.add(letter * 32, b"snapshot", reason=reason)
    async with sender.sending():
        await sender.until_sent()
    assert [hello.capture.capture_id[0] for hello in captures.hellos] == ["c", "a", "b"]


async def test_a_broken_upload_begins_anew(tmp_path, captures):
    first = FakeCollector(also=[captures.add_to])
    captures.go_on.clear()
    sender = Sender(tmp_path / "spool", first.address)
    async with sender.sending():
        sender.add(A, RANDOM)
        await sender.until(lambda: len(captures.pieces) == 1)
        stopped = asyncio.get_running_loop().run_in_executor(None, first.stop)
        captures.go_on.set()
        await stopped
        again = FakeCaptures()
        second = FakeCollector(first.address, also=[again.add_to])
        try:
            await sender.until_sent()
            assert again.kept[A].snapshot == RANDOM
        finally:
            second.stop()
    assert dropped(sender.observed) == {}


async def test_an_older_collector_is_told_of_once_and_gets_them_when_it_is_renewed(tmp_path, captures):
    older = FakeCollector()
    sender = Sender(tmp_path / "spool", older.address)
    with capture_logs() as told:
        async with sender.sending():
            sender.add(A, b"snapshot")
            await sender.until(lambda: sender.failures() >= 3)
            older.stop()
            renewed = FakeCollector(older.address, also=[captures.add_to])
            try:
                await sender.until_sent()
            finally:
                renewed.stop()
    assert captures.kept[A].snapshot == b"snapshot"
    problems = [line["why"] for line in told if line["event"] == "no captures go to the collector"]
    assert sum("it is older than this daemon and takes no captures" in why for why in problems) == 1


async def test_another_captures_answer_is_no_answer(tmp_path, collector, captures, monkeypatch):
    keep = captures.Keep

    def confused(requests, context):
        response = keep(requests, context)
        if len(captures.hellos) < 3:
            response.capture_id = B
        return response

    monkeypatch.setattr(captures, "Keep", confused)
    sender = Sender(tmp_path / "spool", collector.address)
    fake = FakeCollector(also=[captures.add_to])
    sender.uplink._way = CollectorWay(fake.address)
    try:
        async with sender.sending():
            sender.add(A, b"snapshot")
            await sender.until_sent()
    finally:
        fake.stop()
    assert len(captures.hellos) == 3


async def test_it_is_no_faster_than_told(tmp_path, collector, captures):
    sender = Sender(tmp_path / "spool", collector.address, bytes_per_s=8 << 20)
    began_s = time.monotonic()
    async with sender.sending():
        sender.add(A, RANDOM)
        await sender.until_sent()
    assert time.monotonic() - began_s >= len(captures.kept[A].packed) / (8 << 20)


async def test_a_daemon_that_ends_does_not_wait_for_what_is_on_its_way(tmp_path, collector, captures):
    sender = Sender(tmp_path / "spool", collector.address, bytes_per_s=1)
    async with sender.sending():
        sender.add(A, RANDOM)
        await sender.until(lambda: len(captures.pieces) == 1)
    assert [capture.capture_id for capture in sender.spool.captures()] == [A]


async def test_a_disk_that_cannot_remove_it_sends_it_again_and_it_is_known(tmp_path, collector, captures, monkeypatch):
    sender = Sender(tmp_path / "spool", collector.address)
    remove, refusals = sender.spool.remove, iter([OSError(5, "Input/output error")] * 2)

    def broken(capture):
        for error in refusals:
            raise error
        remove(capture)

    monkeypatch.setattr(sender.spool, "remove", broken)
    async with sender.sending():
        sender.add(A, b"snapshot")
        await sender.until_sent()
    assert (len(captures.hellos), list(captures.kept)) == (3, [A])
