"""The jobs' server against any gRPC client, and against those that mean no good: it serves, it is bounded, and others are not disturbed."""

from __future__ import annotations

import asyncio
import socket
import struct
import tempfile
import weakref
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, cast

import grpc
import pytest

from allocscope.daemon import call, connection, door
from allocscope.daemon.jobs_server import ATTACH, JobsServer
from allocscope.daemon.listen import listen
from allocscope.daemon.peers import Peer, Peers
from allocscope.daemon.procfs import Procfs
from allocscope.daemon.service import ProbeService
from allocscope.probe.call import Call
from allocscope.proto.v1.identity_pb2 import Process
from allocscope.proto.v1.probe_service_pb2 import AttachRequest, AttachResponse
from tests.daemon.fakes import WAIT_S

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes.fromhex("000000040000000000")


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """Of HTTP/2."""
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


PING = frame(6, 0, 0, bytes(8))
OPTIONS = [("grpc.use_local_subchannel_pool", 1)]


class Service:
    """Says how large each request was; remembers who came, and who went."""

    def __init__(self) -> None:
        self.peers: list[Peer] = []
        self.heard, self.gone = asyncio.Event(), asyncio.Event()
        self.asked = 0

    async def attach(self, requests: AsyncIterator[AttachRequest], peer: Peer) -> AsyncGenerator[AttachResponse]:
        self.peers.append(peer)
        try:
            async for request in requests:
                self.asked += 1
                self.heard.set()
                yield AttachResponse(acknowledged_sequence=len(request.hello.job))
        finally:
            self.gone.set()


class Talkative(Service):
    """Answers without end."""

    async def attach(self, requests: AsyncIterator[AttachRequest], peer: Peer) -> AsyncGenerator[AttachResponse]:
        async for request in requests:
            while request.hello.job == "all":
                self.asked += 1
                yield AttachResponse(refused=["x" * 60_000])
            yield AttachResponse(acknowledged_sequence=1)


@asynccontextmanager
async def serving(service: Service) -> AsyncIterator[tuple[Path, JobsServer]]:
    with tempfile.TemporaryDirectory(prefix="as-") as folder:
        listener = listen(Path(folder, "s"))
        server = JobsServer(cast("ProbeService", service), Peers(Procfs()).of)
        await server.start(listener.socket)
        try:
            async with asyncio.timeout(WAIT_S):
                yield listener.path, server
        finally:
            await server.stop(0)


@asynccontextmanager
async def calling(path: Path) -> AsyncIterator[Any]:
    """A call by grpcio."""
    async with grpc.aio.insecure_channel(f"unix:{path}", options=OPTIONS) as channel:
        attach: Any = channel.stream_stream(ATTACH, AttachRequest.SerializeToString, AttachResponse.FromString)
        yield attach()


def request(letters: int) -> AttachRequest:
    return AttachRequest(hello=Process(job="x" * letters))


async def outcome(
    path: Path, *requests: AttachRequest, method: str = ATTACH, **more: Any
) -> tuple[list[int], Any, str]:
    """What was answered, the status and its text; by gRPC's threads, since its asyncio loses the status of a call that ends early."""

    def call_it() -> tuple[list[int], Any, str]:
        with grpc.insecure_channel(f"unix:{path}", options=OPTIONS, **more) as channel:
            attach: Any = channel.stream_stream(method, AttachRequest.SerializeToString, AttachResponse.FromString)
            answers, calling = [], attach(iter(requests))
            with suppress(grpc.RpcError):
                for answer in calling:
                    answers.append(answer.acknowledged_sequence)  # noqa: PERF401 (those before the error count)
            return answers, calling.code(), calling.details()

    return await asyncio.to_thread(call_it)


