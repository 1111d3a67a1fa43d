"""What jobs say, by `ProbeService`'s one method. A stream that lies is told so, and lives on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import suppress

import grpc
import structlog

from allocscope.daemon import claims
from allocscope.daemon.call import CallRefused
from allocscope.daemon.capture_orders import CaptureOrders
from allocscope.daemon.intake import Intake
from allocscope.daemon.node import Attached, Node
from allocscope.daemon.observed import Observed
from allocscope.daemon.peers import Peer
from allocscope.daemon.stream import Stream
from allocscope.model import wire
from allocscope.model.events import EventKind
from allocscope.model.orders import CaptureOrder, Order
from allocscope.model.sample import SampleChunk
from allocscope.model.wire import WireError
from allocscope.proto.v1 import block_map_pb2, event_pb2, identity_pb2, sample_pb2
from allocscope.proto.v1.probe_service_pb2 import AttachRequest, AttachResponse

log = structlog.get_logger()

MOST_STREAMS = 1024
HELLO_WITHIN_S = 10.0
"""A stream that does not say whose it is, or may not be, gives its place to others."""
LAST_ACKNOWLEDGEMENT_S = 3.0
"""How long a stream that its process ended is kept for what is still to be acknowledged."""


class ProbeService:
    """Takes what processes send into the node's state and the open batch."""

    def __init__(
        self,
        node: Node,
        intake: Intake,
        observed: Observed,
        orders: CaptureOrders,
        total_bytes: Callable[[str], int | None],
    ) -> None:
        """`total_bytes` says what a device has, by its UUID, where the node knows."""
        self._node, self._intake, self._observed, self._orders = node, intake, observed, orders
        self._total_bytes = total_bytes
        self._logged: set[tuple[str, str]] = set()

    def order(self, process_id: str, order: Order) -> bool:
        """Pass an order on; whether there is such a process. An order for a capture waits for one that comes again."""
        waits = isinstance(order, CaptureOrder) and self._orders.add(process_id, order)
        attached = self._node.get(process_id)
        if attached is None or not isinstance(attached.stream, Stream):
            return waits
        attached.stream.order(order)
        return True

    async def attach(self, requests: AsyncIterator[AttachRequest], peer: Peer) -> AsyncGenerator[AttachResponse]:
        """One process's stream, on a connection of `peer`'s; CallRefused: it cannot go on."""
        stream = Stream(peer)
        reader = asyncio.create_task(self._read(stream, requests))
        try:
            deadline = None
            while deadline is None or (not stream.is_settled and time.monotonic() < deadline):
                with suppress(TimeoutError):
                    await asyncio.wait_for(stream.woken.wait(), None if deadline is None else LAST_ACKNOWLEDGEMENT_S)
                if response := stream.take():
                    yield response
                if reader.done() and deadline is None:
                    if refused := await reader:
                        raise refused
                    deadline = time.monotonic() + LAST_ACKNOWLEDGEMENT_S
        finally:
            reader.cancel()
            self._node.detach(stream, time.monotonic())

    async def _read(self, stream: Stream, requests: AsyncIterator[AttachRequest]) -> CallRefused | None:
        """Until the process has no more to say; or what it did wrong, so that its stream cannot go on."""
        try:
            async with asyncio.timeout(HELLO_WITHIN_S) as patience:
                async for request in requests:
                    self._take(stream, request)
                    del request  # the next one may be long in coming
                    if stream.attached:
                        patience.reschedule(None)
                    await self._intake.wait_for_room()
        except TimeoutError:
            text = f"no hello that could be taken within {HELLO_WITHIN_S:g} s"
            return CallRefused(grpc.StatusCode.INVALID_ARGUMENT, text)
        except CallRefused as refused:
            return refused
        except Exception as error:  # noqa: BLE001 (of what cannot be read, protobuf raises what it likes)
            if self._is_first((f"user {stream.peer.uid}", "unreadable")):
                log.warning("a stream broke", pid=stream.peer.pid, error=repr(error)[:300], further="not logged")
            return CallRefused(grpc.StatusCode.INVALID_ARGUMENT, "a message that cannot be read")
        finally:
            stream.woken.set()
            self._intake.hasten()
        return None

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
        claims.check_size(message)
        process = wire.process_from_wire(message)
        claims.check_process(process)
        claims.check_peer(process, stream.peer)
        if stream.attached and stream.attached.process.process_id != process.process_id:
            raise WireError("foreign_process", f"a stream is one process's, {stream.attached.process.process_id}")
        is_new = self._node.get(process.process_id) is None
        is_first = stream.attached is None
        stream.attached = self._node.attach(process, message, stream, time.monotonic(), stream.peer)
        self._intake.add_process(message)
        for order in self._orders.of(process.process_id) if is_first else ():
            stream.order(order)
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
            attached = stream.attached = self._node.attach(
                attached.process, attached.message, stream, now_s, stream.peer
            )
        attached.news_s = now_s
        return attached

    def _take_samples(self, stream: Stream, message: sample_pb2.SampleChunk) -> None:
        claims.check_size(message)
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
        claims.check_size(message)
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
        if self._is_first((who, error.reason)):
            log.warning("refused", process=who, reason=error.reason, why=str(error), further="counted, not logged")

    def _is_first(self, trouble: tuple[str, str]) -> bool:
        """Whether it is to be logged: whoever sends what cannot be may send it without end."""
        if trouble in self._logged or len(self._logged) >= MOST_STREAMS:
            return False
        self._logged.add(trouble)
        return True


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
