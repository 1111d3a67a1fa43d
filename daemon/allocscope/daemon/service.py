"""The edge toward jobs: `ProbeService` over a unix socket. A stream that lies is told so, and lives on."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

import grpc
import structlog

from allocscope.daemon import claims
from allocscope.daemon.errors import SocketError
from allocscope.daemon.intake import Intake
from allocscope.daemon.node import Attached, Node
from allocscope.daemon.observed import Observed
from allocscope.model import wire
from allocscope.model.events import EventKind
from allocscope.model.orders import Order
from allocscope.model.sample import SampleChunk
from allocscope.model.wire import WireError
from allocscope.proto.v1 import block_map_pb2, event_pb2, identity_pb2, sample_pb2
from allocscope.proto.v1.probe_service_pb2 import AttachRequest, AttachResponse
from allocscope.proto.v1.probe_service_pb2_grpc import ProbeServiceServicer, add_ProbeServiceServicer_to_server

log = structlog.get_logger()

LARGEST_MESSAGE_BYTES = (2 << 20) + 4096
"""A probe's largest message is 2 MiB. What is larger ends its stream, and is not read into memory."""
MOST_STREAMS = 1024
LONGEST_SOCKET_PATH = 107
"""sockaddr_un.sun_path, its closing NUL left out."""
ORDERS_KEPT = REFUSALS_KEPT = 32
LAST_ACKNOWLEDGEMENT_S = 3.0
"""How long a stream that its process ended is kept for what is still to be acknowledged."""


class Stream:
    """One process's stream: what is to be told on it. Bounded."""

    def __init__(self) -> None:
        self.attached: Attached | None = None
        self.woken = asyncio.Event()
        self.sent = 0
        self._acknowledged = self._told = 0
        self._orders: list[Order] = []
        self._refused: list[str] = []

    def acknowledge(self, sequence: int) -> None:
        """Everything up to this number is on disk, or refused."""
        self._acknowledged = max(self._acknowledged, sequence)
        self.woken.set()

    def order(self, order: Order) -> None:
        """Tell the process to do something; the newest orders count."""
        self._orders = [*self._orders, order][-ORDERS_KEPT:]
        self.woken.set()

    def refuse(self, text: str) -> None:
        """Tell the process what was refused."""
        if len(self._refused) < REFUSALS_KEPT:
            self._refused.append(text)
        self.woken.set()

    @property
    def is_settled(self) -> bool:
        """Whether everything that came was acknowledged."""
        return self._told >= self.sent

    def take(self) -> AttachResponse | None:
        """What there is to tell now."""
        self.woken.clear()
        if self._acknowledged == self._told and not self._orders and not self._refused:
            return None
        response = AttachResponse(
            acknowledged_sequence=self._acknowledged,
            orders=[wire.order_to_wire(order) for order in self._orders],
            refused=self._refused,
        )
        self._told, self._orders, self._refused = self._acknowledged, [], []
        return response


