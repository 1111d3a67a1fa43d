"""CollectorService: one stream a daemon. What is stored is acknowledged, what is refused is said, nothing else is promised."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import grpc
import structlog

from allocscope.collector.decode import LONGEST_NAME, Refusal
from allocscope.collector.nodes import Hello, Nodes, NodeState, NodeTaken
from allocscope.collector.observation import Observation
from allocscope.collector.orders import Orders
from allocscope.collector.writer import Arrival, Writer
from allocscope.model.figures import duration
from allocscope.model.wire import LARGEST_STORED
from allocscope.proto.v1 import collector_service_pb2, collector_service_pb2_grpc
from allocscope.storage.errors import NodeNameTaken, StorageError

log = structlog.get_logger(__name__)

Request = collector_service_pb2.IngestRequest
Response = collector_service_pb2.IngestResponse
Requests = AsyncIterator[Request]
Context = grpc.aio.ServicerContext[Request, Response]

HELLO_WITHIN_S = 30.0
"""A stream that does not say who it is is closed."""
HELD_ELSEWHERE_S = 15.0
"""A node's name that another collector heard of so lately, from another daemon, is taken: its daemon may be on a stream there."""
MOST_REJECTIONS = 100
"""Texts in one response; all are counted in allocscope_samples_rejected_total."""


class Registry(Protocol):
    """The part of a Repository that is used here."""

    def acknowledged(self, node: str, daemon_id: str) -> int:
        """The highest number of a stored batch of that daemon."""
        ...

    def register_node(
        self,
        node: str,
        daemon_id: str,
        *,
        version: str,
        metrics_address: str | None,
        received_us: int,
        silent_before_us: int,
    ) -> None:
        """A daemon said hello."""


@dataclass(slots=True, eq=False)
class _Session:
    """What is to be told to one daemon."""

    acknowledged: int
    waiting: dict[int, float] = field(default_factory=dict)
    """Batches that are not stored yet: their number, and when they came (monotonic)."""
    rejections: list[collector_service_pb2.Rejection] = field(default_factory=list)
    orders: list[collector_service_pb2.ProcessOrder] = field(default_factory=list)
    news: asyncio.Event = field(default_factory=asyncio.Event)
    ending: bool = False

    def arrived(self, sequence: int) -> None:
        self.waiting[sequence] = time.monotonic()

    def stored(self, sequence: int, refused: Sequence[Refusal]) -> float | None:
        """How long it took; None: it was stored under another arrival."""
        self.acknowledged = max(self.acknowledged, sequence)
        room = MOST_REJECTIONS - len(self.rejections)
        self.rejections += [
            collector_service_pb2.Rejection(sequence=sequence, reason=r.reason, message=r.text, count=r.count)
            for r in refused[:room]
        ]
        self.news.set()
        arrived = self.waiting.pop(sequence, None)
        return None if arrived is None else time.monotonic() - arrived

    def order(self, order: collector_service_pb2.ProcessOrder) -> None:
        """Something for one of the node's processes."""
        self.orders.append(order)
        self.news.set()

    def end(self) -> None:
        """No more batches come."""
        self.ending = True
        self.news.set()

    @property
    def over(self) -> bool:
        return self.ending and not self.waiting

    def response(self) -> Response:
        response = Response(acknowledged_sequence=self.acknowledged, rejections=self.rejections, orders=self.orders)
        self.rejections, self.orders = [], []
        return response


