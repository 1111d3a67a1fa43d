"""What a collector promises to daemons, over a real socket."""

import socket
import sqlite3

import grpc
import pytest

from allocscope.model import Event, EventKind, wire
from allocscope.proto.v1 import collector_service_pb2 as messages
from tests.collector.harness import END, Stream, batch, collector, now_us, process, reading, ref, sample, stream


def stored(running, number=1):
    """The numbers of an allocator's samples in the database, each as often as it is there."""
    database = sqlite3.connect(f"file:{running.database}?mode=ro", uri=True)
    try:
        query = """SELECT sequence FROM samples JOIN allocators USING (allocator_id)
                   WHERE process_id = ? ORDER BY sequence"""
        return [sequence for (sequence,) in database.execute(query, (f"{number:032x}",))]
    finally:
        database.close()


def test_a_daemon_is_told_where_to_go_on_and_then_what_is_stored(running):
    with stream(running.grpc, "n-first") as it:
        assert it.response() == messages.IngestResponse(acknowledged_sequence=0)
        it.batch(batch(1, sample(1), sample(2), number=11))
        it.batch(batch(2, sample(3), number=11))
        it.until(2)
        assert stored(running, 11) == [1, 2, 3]
    with stream(running.grpc, "n-first") as it:
        assert it.response().acknowledged_sequence == 2


def test_a_daemon_that_ends_its_stream_gets_its_last_acknowledgement_first(running):
    with stream(running.grpc, "n-end") as it:
        for number in range(1, 51):
            it.batch(batch(number, sample(number), number=12))
        it._requests.put(END)
        it.until(50)
        it.finish()
    assert stored(running, 12) == list(range(1, 51))


def test_the_first_request_must_be_the_hello(running):
    with stream(running.grpc, hello=False) as it:
        it.batch(batch(1))
        error = it.error()
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert error.details() == "the first request of a stream must be the hello"


@pytest.mark.parametrize(
    ("node", "daemon_id", "text"),
    [
        ("", "d", "hello.node has 0 characters; it must have 1 to 512"),
        ("n", "", "hello.daemon_id has 0 characters; it must have 1 to 512"),
        ("n" * 513, "d", "hello.node has 513 characters; it must have 1 to 512"),
    ],
)
def test_a_hello_must_say_who_it_is(running, node, daemon_id, text):
    with stream(running.grpc, node, daemon_id) as it:
        error = it.error()
    assert (error.code(), error.details()) == (grpc.StatusCode.INVALID_ARGUMENT, text)


@pytest.mark.parametrize("sequence", [0, 2**63])
def test_a_batch_must_be_numbered(running, sequence):
    with stream(running.grpc, f"n-{sequence}") as it:
        it.batch(batch(sequence))
        error = it.error()
    assert (error.code(), error.details()) == (
        grpc.StatusCode.INVALID_ARGUMENT,
        f"a batch is numbered {sequence}; they count from 1",
    )


def test_two_daemons_under_one_node_name_are_told_apart(running):
    with stream(running.grpc, "n-twice", "first") as first:
        first.response()
        with stream(running.grpc, "n-twice", "second") as second:
            error = second.error()
        assert error.code() is grpc.StatusCode.ALREADY_EXISTS
        assert error.details() == (
            "node 'n-twice' is reported by daemon first, whose stream is open, so daemon second may not: "
            "two daemons have one node name (give one of them another: --node, ALLOCSCOPE_NODE), or a spool was copied"
        )
        first.batch(batch(1, sample(1), number=13))
        first.until(1)
        first.finish()
    with stream(running.grpc, "n-twice", "second") as second:
        assert second.response().acknowledged_sequence == 0


def test_a_daemon_that_comes_again_replaces_its_old_stream(running):
    with stream(running.grpc, "n-again") as old:
        old.response()
        with stream(running.grpc, "n-again") as new:
            new.response()
            assert old.error().code() is grpc.StatusCode.ABORTED
            new.batch(batch(1, sample(1), number=14))
            new.until(1)
    assert stored(running, 14) == [1]


def test_what_is_wrong_in_a_batch_is_refused_by_name_and_the_rest_is_stored(running):
    liar = wire.process_to_wire(process(16))
    liar.rank, liar.world_size = 8, 8
    ragged = wire.chunk_to_wire(next(iter_chunks(2, 3)))
    del ragged.time_us[1]
    stranger = wire.chunk_to_wire(next(iter_chunks(4)))
    stranger.allocator.process_id = "f" * 32
    beyond = wire.chunk_to_wire(next(iter_chunks(5)))
    beyond.reserved_bytes[0] = 2**64 - 1
    good = batch(1, sample(1), number=15)
    good.processes.append(liar)
    good.samples.extend([ragged, stranger, beyond])
    good.events.add(process_id=f"{15:032x}", sequence=9, time_us=1, kind=0)
    with stream(running.grpc, "n-partial") as it:
        it.batch(good)
        said = [rejection for response in it.until(1) for rejection in response.rejections]
    assert [(r.sequence, r.reason, r.count) for r in said] == [
        (1, "rank_out_of_range", 1),
        (1, "column_length", 2),
        (1, "unknown_process", 1),
        (1, "out_of_range", 1),
        (1, "unknown_event", 1),
    ]
    assert said[0].message == "job 'train': rank 8 of a world of 8 (ranks count from 0)"
    assert stored(running, 15) == [1]
    exposed = running.get("/metrics").text
    assert 'allocscope_samples_rejected_total{reason="column_length"} 2.0' in exposed


