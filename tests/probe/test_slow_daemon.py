"""A daemon that takes slowly, not at all, or comes and goes: the job never waits, and what it cannot keep is given up and counted."""

import os
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from allocscope.model import AllocatorRef, BlockGroup, BlockMap, Event, EventKind, Pool, Process, Sample, SizeClass
from allocscope.probe import uplink as uplink_module
from allocscope.probe.call import (
    CONTINUATION,
    DATA,
    DEFAULT_WINDOW,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    PING,
    RST_STREAM,
)
from allocscope.probe.uplink import Uplink
from tests.probe.peer import Peer, acknowledgement, frame, headers
from tests.probe.receiver import LONG_S, Receiver, numbers_in

PROCESS = Process(process_id="a1" * 16, job="train", pid=7, host="node", started_us=1)
REF = AllocatorRef(PROCESS.process_id, "GPU-1")
GROUP = BlockGroup(
    pool=Pool.LARGE, stream=0, private_pool=None, expandable=False, segment_count=1, reserved_bytes=10,
    requested_bytes=6, rounding_bytes=1, allocated_bytes=7, awaiting_free_bytes=0, stranded_bytes=3, releasable_bytes=0,
    private_bytes=0, free_stranded=(SizeClass(3, 1, 3, 3),), free_releasable=(), live=(SizeClass(6, 1, 6, 6),),
)  # fmt: skip
MANY_GROUPS = (GROUP,) * 1000
"""A block map of 37 KB: two of them fill the window that HTTP/2 begins with."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "d.sock"


@pytest.fixture
def peer(path: Path) -> Iterator[Peer]:
    with Peer(path) as made:
        yield made


@pytest.fixture
def uplink(path: Path) -> Iterator[Uplink]:
    made = Uplink(str(path), PROCESS)
    yield made
    made.close(0)


def block_map(uplink: Uplink, groups: tuple[BlockGroup, ...] = MANY_GROUPS) -> None:
    uplink.block_map(REF, BlockMap(uplink.next_sequence(), 5, groups))


def sample(uplink: Uplink) -> None:
    sequence = uplink.next_sequence()
    uplink.sample(REF, Sample(sequence, 1000 + sequence, allocated_bytes=sequence))


def event(uplink: Uplink) -> None:
    uplink.event(Event(PROCESS.process_id, uplink.next_sequence(), 1000, EventKind.OOM, requested_bytes=5))


def wait_until_empty(uplink: Uplink) -> None:
    with uplink._changed:
        assert uplink._changed.wait_for(lambda: len(uplink._ring) == 0, LONG_S)


# room by the byte


@pytest.mark.parametrize("backlog_bytes", [1, 1000, uplink_module.LONGEST_BACKLOG_BYTES])
def test_the_window_is_filled_to_the_byte_and_then_as_it_is_granted(path, peer, uplink, monkeypatch, backlog_bytes):
    monkeypatch.setattr(uplink_module, "LONGEST_BACKLOG_BYTES", backlog_bytes)
    for _ in range(20):
        block_map(uplink)
    uplink.start()
    peer.accept()
    peer.take_data(DEFAULT_WINDOW)
    expected = DEFAULT_WINDOW
    assert peer.settle() == expected
    for size in (1, 4, 1, 16_384, 16_385, 30_000, 7):
        peer.grant(size)
        expected += size
        assert peer.settle() == expected
    assert uplink._ring.has_waiting
    peer.grant(1 << 30)
    while 20 not in [n for request in peer.requests()[-1:] for n in numbers_in(request)]:
        peer.take_request()
    assert [n for request in peer.requests() for n in numbers_in(request)] == list(range(1, 21))
    peer.send(headers(), acknowledgement(20))
    wait_until_empty(uplink)


def test_room_in_the_stream_alone_or_in_the_connection_alone_is_none(peer, uplink):
    for _ in range(3):
        block_map(uplink)
    uplink.start()
    peer.accept()
    peer.take_data(DEFAULT_WINDOW)
    for stream, more in ((0, 0), (1, 100)):
        peer.send(frame(8, 0, stream, struct.pack(">I", 100)))
        assert peer.settle() == DEFAULT_WINDOW + more


def test_what_is_handed_on_while_the_window_is_full_goes_out_in_order_once_there_is_room(peer, uplink):
    block_map(uplink)
    block_map(uplink)
    uplink.start()
    peer.accept()
    peer.take_data(DEFAULT_WINDOW)
    for hand_on in (sample, event, sample):
        hand_on(uplink)
    assert peer.settle() == DEFAULT_WINDOW
    peer.grant(1 << 20)
    while len(peer.requests()) < 6:
        peer.take_request()
    assert [request.WhichOneof("message") for request in peer.requests()] == [
        "hello", "block_map", "block_map", "samples", "event", "samples",
    ]  # fmt: skip


# what does not fit


def test_what_a_daemon_does_not_take_is_given_up_by_kind_and_counted(path, peer, monkeypatch):
    monkeypatch.setattr(uplink_module, "LONGEST_BACKLOG_BYTES", 1)
    uplink = Uplink(str(path), PROCESS, capacity=6)
    block_map(uplink)
    block_map(uplink)  # 1, 2: the first fits into the window, the second fills it
    uplink.start()
    peer.accept()
    peer.take_data(DEFAULT_WINDOW)
    for hand_on in (event, sample, block_map, sample):  # 3 to 6: full
        hand_on(uplink)
    for _ in range(4):  # 7 to 10 cost the maps 1 and 2, which may arrive yet, and 5, then the sample 4
        sample(uplink)
    assert len(uplink._ring) == 6
    peer.send(headers())
    peer.grant(1 << 30)
    while 10 not in [n for request in peer.requests()[-1:] for n in numbers_in(request)]:
        peer.take_request()
    assert [n for request in peer.requests() for n in numbers_in(request)] == [1, 2, 3, 6, 7, 8, 9, 10]
    peer.send(acknowledgement(10))
    wait_until_empty(uplink)
    sample(uplink)  # 11
    assert numbers_in(peer.take_request()) == [11]
    told = peer.take_request().event
    assert (told.sequence, told.dropped_count) == (12, 2)
    assert uplink.close(0) == 2


def test_what_was_given_up_after_it_was_sent_is_lost_once_the_stream_breaks(path, peer):
    uplink = Uplink(str(path), PROCESS, capacity=3)
    for _ in range(3):
        sample(uplink)
    uplink.start()
    peer.accept()
    while len(peer.requests()) < 2:
        peer.take_request()
    for _ in range(2):  # they cost 1 and 2, of which the daemon will never say that it has them
        sample(uplink)
    peer.hang_up()
    peer.accept()
    while not peer.requests() or 5 not in numbers_in(peer.requests()[-1]):
        peer.take_request()
    assert [n for request in peer.requests() for n in numbers_in(request)] == [3, 4, 5]
    peer.send(headers(), acknowledgement(5))
    wait_until_empty(uplink)
    sample(uplink)
    while not peer.requests()[-1].HasField("event"):
        peer.take_request()
    assert peer.requests()[-1].event.dropped_count == 2
    uplink.close(0)


def test_the_job_never_waits_for_a_daemon_that_reads_nothing(path, peer, monkeypatch):
    """Were a call to wait, it would wait for ever. The ring and the stream stay within their bounds."""
    monkeypatch.setattr(uplink_module, "HELD_MAP_BYTES", 1 << 20)
    uplink = Uplink(str(path), PROCESS)
    uplink.start()
    peer.accept()
    for _ in range(100):
        block_map(uplink)
        for _ in range(60):
            sample(uplink)
        event(uplink)
    held = sum(item.size_bytes for lane in uplink._ring._lanes for item in (*lane.sent, *lane.waiting))
    assert held <= uplink_module.HELD_MAP_BYTES
    assert len(uplink._ring) <= uplink_module.CAPACITY
    assert uplink._ring.lost_count + len(uplink._ring._in_doubt) == 100 * 62 - len(uplink._ring)
    assert uplink.close(0) == len(uplink._ring)


class Stopping(Receiver):
    """A real gRPC server whose handler does not read until it may, and which gives no more room than HTTP/2 begins with."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.options = [("grpc.http2.bdp_probe", 0)]
        self.may_read = threading.Event()

    def Attach(self, request_iterator, context):
        self.may_read.wait(LONG_S)
        yield from super().Attach(request_iterator, context)