class ProbeService(ProbeServiceServicer):
    """Takes what processes send into the node's state and the open batch."""

    def __init__(self, node: Node, intake: Intake, observed: Observed, total_bytes: Any) -> None:
        self._node, self._intake, self._observed = node, intake, observed
        self._total_bytes = total_bytes
        """What a device has, by its UUID, where the node knows."""
        self._logged: set[tuple[str, str]] = set()

    def order(self, process_id: str, order: Order) -> bool:
        """Pass an order on; whether there is such a process."""
        attached = self._node.get(process_id)
        if attached is None or not isinstance(attached.stream, Stream):
            return False
        attached.stream.order(order)
        return True

    async def Attach(  # noqa: N802 (gRPC's name)
        self, request_iterator: AsyncIterator[AttachRequest], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[AttachResponse]:
        """One process's stream."""
        stream = Stream()
        reader = asyncio.create_task(self._read(stream, request_iterator))
        try:
            deadline = None
            while deadline is None or (not stream.is_settled and time.monotonic() < deadline):
                with suppress(TimeoutError):
                    await asyncio.wait_for(stream.woken.wait(), None if deadline is None else LAST_ACKNOWLEDGEMENT_S)
                if response := stream.take():
                    yield response
                if reader.done() and deadline is None:
                    if not await reader:
                        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "a message that cannot be read")
                    deadline = time.monotonic() + LAST_ACKNOWLEDGEMENT_S
        finally:
            reader.cancel()
            self._node.detach(stream, time.monotonic())

    async def _read(self, stream: Stream, requests: AsyncIterator[AttachRequest]) -> bool:
        """Until the process has no more to say; False: what it said cannot be read."""
        try:
            async for request in requests:
                self._take(stream, request)
                await self._intake.wait_for_room()
        except Exception as error:  # noqa: BLE001 (of what cannot be read, gRPC raises what it likes)
            log.warning("a stream broke", error=repr(error))
            return False
        finally:
            stream.woken.set()
            self._intake.hasten()
        return True

    def _take(self, stream: Stream, request: AttachRequest) -> None:
        which = request.WhichOneof("message")
        try:
            if which == "hello":
                self._greet(stream, request.hello)
            elif which == "samples":
                self._take_samples(stream, request.samples)
            elif which == "block_map":
                self._take_block_map(stream, request.block_map)
            elif which == "event":
                self._take_event(stream, request.event)
            else:
                raise WireError(
                    "unknown_message", "a message that this daemon does not know; is it older than the probe?"
                )
        except WireError as error:
            self._refuse(stream, error, _count(request))
        self._settle(stream, _sequence(request))

    def _greet(self, stream: Stream, message: identity_pb2.Process) -> None:
        process = wire.process_from_wire(message)
        claims.check_process(process)
        if stream.attached and stream.attached.process.process_id != process.process_id:
            raise WireError("foreign_process", f"a stream is one process's, {stream.attached.process.process_id}")
        is_new = self._node.get(process.process_id) is None
        stream.attached = self._node.attach(process, message, stream, time.monotonic())
        self._intake.add_process(message)
        if is_new:
            log.info(
                "process attached", job=process.job, rank=process.rank, pid=process.pid, process=process.process_id
            )

    def _attached(self, stream: Stream) -> Attached:
        attached = stream.attached
        if attached is None:
            raise WireError("no_hello", "figures of a process that has not said who it is, or was refused")
        now_s = time.monotonic()
        if (
            self._node.get(attached.process.process_id) is not attached
        ):  # it was silent for long, or came on another stream
            attached = stream.attached = self._node.attach(attached.process, attached.message, stream, now_s)
        attached.news_s = now_s
        return attached

    def _take_samples(self, stream: Stream, message: sample_pb2.SampleChunk) -> None:
        if len(message.sequence) > claims.MOST_SAMPLES:
            raise WireError("too_many_samples", f"{len(message.sequence)} samples in one chunk")
        attached = self._attached(stream)
        chunk = wire.chunk_from_wire(message)
        claims.check_allocator(chunk.allocator, attached.process)
        claims.check_chunk(chunk, self._total_bytes(chunk.allocator.device_uuid))
        chunk = _beyond(chunk, attached.seen)
        if not len(chunk):
            return
        attached.seen = chunk.sequence[-1]
        attached.allocators[chunk.allocator.device_uuid].sample = next(_beyond(chunk, attached.seen - 1).samples())
        self._intake.add_chunk(
            attached.message, message if len(chunk) == len(message.sequence) else wire.chunk_to_wire(chunk)
        )
        self._observed.ingested.inc(len(chunk))

    def _take_block_map(self, stream: Stream, message: block_map_pb2.BlockMap) -> None:
        attached = self._attached(stream)
        ref, block_map = wire.block_map_from_wire(message)
        claims.check_allocator(ref, attached.process)
        claims.check_block_map(block_map, self._total_bytes(ref.device_uuid))
        if block_map.sequence > attached.seen:
            attached.seen = block_map.sequence
            attached.allocators[ref.device_uuid].block_map = block_map
            self._intake.add_block_map(attached.message, message)

    def _take_event(self, stream: Stream, message: event_pb2.Event) -> None:
        attached = self._attached(stream)
        event = wire.event_from_wire(message)
        claims.check_event(event, attached.process)
        if event.sequence <= attached.seen:
            return
        attached.seen = event.sequence
        attached.stopped = event.kind is EventKind.STOPPED
        if event.kind is EventKind.DROPPED and event.dropped_count:
            self._observed.dropped.add(event.dropped_count, "messages", "probe")
        self._intake.add_event(attached.message, message)

    def _settle(self, stream: Stream, sequence: int) -> None:
        """Whether taken, seen before or refused: once the open batch is on disk it need not come again."""
        if sequence:
            stream.sent = max(stream.sent, sequence)
            self._intake.owe(stream, sequence)

    def _refuse(self, stream: Stream, error: WireError, count: int) -> None:
        self._observed.rejected.add(count, error.reason)
        stream.refuse(str(error))
        who = stream.attached.process.process_id if stream.attached else ""
        if (who, error.reason) not in self._logged and len(self._logged) < MOST_STREAMS:
            self._logged.add((who, error.reason))
            log.warning("refused", process=who, reason=error.reason, why=str(error), further="counted, not logged")


