"""What a collector promises to who brings a capture, over a real socket: whole or not at all, once, bounded."""

import gzip
import os
import queue
import resource
import signal
import sqlite3
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import replace

import grpc
import pytest

from allocscope.model import CaptureReason
from allocscope.proto.v1 import capture_service_pb2 as messages
from allocscope.proto.v1 import capture_service_pb2_grpc as services
from tests.collector.harness import batch, collector, process, sample, stream
from tests.collector.uploads import (
    PIECE_BYTES,
    SNAPSHOT,
    bring,
    capture,
    hello,
    kept,
    memory_bytes,
    new_id,
    pieces,
    refusal,
    rows,
    send,
    state,
)
from tests.e2e.processes import until

PACKED = gzip.compress(SNAPSHOT)
INVALID, EXHAUSTED = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED
LARGEST_BYTES, LIMIT_BYTES = 8 << 20, 6 << 20


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A collector that keeps little."""
    flags = (f"--capture-largest-bytes={LARGEST_BYTES}", f"--captures-limit-bytes={LIMIT_BYTES}")
    with collector(tmp_path_factory.mktemp("small"), *flags) as it:
        yield it
    assert [line for line in it.said if "Traceback" in line or "[error" in line] == []


def nothing_is_left(running):
    """Of calls that brought nothing; the collector takes it away as soon as they end."""
    left = "SELECT count(*) FROM capture_pieces WHERE upload_number NOT IN (SELECT upload_number FROM captures WHERE state = 'kept')"
    until(lambda: rows(running.database, left) == [(0,)], "pieces of broken calls are gone")
    until(lambda: rows(running.database, "SELECT * FROM capture_uploads") == [], "uploads of broken calls are gone")


@pytest.mark.parametrize("each", [997, PIECE_BYTES, 3 * PIECE_BYTES], ids=["crumbs", "as they should be", "large"])
def test_a_capture_is_kept_as_it_came_however_it_is_cut(running, each):
    """Its rows are of at most 1 MiB all the same, so that nobody ever holds more of it."""
    snapshot = os.urandom(3 * PIECE_BYTES + 5)
    packed, one = gzip.compress(snapshot, 1), new_id()
    send(running.grpc, [hello(capture(one, 21, snapshot_bytes=len(snapshot)), process(21)), *pieces(packed, each)])
    assert kept(running.database, one) == packed
    lengths = "SELECT length(content) FROM capture_pieces JOIN captures USING (upload_number) WHERE capture_id = ? ORDER BY piece_number"
    assert [length for (length,) in rows(running.database, lengths, one)][:-1] == [PIECE_BYTES] * 3
    nothing_is_left(running)


def test_what_is_known_of_a_capture_is_kept_with_it_and_so_is_a_process_that_nobody_else_described(running):
    one = new_id()
    bring(running.grpc, one, 22, job="killed at once", tensors=True, problem="the history is of the last 5 entries")
    columns = "process_id, job, rank, node, device_uuid, reason, tensors, snapshot_bytes, history_entries, stored_bytes"
    [row] = rows(running.database, f"SELECT {columns} FROM captures WHERE capture_id = ?", one)
    assert row[:-1] == (f"{22:032x}", "killed at once", 21, "n1", "GPU-22", "oom", 1, len(SNAPSHOT), 5)
    assert state(running.database, one) == ("kept", "the history is of the last 5 entries")
    job = running.get("/api/v1/jobs/killed%20at%20once").json()
    assert [known["process_id"] for known in job["processes"]] == [f"{22:032x}"]


def test_a_capture_without_a_snapshot_says_why(running):
    one = new_id()
    empty = capture(one, 23, snapshot_bytes=None, history_entries=None, problem="x" * 5000)
    assert send(running.grpc, [hello(empty, process(23))]).capture_id == one
    assert state(running.database, one) == ("failed", "x" * 2000)
    assert kept(running.database, one) is None


def test_who_answers_for_a_process_that_has_gone_need_not_describe_it(running):
    with stream(running.grpc, "n-gone") as it:
        it.batch(batch(1, sample(1), number=24, job="gone"))
        it.until(1)
    one = new_id()
    answer = capture(one, 24, snapshot_bytes=None, problem="it is not there any more")
    bare = hello(answer, process(24), "n-gone")
    bare.hello.ClearField("process")
    send(running.grpc, [bare])
    assert rows(running.database, "SELECT job, rank, state FROM captures WHERE capture_id = ?", one) == [
        ("gone", 23, "failed")
    ]


def test_one_that_is_kept_is_answered_at_once_and_stays_as_it_was(running):
    one = new_id()
    bring(running.grpc, one, 25)
    other = os.urandom(100)
    bring(running.grpc, one, 25, snapshot=other)
    first = hello(capture(one, 25), process(25))
    assert send(running.grpc, [first]).capture_id == one, "without waiting for the snapshot"
    assert gzip.decompress(kept(running.database, one) or b"") == SNAPSHOT
    nothing_is_left(running)


def test_two_calls_with_one_capture_at_once_are_both_answered_and_it_is_kept_once(running):
    one = new_id()
    snapshots = [bytes([number]) * 5 * PIECE_BYTES for number in range(4)]
    ready = threading.Barrier(4)

    def bring_one(snapshot: bytes) -> None:
        ready.wait(timeout=30)
        bring(running.grpc, one, 26, snapshot=snapshot)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(bring_one, snapshots))
    assert gzip.decompress(kept(running.database, one) or b"") in snapshots
    assert rows(running.database, "SELECT count(*) FROM captures WHERE capture_id = ?", one) == [(1,)]
    nothing_is_left(running)


def test_two_collectors_on_one_database_keep_it_once(running, tmp_path):
    one = new_id()
    with collector(tmp_path, f"--database=sqlite:///{running.database}") as other:
        with ThreadPoolExecutor(4) as pool:
            calls = [pool.submit(bring, at.grpc, one, 27) for at in (running, other) * 3]
            for call in calls:
                call.result()
        assert gzip.decompress(kept(running.database, one) or b"") == SNAPSHOT
        bring(other.grpc, two := new_id(), 27)
        assert running.get("/metrics").status_code == 200
    assert state(running.database, two) == ("kept", None)


def damaged(**more) -> list[messages.KeepRequest]:
    return [hello(capture("a" * 32, 28, **more), process(28))]


@pytest.mark.parametrize(
    ("requests", "code", "says"),
    [
        ([], INVALID, "the first request of a call must be the hello"),
        (pieces(PACKED), INVALID, "the first request of a call must be the hello"),
        ([hello(capture("a" * 32, 28), process(28), "")], INVALID, "hello.node has 0 characters; it must have 1 to 512"),
        ([hello(capture("../etc/passwd", 28), process(28))], INVALID, "32 hex digits are expected"),
        ([hello(replace(capture("a" * 32, 28), process_id="x" * 600), process(28))], INVALID, "a name of 600 characters"),
        ([hello(capture("a" * 32, 28), process(29))], INVALID, "is of process"),
        ([hello(capture("a" * 32, 28), process(28, "x" * 600))], INVALID, "a name of 600 characters"),
        ([*damaged(), *damaged()], INVALID, "a second hello in one call; take another"),
        (damaged(), INVALID, "its gzip stream ends in the middle; take another"),
        ([*damaged(), *pieces(PACKED[:-1])], INVALID, "its gzip stream ends in the middle; take another"),
        ([*damaged(), *pieces(PACKED + b"x")], INVALID, "something follows the end of its gzip stream; take another"),
        ([*damaged(), *pieces(SNAPSHOT)], INVALID, "it is damaged gzip"),
        ([*damaged(snapshot_bytes=5), *pieces(PACKED)], INVALID, "bytes, and 5 were announced; take another"),
        ([*damaged(snapshot_bytes=None), *pieces(PACKED)], INVALID, "it is announced without a snapshot, and one comes"),
        (
            damaged(snapshot_bytes=LARGEST_BYTES + 1),
            EXHAUSTED,
            "its snapshot has 8388609 bytes, and at most 8388608 are kept (the collector's capture_largest_bytes); raise that",
        ),
        (
            [*damaged(), *pieces(gzip.compress(bytes(LARGEST_BYTES + 1)))],
            EXHAUSTED,
            "it unpacks to more than 8388608 bytes (the collector's capture_largest_bytes); raise that, or order one",
        ),
        (
            [*damaged(snapshot_bytes=LIMIT_BYTES + 5), *pieces(gzip.compress(os.urandom(LIMIT_BYTES + 5), 1))],
            EXHAUSTED,
            "it takes more than the 6291456 bytes that all captures together may take",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_kept_is_refused_with_what_to_do_and_leaves_nothing(small, requests, code, says):
    found, text = refusal(small.grpc, requests)
    assert (found, says in text) == (code, True), text
    assert state(small.database, "a" * 32) is None
    nothing_is_left(small)


def test_a_bomb_costs_a_moment_and_no_memory(small):
    """A gigabyte that a megabyte unpacks to."""
    bomb = gzip.compress(bytes(1 << 30), 9)
    before = memory_bytes(small)
    code, text = refusal(small.grpc, [hello(capture("b" * 32, 30), process(30)), *pieces(bomb)])
    assert code is EXHAUSTED
    assert text.startswith(f"capture {'b' * 32}: it unpacks to more than 8388608 bytes")
    assert memory_bytes(small) < before + (32 << 20)


def test_the_oldest_snapshots_make_room(small):
    ids = [new_id() for _ in range(4)]
    for number, one in enumerate(ids):
        bring(
            small.grpc, one, 31, snapshot=os.urandom(2 << 20), reason=CaptureReason.ASKED, device_uuid=f"GPU-{number}"
        )
    assert [(state(small.database, one) or ("",))[0] for one in ids] == ["dropped", "dropped", "kept", "kept"]
    assert "allocscope_captures_limit_bytes 6.291456e+06" in small.get("/metrics").text
    nothing_is_left(small)


def test_it_says_what_came_and_what_was_refused(small):
    bring(small.grpc, new_id(), 32, reason=CaptureReason.ASKED)
    refusal(small.grpc, [hello(capture(new_id(), 32), process(32)), *pieces(b"no gzip")])
    exposed = small.get("/metrics").text
    for line in (
        'allocscope_captures_total{outcome="kept",reason="asked"}',
        'allocscope_captures_total{outcome="refused",reason="oom"}',
        "allocscope_capture_keep_seconds_count",
        "allocscope_capture_keep_failures_total",
        "allocscope_captures_stored_bytes",
    ):
        value = next(float(found.rpartition(" ")[2]) for found in exposed.splitlines() if found.startswith(line))
        assert value >= 1, line


class Call:
    """A call that a test feeds piece by piece."""

    def __init__(self, address: str) -> None:
        self.channel = grpc.insecure_channel(address)
        self._requests: queue.SimpleQueue[messages.KeepRequest | None] = queue.SimpleQueue()
        self.answer = services.CaptureServiceStub(self.channel).Keep.future(iter(self._requests.get, None), timeout=120)

    def send(self, *requests: messages.KeepRequest) -> None:
        for request in requests:
            self._requests.put(request)

    def end(self) -> None:
        self._requests.put(None)


@contextmanager
def call(address: str):
    it = Call(address)
    try:
        yield it
    finally:
        it.answer.cancel()
        it.end()
        it.channel.close()


def begun(running, capture_id: str):
    """Whether some of it is in the database."""
    query = "SELECT count(*) FROM capture_pieces JOIN capture_uploads USING (upload_number) WHERE capture_id = ?"
    return rows(running.database, query, capture_id)[0][0] >= 2


def test_a_call_that_breaks_leaves_nothing_and_is_made_again(running):
    one, snapshot = new_id(), os.urandom(5 * PIECE_BYTES)
    whole = [hello(capture(one, 33, snapshot_bytes=len(snapshot)), process(33)), *pieces(gzip.compress(snapshot, 1))]
    with call(running.grpc) as broken:
        broken.send(*whole[:4])
        until(lambda: begun(running, one), "it is under way")
    assert state(running.database, one) is None
    nothing_is_left(running)
    send(running.grpc, whole)
    assert gzip.decompress(kept(running.database, one) or b"") == snapshot


def test_a_collector_that_is_killed_in_the_middle_keeps_what_it_answered_for_and_nothing_else(tmp_path):
    first, second, snapshot = new_id(), new_id(), os.urandom(5 * PIECE_BYTES)
    whole = [hello(capture(second, 34, snapshot_bytes=len(snapshot)), process(34)), *pieces(gzip.compress(snapshot, 1))]
    with collector(tmp_path) as before:
        bring(before.grpc, first, 34)
        with call(before.grpc) as broken:
            broken.send(*whole[:4])
            until(lambda: begun(before, second), "it is under way")
            before.kill()
    with closing(sqlite3.connect(before.database)) as connection, connection:
        connection.execute("UPDATE capture_uploads SET touched_us = touched_us - 3600000000")  # an hour later
    with collector(tmp_path) as after:
        assert kept(after.database, first) == kept(before.database, first) is not None
        assert state(after.database, second) is None
        nothing_is_left(after)
        send(after.grpc, whole)
        assert gzip.decompress(kept(after.database, second) or b"") == snapshot


def test_one_that_is_under_way_when_the_collector_ends_is_to_be_sent_again(tmp_path):
    one = new_id()
    with collector(tmp_path) as it, call(it.grpc) as broken:
        broken.send(hello(capture(one, 35), process(35)), messages.KeepRequest(piece=PACKED[:100]))
        until(lambda: rows(it.database, "SELECT count(*) FROM capture_uploads") == [(1,)], "it is under way")
        assert it.stop(signal.SIGTERM) == 0
        error = broken.answer.exception(timeout=20)
    assert isinstance(error, grpc.RpcError)
    assert error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
    assert state(it.database, one) is None


def test_while_the_database_takes_nothing_a_capture_is_to_be_sent_again(running):
    one = new_id()
    whole = [hello(capture(one, 36), process(36)), *pieces(PACKED)]
    with closing(sqlite3.connect(running.database, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        code, text = refusal(running.grpc, whole)
    assert (code, text.partition(":")[0]) == (grpc.StatusCode.UNAVAILABLE, "the database is busy")
    send(running.grpc, whole)
    assert state(running.database, one) == ("kept", None)


def test_a_disk_that_takes_no_more_costs_a_capture_nothing_but_another_try(tmp_path):
    one, snapshot = new_id(), os.urandom(8 * PIECE_BYTES)
    whole = [hello(capture(one, 39, snapshot_bytes=len(snapshot)), process(39)), *pieces(gzip.compress(snapshot, 1))]
    with collector(tmp_path) as it:
        limits = resource.prlimit(it.process.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(it.process.pid, resource.RLIMIT_FSIZE, (3 * PIECE_BYTES, limits[1]))
        code, _ = refusal(it.grpc, whole)
        assert code is grpc.StatusCode.UNAVAILABLE
        assert state(it.database, one) is None
        resource.prlimit(it.process.pid, resource.RLIMIT_FSIZE, limits)
        send(it.grpc, whole)
        assert gzip.decompress(kept(it.database, one) or b"") == snapshot


def test_samples_are_stored_while_captures_come_in(running):
    snapshot = os.urandom(24 * PIECE_BYTES)
    whole = [
        hello(capture(new_id(), 37, snapshot_bytes=len(snapshot)), process(37)),
        *pieces(gzip.compress(snapshot, 1)),
    ]
    with stream(running.grpc, "n-beside") as it, call(running.grpc) as beside:
        it.response()
        beside.send(*whole)
        beside.end()
        acknowledged = 0
        while not beside.answer.done():
            acknowledged += 1
            it.batch(batch(acknowledged, sample(acknowledged), number=38))
            it.until(acknowledged)
        beside.answer.result()
    assert acknowledged >= 10
