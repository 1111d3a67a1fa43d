"""Toward the collector: batches in the order of their numbers, a few at a time, until each is acknowledged."""

from __future__ import annotations

import asyncio
import random
import time
from collections import OrderedDict
from collections.abc import AsyncIterable, AsyncIterator, Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Protocol, cast

import grpc
import structlog

from allocscope.daemon.observed import Observed
from allocscope.daemon.spool import Counts, SpooledBatch
from allocscope.model.orders import Order
from allocscope.model.wire import WireError, order_from_wire
from allocscope.proto.v1.collector_service_pb2 import Batch, IngestRequest, IngestResponse, NodeHello
from allocscope.proto.v1.collector_service_pb2_grpc import CollectorServiceStub

if TYPE_CHECKING:
    from allocscope.proto.v1.collector_service_pb2_grpc import CollectorServiceAsyncStub

log = structlog.get_logger()

WINDOW = 16
"""Batches on their way at a time: enough for a collector that is a second away, little to send again."""
FIRST_BACKOFF_S, LONGEST_BACKOFF_S = 0.2, 5.0
TOO_LARGE_BORNE = 5
"""So often a batch that is alone on its way, and not taken for its size (RESOURCE_EXHAUSTED), is sent before it is passed over."""
REFUSED_BACKOFF_S = 30.0
"""After an answer that will not change by itself: another daemon of this name, a wrong certificate."""
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


@dataclass(frozen=True, slots=True)
class _Sent:
    """A batch on its way."""

    at_s: float
    counts: Counts


class Source(Protocol):
    """Where the batches are; each call may take a disk's time."""

    async def after(self, sequence: int) -> SpooledBatch | None:
        """The first batch with a higher number."""

    async def acknowledge(self, through: int) -> None:
        """The collector has everything up to this number."""