def _beyond(chunk: SampleChunk, seen: int) -> SampleChunk:
    """What of a chunk comes after a number: after a break a process sends again what may be here already."""
    if not len(chunk) or chunk.sequence[0] > seen:
        return chunk
    keep = next((i for i, sequence in enumerate(chunk.sequence) if sequence > seen), len(chunk))
    columns = {name: column[keep:] for name, column in chunk.columns.items()}
    return SampleChunk(chunk.allocator, chunk.sequence[keep:], chunk.time_us[keep:], columns)


def _sequence(request: AttachRequest) -> int:
    """The last number in a message; 0: it has none, or one that cannot be."""
    which = request.WhichOneof("message")
    if which == "samples":
        last = max(request.samples.sequence, default=0)
    elif which in ("block_map", "event"):
        last = getattr(request, which).sequence
    else:
        last = 0
    return last if last <= wire.LARGEST_STORED else 0


def _count(request: AttachRequest) -> int:
    return len(request.samples.sequence) if request.WhichOneof("message") == "samples" else 1


def new_server(service: ProbeService) -> grpc.aio.Server:
    """A server that has no address yet."""
    options = [
        ("grpc.max_receive_message_length", LARGEST_MESSAGE_BYTES),
        ("grpc.max_concurrent_streams", MOST_STREAMS),
        ("grpc.so_reuseport", 0),
    ]
    server = grpc.aio.server(options=options, maximum_concurrent_rpcs=MOST_STREAMS)
    add_ProbeServiceServicer_to_server(service, server)
    return server


def bind(server: grpc.aio.Server, path: Path) -> None:
    """Give the server its socket; one that a dead daemon left is replaced."""
    if len(os.fsencode(path)) > LONGEST_SOCKET_PATH:
        raise SocketError(path, f"the path is longer than {LONGEST_SOCKET_PATH} bytes, the system's limit")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _clear(path)
        server.add_insecure_port(f"unix:{quote(os.fspath(path))}")
        path.chmod(0o660)  # who may report is who may write here
    except FileExistsError as error:
        raise SocketError(path, f"{path.parent} is no folder") from error
    except RuntimeError as error:
        raise SocketError(path, "the system does not let us") from error
    except OSError as error:
        raise SocketError(path, error.strerror or str(error)) from error


def _clear(path: Path) -> None:
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise SocketError(path, "there is a file of that name, which is no socket")
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as attempt:
        attempt.settimeout(2)
        try:
            attempt.connect(os.fspath(path))
        except (ConnectionRefusedError, FileNotFoundError):
            path.unlink(missing_ok=True)
            return
    raise SocketError(path, "another daemon listens there")
