"""Toward the collector: what is new in the order of its numbers, and beside it what waited too long for that."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol, cast

import grpc
import structlog

from allocscope.daemon.backfill import Backfill
from allocscope.daemon.backfill import Source as LateSource
from allocscope.daemon.collector_trouble import trouble
from allocscope.daemon.collector_way import CollectorWay
from allocscope.daemon.errors import CredentialsError
from allocscope.daemon.lane import AnswerError, Lane, converse, count_rejections, sent_now
from allocscope.daemon.losses import Losses
from allocscope.daemon.observed import Observed
from allocscope.daemon.procfs import printable
from allocscope.daemon.spool_segment import SpooledBatch
from allocscope.model.orders import Order
from allocscope.model.wire import WireError, order_from_wire
from allocscope.proto.v1.collector_service_pb2 import Batch, IngestRequest, IngestResponse, NodeHello
from allocscope.proto.v1.collector_service_pb2_grpc import CollectorServiceStub

if TYPE_CHECKING:
    from allocscope.proto.v1.collector_service_pb2_grpc import CollectorServiceAsyncStub

log = structlog.get_logger()

FIRST_BACKOFF_S, LONGEST_BACKOFF_S = 0.2, 5.0
REFUSED_BACKOFF_S = 30.0
"""After an answer that will not change by itself: another daemon of this name, a wrong certificate."""
ANSWERS_WITHIN_S = 10.0
"""A collector says at once that it is there; one that does not is told of."""
LONGEST_PROBLEM = 1000
"""Letters."""
REFUSED = (
    grpc.StatusCode.ALREADY_EXISTS,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.UNIMPLEMENTED,
)
CHANNEL_OPTIONS = (
    # A daemon talks to its collector directly; $http_proxy is for the way out of the site.
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 2_000),
    ("grpc.max_reconnect_backoff_ms", 15_000),
)


class Source(LateSource, Protocol):
    """Where the batches are; each call may take a disk's time."""

    async def after(self, sequence: int) -> SpooledBatch | None:
        """The first batch with a higher number, but for those that come late."""

    async def acknowledge(self, through: int) -> None:
        """The collector has everything up to this number, but for what comes late."""

    def late_before(self, sequence: int) -> int:
        """How many numbers directly before this one come late."""
        ...


class CollectorUplink:
    """Sends for as long as it runs, whatever becomes of the collector."""

    def __init__(
        self,
        way: CollectorWay,
        hello: NodeHello,
        source: Source,
        observed: Observed,
        losses: Losses,
        on_order: Callable[[str, Order], bool],
        *,
        backlog_bytes_per_s: float,
    ) -> None:
        """`backlog_bytes_per_s`: how fast what waited follows, at most."""
        self._way, self._hello, self._source, self._observed = way, hello, source, observed
        self._on_order = on_order
        self._lane = Lane(self._after, source.acknowledge, observed, losses)
        self._backfill = Backfill(hello, source, observed, losses, bytes_per_s=backlog_bytes_per_s)
        self._answered, self._settled = asyncio.Event(), asyncio.Event()
        self._last_problem = ""
        self.is_connected = False

    def wake(self) -> None:
        """There is a new batch."""
        self._lane.wake()

    async def run(self) -> None:
        """Connect, send, and again, for ever."""
        backoff_s = FIRST_BACKOFF_S
        while True:
            longest_s = LONGEST_BACKOFF_S
            answered_before = self._lane.acknowledged
            try:
                async with self._way.open(CHANNEL_OPTIONS) as channel:
                    await self._session(cast("CollectorServiceAsyncStub", CollectorServiceStub(channel)))
                self._tell("the collector ended the stream")
            except grpc.aio.AioRpcError as error:
                if error.code() in REFUSED:
                    backoff_s = longest_s = REFUSED_BACKOFF_S
                await self._tell_why(error)
                if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
                    await self._lane.was_not_taken()
                    self._settled.set()
            except CredentialsError as error:
                self._tell(str(error), refused=True)
            except AnswerError as error:
                backoff_s = longest_s = REFUSED_BACKOFF_S
                self._tell(str(error), refused=True)
            except Exception as error:  # whatever it is, the way to the collector is tried again
                log.exception("the stream to the collector failed")
                self._tell(repr(error))
            finally:
                self.is_connected = False
            if self._lane.acknowledged > answered_before:
                backoff_s = FIRST_BACKOFF_S
            await asyncio.sleep(backoff_s * random.uniform(0.5, 1.0))
            backoff_s = min(backoff_s * 2, longest_s)

    async def drain(self, through: int) -> None:
        """Wait until everything up to this batch is acknowledged, but for what comes late."""
        while self._lane.acknowledged < through:
            self._settled.clear()
            await self._settled.wait()

    async def _session(self, stub: CollectorServiceAsyncStub) -> None:
        self._lane.begin()
        self._answered.clear()
        backfill = asyncio.create_task(self._backfill.run(stub))
        try:
            await converse(stub.Ingest(self._requests()), self._receive)
        finally:
            backfill.cancel()
            await asyncio.wait([backfill])

    async def _requests(self) -> AsyncIterator[IngestRequest]:
        yield sent_now(hello=self._hello)
        await self._wait_until_answered()  # the first response says where to go on
        async for (spooled,) in self._lane.batches():
            batch = Batch.FromString(spooled.whole)
            batch.unused_before += self._source.late_before(batch.sequence)
            yield sent_now(batch=batch)

    async def _wait_until_answered(self) -> None:
        try:
            await asyncio.wait_for(self._answered.wait(), ANSWERS_WITHIN_S)
        except TimeoutError:
            self._tell(f"it took the stream, and has not answered within {ANSWERS_WITHIN_S:g} s; it is waited for")
            await self._answered.wait()

    async def _after(self, sequence: int) -> SpooledBatch | None:
        """None also where the disk does not give it: it is asked again with the next batch."""
        try:
            await self._backfill.overtake()
            return await self._source.after(sequence)
        except OSError as error:
            self._tell(f"the spool cannot be read: {error}")
            return None

    async def _receive(self, response: IngestResponse) -> None:
        if not self.is_connected:
            log.info("collector connected", address=self._way.address)
            self.is_connected, self._last_problem = True, ""
        count_rejections(response, self._observed)
        for message in response.orders:
            with suppress(WireError):
                order = order_from_wire(message.order)
                if order is not None and not self._on_order(message.process_id, order):
                    log.info("order for a process that is not here", process=message.process_id)
        await self._lane.receive(response.acknowledged_sequence)
        self._settled.set()
        self._answered.set()

    async def _tell_why(self, error: grpc.aio.AioRpcError) -> None:
        code, why = error.code(), None
        if code is grpc.StatusCode.UNAVAILABLE:
            why = await asyncio.to_thread(trouble, self._way)
        self._tell(why or f"{code.name}: {error.details()}", refused=why is not None or code in REFUSED)

    def _tell(self, problem: str, *, refused: bool = False) -> None:
        """Log what is wrong when it begins, or changes; whoever answers there may say what he likes."""
        problem = printable(problem)[:LONGEST_PROBLEM]
        self._observed.uplink.failed()
        if problem != self._last_problem:
            self._last_problem = problem
            (log.error if refused else log.warning)(
                "nothing goes to the collector", address=self._way.address, why=problem
            )