class CollectorUplink:
    """Sends for as long as it runs, whatever becomes of the collector."""

    def __init__(
        self,
        address: str,
        hello: NodeHello,
        source: Source,
        observed: Observed,
        on_order: Callable[[str, Order], bool],
    ) -> None:
        self._address, self._hello, self._source, self._observed = address, hello, source, observed
        self._on_order = on_order
        self._news, self._answered = asyncio.Event(), asyncio.Event()
        self._settled = asyncio.Event()
        self._on_way: OrderedDict[int, _Sent] = OrderedDict()
        self._alone_through = 0
        """Up to this number batches go one by one: one of them was not taken, and it is not known which."""
        self._not_taken = 0
        """How often the batch that is first, alone on its way, was not taken."""
        self._last_problem = ""
        self.is_connected = False
        self.acknowledged = 0

    def wake(self) -> None:
        """There is a new batch."""
        self._news.set()

    async def run(self) -> None:
        """Connect, send, and again, for ever."""
        backoff_s = FIRST_BACKOFF_S
        while True:
            longest_s = LONGEST_BACKOFF_S
            answered_before = self.acknowledged
            try:
                async with grpc.aio.insecure_channel(self._address, options=CHANNEL_OPTIONS) as channel:
                    await self._session(cast("CollectorServiceAsyncStub", CollectorServiceStub(channel)))
                self._tell("the collector ended the stream")
            except grpc.aio.AioRpcError as error:
                if error.code() in REFUSED:
                    backoff_s = longest_s = REFUSED_BACKOFF_S
                self._tell(f"{error.code().name}: {error.details()}", refused=error.code() in REFUSED)
                if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
                    await self._was_not_taken()
            except Exception as error:  # whatever it is, the way to the collector is tried again
                log.exception("the stream to the collector failed")
                self._tell(repr(error))
            finally:
                self.is_connected = False
            if self.acknowledged > answered_before:
                backoff_s = FIRST_BACKOFF_S
            await asyncio.sleep(backoff_s * random.uniform(0.5, 1.0))
            backoff_s = min(backoff_s * 2, longest_s)

    async def drain(self, through: int) -> None:
        """Wait until everything up to this batch is acknowledged."""
        while self.acknowledged < through:
            self._settled.clear()
            await self._settled.wait()

    async def _session(self, stub: CollectorServiceAsyncStub) -> None:
        on_way = self._on_way = OrderedDict()
        self._answered.clear()
        call = stub.Ingest(self._requests(on_way))
        try:
            await self._converse(call)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            self._tell("a batch could not be sent")  # gRPC cancels a call whose requests fail

    async def _converse(self, call: AsyncIterable[IngestResponse]) -> None:
        async for response in call:
            if not self.is_connected:
                log.info("collector connected", address=self._address)
                self.is_connected, self._last_problem = True, ""
            await self._receive(response)
            self._answered.set()

    async def _requests(self, on_way: OrderedDict[int, _Sent]) -> AsyncIterator[IngestRequest]:
        """Of one session: gRPC leaves those of a broken one waiting, and they must not take batches from the next."""
        yield IngestRequest(sent_us=_wall_us(), hello=self._hello)
        await self._answered.wait()  # the first response says where to go on
        last = self.acknowledged
        while on_way is self._on_way:
            self._news.clear()
            window = 1 if self.acknowledged < self._alone_through else WINDOW
            batch = await self._next(last) if len(on_way) < window else None
            if batch is None:
                await self._news.wait()
                continue
            last = batch.sequence
            on_way[last] = _Sent(time.monotonic(), batch.counts)
            yield IngestRequest(sent_us=_wall_us(), batch=Batch.FromString(batch.payload))

    async def _next(self, last: int) -> SpooledBatch | None:
        """None also where the disk does not give it: it is asked again with the next batch."""
        try:
            return await self._source.after(last)
        except OSError as error:
            self._tell(f"the spool cannot be read: {error}")
            return None

    async def _receive(self, response: IngestResponse) -> None:
        for rejection in response.rejections:
            self._observed.dropped.add(rejection.count, "rejected", rejection.reason[:64])
            log.warning("collector rejected", batch=rejection.sequence, reason=rejection.reason, why=rejection.message)
        for message in response.orders:
            with suppress(WireError):
                order = order_from_wire(message.order)
                if order is not None and not self._on_order(message.process_id, order):
                    log.info("order for a process that is not here", process=message.process_id)
        if response.acknowledged_sequence > self.acknowledged:
            await self._acknowledge(response.acknowledged_sequence)

    async def _acknowledge(self, through: int) -> None:
        now_s = time.monotonic()
        while self._on_way and next(iter(self._on_way)) <= through:
            _, sent = self._on_way.popitem(last=False)
            self._observed.uplink.took(now_s - sent.at_s)
        await self._settle(through)

    async def _settle(self, through: int) -> None:
        self.acknowledged, self._not_taken = through, 0
        await self._source.acknowledge(through)
        self._settled.set()
        self._news.set()

    async def _was_not_taken(self) -> None:
        """One of those on their way is too large for the collector, or a proxy. It must not hold up the others for ever."""
        if not self._on_way:
            return
        self._alone_through = max(self._alone_through, next(reversed(self._on_way)))
        if len(self._on_way) > 1:
            return
        sequence, sent = self._on_way.popitem()
        self._not_taken += 1
        if self._not_taken < TOO_LARGE_BORNE:
            return
        counts = {"batches": 1, **asdict(sent.counts)}
        log.error("the collector does not take a batch for its size; it is passed over", batch=sequence, **counts)
        for what, count in counts.items():
            if count:
                self._observed.dropped.add(count, what, "too_large")
        await self._settle(sequence)

    def _tell(self, problem: str, *, refused: bool = False) -> None:
        """Log what is wrong when it begins, or changes."""
        self._observed.uplink.failed()
        if problem != self._last_problem:
            self._last_problem = problem
            (log.error if refused else log.warning)("nothing goes to the collector", address=self._address, why=problem)


def _wall_us() -> int:
    return time.time_ns() // 1000