def test_a_grpc_server_that_stops_reading_gets_the_rest_later_and_learns_what_was_lost(path, monkeypatch):
    monkeypatch.setattr(uplink_module, "HELD_MAP_BYTES", 1 << 20)
    count = 60  # of 37 KB
    uplink = Uplink(str(path), PROCESS)
    with Stopping(path) as receiver:
        uplink.start()
        for _ in range(count):
            block_map(uplink)
        receiver.may_read.set()
        receiver.wait_for(lambda: count in receiver.numbers())
        wait_until_empty(uplink)
        sample(uplink)
        assert uplink.close(LONG_S) == 0
    maps = [each.sequence for each in receiver.block_maps()]
    assert maps == sorted(set(maps))
    assert len(receiver.streams) == 1
    assert len(maps) + sum(each.dropped_count or 0 for each in receiver.events()) == count
    assert len(maps) < count


# daemons that misbehave


def silent(peer: Peer) -> None:
    peer.accept(greets=False)


def talking_something_else(peer: Peer) -> None:
    peer.accept(greets=False)
    peer.send(b"HTTP/1.1 200 OK\r\n\r\nnot gRPC" * 100)


def going_away_before_the_call(peer: Peer) -> None:
    peer.accept()
    peer.send(frame(GOAWAY, payload=struct.pack(">II", 0, 0)))