@asynccontextmanager
async def connected(
    path: Path, says: bytes = PREFACE
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection of a client that has said this, by default nothing but HTTP/2's first words."""
    reader, writer = await asyncio.open_unix_connection(path)
    try:
        writer.write(says)
        yield reader, writer
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


async def is_greeted(reader: asyncio.StreamReader) -> bool:
    """Whether the server lets it in."""
    try:
        return bool(await reader.read(1))
    except ConnectionResetError:
        return False


# serving


async def test_every_message_of_any_size_comes_and_is_answered_in_order():
    service = Service()
    async with serving(service) as (path, _):
        sizes = [0, 1, 16_384, 70_000, 1 << 20, 2 << 20, 3]
        assert await outcome(path, *map(request, sizes)) == (sizes, grpc.StatusCode.OK, "")
    assert service.peers[0].pid is not None


@pytest.mark.parametrize(
    ("letters", "more", "status"),
    [
        pytest.param(3 << 20, {}, "RESOURCE_EXHAUSTED: a message of 3145738 bytes (at most 2101248)", id="too large"),
        pytest.param(
            100,
            {"compression": grpc.Compression.Gzip},
            "UNIMPLEMENTED: a compressed message, which is not read here",
            id="compressed",
        ),
        pytest.param(
            1,
            {"method": "/allocscope.proto.v1.Probe%Service/ä"},
            "UNIMPLEMENTED: there is no method '/allocscope.proto.v1.Probe%Service/ä' here",
            id="another method",
        ),
    ],
)
async def test_what_is_not_served_ends_its_call_and_says_why(letters, more, status):
    async with serving(Service()) as (path, _):
        answers, code, text = await outcome(path, request(letters), **more)
        assert (answers, f"{code.name}: {text}") == ([], status)
        assert await outcome(path, request(5)) == ([5], grpc.StatusCode.OK, "")


async def test_what_stops_gives_those_who_are_here_their_last_answers():
    service = Service()
    async with serving(service) as (path, server), calling(path) as attach:
        await attach.write(request(1))
        assert (await attach.read()).acknowledged_sequence == 1
        stopping = asyncio.create_task(server.stop(WAIT_S))
        await asyncio.sleep(0)
        await attach.write(request(2))
        assert (await attach.read()).acknowledged_sequence == 2
        await attach.done_writing()
        assert await attach.read() is grpc.aio.EOF
        await stopping
        with pytest.raises(OSError, match=r"refused|No such file"):
            await asyncio.open_unix_connection(path)


# bounded


async def test_one_user_has_so_many_connections_and_more_are_hung_up(monkeypatch):
    monkeypatch.setattr(door, "MOST_OF_USER", 2)
    async with serving(Service()) as (path, _), connected(path) as (second, _):
        async with connected(path) as (first, _), connected(path) as (third, _):
            assert [await is_greeted(each) for each in (first, second, third)] == [True, True, False]
        await has_room(path)


async def has_room(path: Path) -> None:
    """Waits until one more is let in."""
    is_in = False
    while not is_in:
        async with connected(path) as (reader, _):
            is_in = await is_greeted(reader)


async def test_messages_that_are_never_whole_fill_no_memory(monkeypatch):
    """They are held to a sum for all of a user's."""
    monkeypatch.setattr(door, "MOST_HELD_OF_USER_BYTES", 100_000)
    async with serving(Service()) as (path, _):
        answers, code, text = await outcome(path, request(150_000))
        assert (answers, code) == ([], grpc.StatusCode.RESOURCE_EXHAUSTED)
        assert text.endswith("jobs send more at a time than is kept in memory: send it again later")
        assert await outcome(path, request(50_000), request(50_001)) == ([50_000, 50_001], grpc.StatusCode.OK, "")


async def test_of_a_message_nothing_is_kept_while_the_next_one_is_waited_for():
    """Of each of a thousand streams it could be much."""

    class Read:
        def __init__(self, message: bytes) -> None:
            self.message = message

    class Nowhere:
        peer = Peer(0, 0)

        def spend(self, seconds: float) -> None: ...
        def hold(self, more_bytes: int) -> None: ...
        def take_on(self, stream: int, size: int) -> None: ...

    one = call.Call(cast("call.Wire", Nowhere()), 1)
    one.receive(call.MESSAGE_HEADER.pack(0, 3) + b"abc", 8)
    messages = one.messages(Read)
    read = await anext(messages)
    assert read.message == b"abc"
    kept = weakref.ref(read)
    del read
    assert kept() is None


async def test_a_connection_on_which_nothing_is_called_gives_its_place_away(monkeypatch):
    monkeypatch.setattr(connection, "IDLE_S", 0.01)
    async with serving(Service()) as (path, _), connected(path) as (reader, _):
        while await reader.read(100):
            pass


async def test_calls_without_end_are_hung_up(monkeypatch):
    monkeypatch.setattr(connection, "MOST_CALLS", 3)
    async with serving(Service()) as (path, _), grpc.aio.insecure_channel(f"unix:{path}") as channel:
        attach: Any = channel.stream_stream(ATTACH, AttachRequest.SerializeToString, AttachResponse.FromString)
        codes = []
        for _ in range(4):
            one = attach()
            await one.done_writing()
            codes.append(await one.code())
        assert codes == [grpc.StatusCode.OK] * 3 + [grpc.StatusCode.UNAVAILABLE]


async def test_who_reads_nothing_gets_no_more_and_holds_up_nobody():
    service = Talkative()
    async with serving(service) as (path, _), calling(path) as greedy:
        await greedy.write(AttachRequest(hello=Process(job="all")))
        assert (await outcome(path, request(1)))[0] == [1]
        before = -1
        while service.asked != before:  # until it has stopped
            before = service.asked
            assert (await outcome(path, request(1)))[0] == [1]
        assert service.asked < 200  # of 60 KB each: what gRPC's window, 4 MiB at most, and the system's buffers take
        greedy.cancel()


async def test_a_connection_that_is_idle_and_reads_nothing_gives_its_place_away(monkeypatch):
    monkeypatch.setattr(connection, "IDLE_S", 0.01)
    monkeypatch.setattr(connection, "GOODBYE_S", 0.01)
    monkeypatch.setattr(door, "MOST_OF_USER", 1)
    async with serving(Service()) as (path, _), connected(path, PREFACE + PING * 60_000):
        await has_room(path)


async def test_headers_that_do_not_end_fill_no_memory():
    """h2 would keep 64 frames of them."""
    begun, more = frame(1, 0, 1, bytes(16_384)), frame(9, 0, 1, bytes(16_384))
    async with serving(Service()) as (path, _), connected(path, PREFACE + begun + more * 20) as (reader, _):
        with suppress(ConnectionResetError):
            while await reader.read(100):
                pass


@pytest.mark.parametrize(
    "flood",
    [
        pytest.param(PING, id="pings"),
        pytest.param(frame(4, 0, 0), id="settings"),
        pytest.param(frame(2, 0, 3, bytes(5)), id="priorities"),
        pytest.param(frame(0xBE, 0, 0), id="of no known kind"),
    ],
)
async def test_who_floods_with_frames_that_cost_nothing_to_send_is_read_from_later(monkeypatch, flood):
    monkeypatch.setattr(connection, "TIME_RATIO", 1e-6)
    monkeypatch.setattr(connection, "MOST_TIME_S", 0.1)
    async with serving(Service()) as (path, server), connected(path) as (reader, writer):
        reading, sending = asyncio.create_task(_read_all(reader)), asyncio.create_task(_send_on(writer, flood * 2_000))
        await is_paused(server, path)
        assert await outcome(path, request(5)) == ([5], grpc.StatusCode.OK, "")
        sending.cancel()
        reading.cancel()
        writer.transport.abort()


async def test_who_sends_messages_that_take_long_is_read_from_later(monkeypatch):
    monkeypatch.setattr(connection, "TIME_RATIO", 1e-6)
    monkeypatch.setattr(connection, "MOST_TIME_S", 0.1)
    async with serving(Service()) as (path, server), calling(path) as attach:
        sending = asyncio.create_task(_send(attach, [request(1)] * 100_000))
        await is_paused(server, path)
        assert await outcome(path, request(5)) == ([5], grpc.StatusCode.OK, "")
        sending.cancel()
        attach.cancel()


async def is_paused(server: JobsServer, path: Path) -> None:
    """Waits until one of its connections is not read from."""
    while not any(each.is_paused for each in server._door.connections):
        await has_room(path)


async def _read_all(reader: asyncio.StreamReader) -> None:
    while await reader.read(1 << 16):
        pass


async def _send_on(writer: asyncio.StreamWriter, data: bytes) -> None:
    while True:
        writer.write(data)
        await writer.drain()


async def test_who_sends_and_is_not_asked_must_wait(monkeypatch):
    """The sender's window stays closed over what the service has not asked for."""
    monkeypatch.setattr(call, "MOST_WAITING", 2)
    waits = asyncio.Event()

    class Slow(Service):
        async def attach(self, requests: AsyncIterator[AttachRequest], peer: Peer) -> AsyncGenerator[AttachResponse]:
            await waits.wait()
            async for answer in super().attach(requests, peer):
                yield answer

    service = Slow()
    async with serving(service) as (path, server), calling(path) as attach:
        sending = asyncio.create_task(_send(attach, [request(30_000)] * 40))
        assert not (await asyncio.wait([sending], timeout=0.2))[0]
        (inside,) = server._door.connections
        assert server._door._held_bytes.total() < 200_000
        waits.set()
        await sending
        await attach.done_writing()
        assert [answer.acknowledged_sequence async for answer in attach] == [30_000] * 40
        assert not inside.is_busy
        assert server._door._held_bytes.total() == 0


async def _send(attach: Any, requests: list[AttachRequest]) -> None:
    for each in requests:
        await attach.write(each)


@pytest.mark.parametrize("half", [True, False], ids=["half closed", "closed"])
async def test_a_connection_that_breaks_ends_its_call_and_gives_its_place_away(monkeypatch, half):
    monkeypatch.setattr(door, "MOST_OF_USER", 1)
    service = Service()
    job = Call(ATTACH)
    job.send(request(7).SerializeToString())
    async with serving(service) as (path, _), connected(path, bytes(job.outgoing)) as (_, writer):
        await service.heard.wait()
        if half:
            writer.write_eof()
        else:
            cast("socket.socket", writer.get_extra_info("socket")).shutdown(socket.SHUT_RDWR)
        await service.gone.wait()
        await has_room(path)