class IngestService(collector_service_pb2_grpc.CollectorServiceServicer):
    """Serves daemons."""

    def __init__(
        self,
        *,
        registry: Registry,
        nodes: Nodes,
        writer: Writer,
        orders: Orders,
        observation: Observation,
        now_us: Callable[[], int],
    ) -> None:
        self._registry, self._nodes, self._writer, self._orders = registry, nodes, writer, orders
        self._observation, self._now_us = observation, now_us

    async def Ingest(  # type: ignore[override]  # noqa: N802  (gRPC's name; it takes a coroutine that writes by the context, too)
        self, requests: Requests, context: Context
    ) -> None:
        """One daemon's stream."""
        try:
            hello = await self._hello(requests)
            replaced = asyncio.Event()
            before = self._nodes.get(hello.node)
            state = self._attach(hello, replaced.set)
            try:
                await self._register(state, known=before is not None)
                await self._converse(state, requests, context, replaced)
            finally:
                self._nodes.detach(state)
                log.info("stream ended", node=hello.node, daemon_id=hello.daemon_id)
        except _Refused as refused:
            await context.abort(refused.code, refused.text)

    async def Backfill(  # type: ignore[override]  # noqa: N802  (as Ingest)
        self, requests: Requests, context: Context
    ) -> None:
        """What newer batches of a daemon have overtaken; its first response says that it may come."""
        try:
            hello = await self._hello(requests)
            session = _Session(0)
            async with _refusing(), asyncio.TaskGroup() as tasks:
                tasks.create_task(self._take_in(hello, session, requests, late=True))
                await _answer(session, context)
        except _Refused as refused:
            await context.abort(refused.code, refused.text)

    async def _hello(self, requests: Requests) -> Hello:
        try:
            async with asyncio.timeout(HELLO_WITHIN_S):
                first = await anext(requests, None)
        except TimeoutError:
            raise _Refused(grpc.StatusCode.DEADLINE_EXCEEDED, f"no hello within {duration(HELLO_WITHIN_S)}") from None
        if first is None or first.WhichOneof("message") != "hello":
            raise _Refused(grpc.StatusCode.INVALID_ARGUMENT, "the first request of a stream must be the hello")
        hello = Hello(
            first.hello.node,
            first.hello.daemon_id,
            first.hello.version,
            first.hello.metrics_address if first.hello.HasField("metrics_address") else None,
        )
        for name, value in (("node", hello.node), ("daemon_id", hello.daemon_id)):
            if not 0 < len(value) <= LONGEST_NAME:
                text = f"hello.{name} has {len(value)} characters; it must have 1 to {LONGEST_NAME}"
                raise _Refused(grpc.StatusCode.INVALID_ARGUMENT, text)
        return hello

    def _attach(self, hello: Hello, replace: Callable[[], None]) -> NodeState:
        try:
            return self._nodes.attach(hello, self._now_us(), replace)
        except NodeTaken as taken:
            log.warning("a second daemon under one node name is refused", node=hello.node, daemon_id=hello.daemon_id)
            raise _Refused(grpc.StatusCode.ALREADY_EXISTS, str(taken)) from taken

    async def _register(self, state: NodeState, *, known: bool) -> None:
        hello, now_us = state.hello, self._now_us()
        # Who was here and has gone is known to have gone; of streams to other collectors only their traces are.
        silent_before_us = now_us + 1 if known else now_us - round(HELD_ELSEWHERE_S * 1e6)
        try:
            await asyncio.to_thread(
                self._registry.register_node,
                hello.node,
                hello.daemon_id,
                version=hello.version,
                metrics_address=hello.metrics_address,
                received_us=now_us,
                silent_before_us=silent_before_us,
            )
        except NodeNameTaken as taken:
            self._nodes.forget(state)
            raise _Refused(grpc.StatusCode.ALREADY_EXISTS, str(taken)) from taken
        except StorageError as error:
            raise _Refused(grpc.StatusCode.UNAVAILABLE, str(error)) from error

    async def _converse(self, state: NodeState, requests: Requests, context: Context, replaced: asyncio.Event) -> None:
        hello = state.hello
        try:
            acknowledged = await asyncio.to_thread(self._registry.acknowledged, hello.node, hello.daemon_id)
        except StorageError as error:
            raise _Refused(grpc.StatusCode.UNAVAILABLE, str(error)) from error
        log.info("stream opened", node=hello.node, daemon_id=hello.daemon_id, acknowledged=acknowledged)
        session = _Session(acknowledged)
        outbox = self._orders.attach(hello.node, session.order)

        def heard(sent_us: int, now_us: int) -> None:
            self._nodes.heard(state, sent_us=sent_us, now_us=now_us)

        try:
            async with _refusing(), asyncio.TaskGroup() as tasks:
                guard = tasks.create_task(_until_replaced(replaced))
                tasks.create_task(self._take_in(hello, session, requests, heard=heard))
                await _answer(session, context)
                guard.cancel()
        finally:
            self._orders.detach(outbox)

    async def _take_in(
        self,
        hello: Hello,
        session: _Session,
        requests: Requests,
        *,
        late: bool = False,
        heard: Callable[[int, int], None] = lambda _sent_us, _now_us: None,
    ) -> None:
        """Until the daemon has no more to send. Not reading on is what makes it wait."""
        async for request in requests:
            now_us = self._now_us()
            heard(request.sent_us, now_us)
            which = request.WhichOneof("message")
            if which == "hello":
                raise _Refused(grpc.StatusCode.INVALID_ARGUMENT, "a second hello on one stream")
            if which != "batch":
                continue  # a sign of life, or of a newer daemon
            if not 1 <= request.batch.sequence <= LARGEST_STORED:
                text = f"a batch is numbered {request.batch.sequence}; they count from 1"
                raise _Refused(grpc.StatusCode.INVALID_ARGUMENT, text)
            session.arrived(request.batch.sequence)
            done = partial(self._stored, session)
            await self._writer.put(Arrival(request.batch, hello.node, hello.daemon_id, now_us, done, late=late))
        session.end()

    def _stored(self, session: _Session, sequence: int, refused: Sequence[Refusal]) -> None:
        seconds = session.stored(sequence, refused)
        if seconds is not None:
            self._observation.ingest.took(seconds)
        for refusal in refused[:1]:
            log.warning("refused", sequence=sequence, reason=refusal.reason, text=refusal.text, more=len(refused) - 1)


class _Refused(Exception):  # noqa: N818  (a status, not a failure)
    """How a stream ends that does not end by itself."""

    def __init__(self, code: grpc.StatusCode, text: str) -> None:
        super().__init__(text)
        self.code, self.text = code, text


@asynccontextmanager
async def _refusing() -> AsyncIterator[None]:
    """Around a group of tasks: the first that ends the stream says how."""
    refused: _Refused | None = None
    try:
        yield
    except* _Refused as group:
        refused = next(_leaves(group))
    if refused:
        raise refused


def _leaves(group: BaseExceptionGroup[_Refused]) -> Iterator[_Refused]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error


async def _until_replaced(replaced: asyncio.Event) -> None:
    await replaced.wait()
    raise _Refused(grpc.StatusCode.ABORTED, "this daemon opened another stream")


async def _answer(session: _Session, context: Context) -> None:
    """The first response tells where to go on, the others what has become of what came."""
    session.news.set()
    while not session.over or session.news.is_set():
        await session.news.wait()
        session.news.clear()
        await context.write(session.response())