def going_away_after_the_call_and_ending_it(peer: Peer) -> None:
    peer.accept()
    peer.send(frame(GOAWAY, payload=struct.pack(">II", 1, 0)), frame(HEADERS, END_STREAM | END_HEADERS, 1, b"x"))


def resetting(peer: Peer) -> None:
    peer.accept()
    peer.send(frame(RST_STREAM, 0, 1, b"\0\0\0\x08"))


def refusing_at_once(peer: Peer) -> None:
    peer.accept()
    peer.send(frame(HEADERS, END_STREAM | END_HEADERS, 1, b"grpc-status 12, were it decoded"))


def flooding_with_headers(peer: Peer) -> None:
    peer.accept()
    peer.send(frame(HEADERS, 0, 1, b"h" * 16_384), *[frame(CONTINUATION, 0, 1, b"h" * 16_384)] * 100)
    assert peer.settle() >= 0


def answering_garbage(peer: Peer) -> None:
    peer.accept()
    peer.send(headers(), frame(DATA, 0, 1, b"\0\0\0\0\4\xff\xff\xff\xff"))


def answering_too_much(peer: Peer) -> None:
    peer.accept()
    peer.send(headers(), frame(DATA, 0, 1, b"\0\xff\xff\xff\xff"))


def vanishing(peer: Peer) -> None:
    peer.accept()


@pytest.mark.parametrize(
    "behaving",
    [
        silent, talking_something_else, going_away_before_the_call, going_away_after_the_call_and_ending_it, resetting,
        refusing_at_once, flooding_with_headers, answering_garbage, answering_too_much, vanishing,
    ],
    ids=lambda each: each.__name__,
)  # fmt: skip
def test_whatever_a_daemon_does_the_next_one_gets_everything(path, uplink, behaving, capfd):
    sample(uplink)
    with Peer(path) as peer:
        uplink.start()
        behaving(peer)
        sample(uplink)
    path.unlink()
    with Receiver(path) as receiver:
        sample(uplink)
        assert uplink.close(LONG_S) == 0
    assert receiver.numbers() == [1, 2, 3]
    assert receiver.kinds()[0] == "hello"
    assert capfd.readouterr() == ("", "")


def test_one_who_pings_and_reads_nothing_is_hung_up_on(path, peer, uplink):
    uplink.start()
    peer.accept()
    assert peer._connection is not None
    flood = frame(PING, payload=b"12345678") * 1_000_000  # 17 MB
    with pytest.raises((BrokenPipeError, ConnectionResetError)):
        peer._connection.sendall(flood)
    peer.hang_up()
    peer.accept()


def test_a_daemon_restarted_two_hundred_times_gets_everything_and_nothing_is_left_open(path, peer, uplink, monkeypatch):
    monkeypatch.setattr(uplink_module, "FIRST_BACKOFF_S", 0.001)
    threads, opened = threading.active_count(), set()
    uplink.start()
    for number in range(1, 201):
        sample(uplink)
        peer.accept()
        while number not in {n for request in peer.requests() for n in numbers_in(request)}:
            peer.take_request()
        assert peer.requests()[0].HasField("hello")
        acknowledged = number - number % 3  # at times the daemon dies before it has it on its disk
        peer.send(headers(), acknowledgement(acknowledged))
        if number % 3 == 0:
            wait_until_empty(uplink)
        opened.add(len(os.listdir("/proc/self/fd")))  # noqa: PTH208 (names are enough)
        peer.hang_up()
    assert max(opened) - min(opened) < 10
    assert threading.active_count() == threads + 1


def test_a_socket_file_that_is_replaced_is_found_again(path, uplink):
    uplink.start()
    for number in range(1, 4):
        with Receiver(path) as receiver:
            sample(uplink)
            receiver.wait_for(receiver.numbers)
            wait_until_empty(uplink)
        assert receiver.numbers() == [number]
        path.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX) as stale:
            stale.bind(str(path))
        path.unlink()