def iter_chunks(*sequences):
    from allocscope.model import chunks

    return chunks(ref(15), [sample(sequence) for sequence in sequences])


def test_garbage_on_the_port_ends_that_connection_only(running):
    host, port = running.grpc.split(":")
    with socket.create_connection((host, int(port)), timeout=10) as garbage:
        garbage.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(range(256)) * 64)
        with stream(running.grpc, "n-garbage") as it:
            it.batch(batch(1, sample(1), number=17))
            it.until(1)
    assert stored(running, 17) == [1]


def test_a_clock_that_is_minutes_off_is_measured_and_nothing_is_thrown_away(running):
    with stream(running.grpc, "n-clock") as it:
        it.batch(batch(1, sample(1), number=18), sent_us=now_us() - 300_000_000)
        it.until(1)
        nodes = {node["node"]: node for node in running.get("/api/v1/nodes").json()["items"]}
        assert nodes["n-clock"]["clock_offset_s"] == pytest.approx(-300, abs=5)
        exposed = running.get("/metrics").text
    line = next(
        line for line in exposed.splitlines() if line.startswith('allocscope_node_clock_offset_seconds{node="n-clock"}')
    )
    assert float(line.split()[1]) == pytest.approx(-300, abs=5)
    assert "disagrees" in running.wait_until_said("clock disagrees")
    assert stored(running, 18) == [1]


def test_what_was_sent_before_a_kill_is_there_once_after_it(tmp_path):
    """A kill -9 in the middle of a stream: the daemon goes on from the last acknowledgement, and nothing is lost or twice."""
    batches = [batch(n, *(sample(5 * n + k) for k in range(5))) for n in range(1, 401)]
    with collector(tmp_path) as first, stream(first.grpc) as it:
        for one in batches:
            it.batch(one)
        it.until(20)
        first.kill()
        acknowledged = 0
        while isinstance(answer := it._responses.get(timeout=20), messages.IngestResponse):
            acknowledged = answer.acknowledged_sequence
    with collector(tmp_path) as second:
        it = Stream(second.grpc)
        told = it.response().acknowledged_sequence
        assert told >= max(acknowledged, 20)
        for one in batches[10:]:  # from before what was acknowledged: its acknowledgement may have been lost
            it.batch(one)
        it.until(400)
        it.finish()
        assert stored(second) == list(range(5, 2005))
        assert second.get("/api/v1/jobs/train").json()["job"] == "train"


def test_an_oom_and_the_end_of_a_process_are_seen(running):
    oom = Event(
        f"{19:032x}",
        2,
        1_700_000_002_000_000,
        EventKind.OOM,
        "GPU-19",
        requested_bytes=1 << 30,
        message="CUDA out of memory.",
    )
    stopped = Event(f"{19:032x}", 3, 1_700_000_003_000_000, EventKind.STOPPED)
    with stream(running.grpc, "n-oom") as it:
        it.batch(batch(1, sample(1), number=19, job="dies"))
        it.batch(batch(2, number=19, job="dies", events=[wire.event_to_wire(oom)]))
        it.until(2)
        running.wait_until_said("alert=AllocscopeOOM")
        it.batch(batch(3, number=19, job="dies", events=[wire.event_to_wire(stopped)]))
        it.until(3)
    job = running.get("/api/v1/jobs/dies").json()
    assert (job["live"], job["state"]) == (False, None)
    assert [(event["kind"], event["requested_bytes"]) for event in job["events"]] == [
        ("stopped", None),
        ("oom", 1 << 30),
    ]
    [alert] = running.get("/api/v1/alerts", job="dies").json()["items"]
    assert alert["state"] == "firing", "that it ran out of memory is news for a while after its end"
    assert (alert["name"], alert["severity"]) == ("AllocscopeOOM", "warning")
    assert (alert["labels"]["job"], alert["labels"]["rank"], alert["labels"]["uuid"]) == ("dies", "18", "GPU-19")


def test_what_was_overtaken_is_stored_beside_what_is_new_and_says_nothing_of_how_things_are_now(running):
    newer, older = reading(77, free_bytes=2 << 30), reading(77, free_bytes=1 << 30)
    with stream(running.grpc, "n-late") as it, stream(running.grpc, "n-late", late=True) as late:
        assert (it.response().acknowledged_sequence, late.response()) == (0, messages.IngestResponse())
        it.batch(batch(9, sample(5), number=77, job="now", devices=[wire.reading_to_wire(newer)], unused_before=8))
        it.until(9)
        for number in (1, 2, 3, 4):
            late.batch(batch(number, sample(number), number=77, job="then", devices=[wire.reading_to_wire(older)]))
        late.until(4)
    assert stored(running, 77) == [1, 2, 3, 4, 5]
    devices = {device["uuid"]: device for device in running.get("/api/v1/devices").json()["items"]}
    assert devices[newer.device.uuid]["free_bytes"] == 2 << 30
    assert "then" not in {job["job"] for job in running.get("/api/v1/jobs").json()["items"]}
    with stream(running.grpc, "n-late") as it:
        assert it.response().acknowledged_sequence == 9


def test_a_stream_of_what_was_overtaken_begins_with_the_hello_too(running):
    with stream(running.grpc, hello=False, late=True) as it:
        it.batch(batch(1))
        error = it.error()
    assert (error.code(), error.details()) == (
        grpc.StatusCode.INVALID_ARGUMENT,
        "the first request of a stream must be the hello",
    )
