"""Batches on one stream to the collector: in the order of their numbers, a few at a time, until each is acknowledged."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

import grpc
import structlog

from allocscope.daemon.losses import Losses
from allocscope.daemon.observed import Observed
from allocscope.daemon.spool_frames import Counts
from allocscope.daemon.spool_segment import SpooledBatch
from allocscope.daemon.spool_state import LARGEST_SEQUENCE
from allocscope.proto.v1.collector_service_pb2 import Batch, IngestRequest, IngestResponse, NodeHello

log = structlog.get_logger()

WINDOW = 16
"""Batches on their way at a time, usually: enough for a collector that is a second away, little to send again."""
TOO_LARGE_BORNE = 5
"""So often a batch that is alone on its way, and not taken for its size (RESOURCE_EXHAUSTED), is sent before it is passed over."""


@dataclass(frozen=True, slots=True)
class _Sent:
    """A batch on its way."""

    at_s: float
    counts: Counts


class Lane:
    """Goes on from one stream to the next."""

    def __init__(
        self,
        after: Callable[[int], Awaitable[SpooledBatch | None]],
        acknowledge: Callable[[int], Awaitable[None]],
        observed: Observed,
        losses: Losses,
        *,
        window: int = WINDOW,
        together_bytes: int = 0,
    ) -> None:
        """`after` gives the first batch with a higher number; `acknowledge` takes up to which number the collector has them all.

        `window`: batches on their way at a time; of them some are given together, as many as make up `together_bytes`.
        """
        self._window, self._together_bytes = window, together_bytes
        self._after, self._acknowledge, self._observed, self._losses = after, acknowledge, observed, losses
        self._news = asyncio.Event()
        self._on_way: OrderedDict[int, _Sent] = OrderedDict()
        self._alone_through = 0
        """Up to this number batches go one by one: one of them was not taken, and it is not known which."""
        self._not_taken = 0
        """How often the batch that is first, alone on its way, was not taken."""
        self.acknowledged = 0

    def wake(self) -> None:
        """There is a new batch."""
        self._news.set()

    def begin(self) -> None:
        """A new stream, or none: what was on its way may be lost, and the stream before is given no more."""
        self._on_way = OrderedDict()
        self._news.set()

    async def batches(self) -> AsyncIterator[list[SpooledBatch]]:
        """Of one stream, until the next begins: gRPC leaves those of a broken one waiting, and they must not take batches from it."""
        on_way, last = self._on_way, self.acknowledged
        while on_way is self._on_way:
            self._news.clear()
            together = await self._together(on_way, last)
            if not together:
                await self._news.wait()
                continue
            last = together[-1].sequence
            yield together

    async def _together(self, on_way: OrderedDict[int, _Sent], last: int) -> list[SpooledBatch]:
        """What is there of the next, as far as it may go together, and be on its way."""
        alone = self.acknowledged < self._alone_through
        window, together_bytes = (1, 0) if alone else (self._window, self._together_bytes)
        taken: list[SpooledBatch] = []
        size = 0
        while len(on_way) < window and (not taken or size < together_bytes):
            batch = await self._after(last)
            if batch is None:
                break
            last = batch.sequence
            on_way[last] = _Sent(time.monotonic(), batch.counts)
            taken.append(batch)
            size += len(batch.payload) + len(batch.block_maps)
        return taken

    async def receive(self, through: int) -> None:
        """The collector has every batch up to this number; AnswerError: no daemon has as many."""
        if through > LARGEST_SEQUENCE:
            raise AnswerError(f"it acknowledges batch {through}, and no daemon has as many: what answers there?")
        if through <= self.acknowledged:
            return
        now_s = time.monotonic()
        while self._on_way and next(iter(self._on_way)) <= through:
            _, sent = self._on_way.popitem(last=False)
            self._observed.uplink.took(now_s - sent.at_s)
        await self._settle(through)

    async def was_not_taken(self) -> None:
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
        log.error("the collector does not take a batch for its size; it is passed over", batch=sequence)
        self._losses.add("too_large", sent.counts, batches=1)
        await self._settle(sequence)

    async def _settle(self, through: int) -> None:
        self.acknowledged, self._not_taken = through, 0
        await self._acknowledge(through)
        self._news.set()


def sent_now(*, hello: NodeHello | None = None, batch: Batch | None = None) -> IngestRequest:
    """One of them, for the collector."""
    return IngestRequest(sent_us=time.time_ns() // 1000, hello=hello, batch=batch)


def count_rejections(response: IngestResponse, observed: Observed) -> None:
    """What the collector does not store of what came."""
    for rejection in response.rejections:
        observed.dropped.add(rejection.count, "rejected", rejection.reason[:64])
        log.warning("collector rejected", batch=rejection.sequence, reason=rejection.reason, why=rejection.message)


async def converse(
    call: AsyncIterable[IngestResponse | None], receive: Callable[[IngestResponse], Awaitable[None]]
) -> None:
    """Until the collector ends the call; AioRpcError: it did in disorder; AnswerError, BatchNotSent.

    Of a task that is cancelled it ends by CancelledError, always: gRPC (1.66 to 1.85) may swallow that where the call fails just then.
    """
    task = asyncio.current_task()
    assert task is not None
    try:
        async for response in call:
            if response is None:  # what grpc.aio makes of bytes that protobuf cannot read
                raise AnswerError("its answer cannot be read: what answers there?")
            await receive(response)
    except asyncio.CancelledError:
        if not task.cancelling():
            raise BatchNotSent from None  # gRPC cancels a call whose requests fail
        raise
    except grpc.aio.AioRpcError:
        if not task.cancelling():
            raise
    if task.cancelling():
        raise asyncio.CancelledError


class AnswerError(Exception):
    """No collector says that."""


class BatchNotSent(Exception):  # noqa: N818 (gRPC has logged what is wrong)
    """A batch could not be made a message."""
