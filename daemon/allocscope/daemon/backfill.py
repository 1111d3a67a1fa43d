"""After an outage: what waits is postponed, so that what is new reaches the collector at once, and follows beside it, at a bounded rate."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

import grpc
import structlog

from allocscope.daemon.lane import AnswerError, Lane, converse, count_rejections, sent_now
from allocscope.daemon.losses import Losses
from allocscope.daemon.observed import Observed
from allocscope.daemon.open_batch import merged
from allocscope.daemon.spool_segment import SpooledBatch
from allocscope.model.wire import LARGEST_STORED
from allocscope.proto.v1.collector_service_pb2 import Batch, IngestRequest, IngestResponse, NodeHello

if TYPE_CHECKING:
    from allocscope.proto.v1.collector_service_pb2_grpc import CollectorServiceAsyncStub

log = structlog.get_logger()

BEHIND_BATCHES = 60
"""That wait to be sent in order, before they are postponed: about a minute."""
ANSWERS_WITHIN_S = 5.0
"""A collector that takes late batches says so at once; until then, and without, all go in their order."""
START_WITHIN_S = 2.0
"""The nodes of a fleet, whose collector returns, do not all begin at one moment."""
BACKOFF_S = 5.0
LATE_WINDOW, TOGETHER_BYTES = 1024, 256 << 10
"""Late batches on their way at a time; and what goes as one, which costs a collector a small part of what single seconds do."""


class Source(Protocol):
    """Where the batches are that come late; each call may take a disk's time."""

    @property
    def waiting_in_order(self) -> int:
        """Batches on disk that are not acknowledged, but for those that come late, count."""
        ...

    @property
    def waiting_late(self) -> int:
        """Batches that come late and are not acknowledged, count."""
        ...

    async def late_after(self, sequence: int) -> SpooledBatch | None:
        """The first batch that comes late, with a higher number."""

    async def acknowledge_late(self, through: int) -> None:
        """The collector has everything up to this number that comes late."""

    async def postpone(self) -> None:
        """What waits comes late from now on. OSError: it does not."""


class Backfill:
    """Beside each stream of new batches, whenever there are late ones."""

    def __init__(
        self, hello: NodeHello, source: Source, observed: Observed, losses: Losses, *, bytes_per_s: float
    ) -> None:
        self._hello, self._source, self._bytes_per_s = hello, source, bytes_per_s
        self._lane = Lane(
            source.late_after,
            self._acknowledge,
            observed,
            losses,
            window=LATE_WINDOW,
            together_bytes=min(TOGETHER_BYTES, round(bytes_per_s)),
        )
        self._observed = observed
        self._needed, self._decided = asyncio.Event(), asyncio.Event()
        self._is_taken = self._is_failing = False

    async def overtake(self) -> None:
        """Postpone what waits, where it is much and the collector can take it late."""
        waiting = self._source.waiting_in_order
        if waiting <= BEHIND_BATCHES:
            return
        self._needed.set()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._decided.wait(), ANSWERS_WITHIN_S)
        if not self._is_taken:
            return
        try:
            await self._source.postpone()
        except OSError as error:
            if not self._is_failing:
                log.warning("all goes on in order", why=f"the spool cannot be written: {error.strerror}")
            self._is_failing = True
            return
        self._is_failing = False
        log.info("what is new goes first; what waited follows beside it", batches=waiting)
        self._needed.set()
        self._lane.wake()

    async def run(self, stub: CollectorServiceAsyncStub) -> None:
        """As long as one channel's stream of new batches lives, or until its collector says that it takes none late."""
        self._decided.clear()
        self._is_taken = False
        if self._source.waiting_late:
            self._needed.set()
        while True:
            await self._needed.wait()
            try:
                self._lane.begin()
                await converse(stub.Backfill(self._requests()), self._receive)
                if not self._source.waiting_late:
                    self._needed.clear()
                    continue
                why = "the collector ended the stream"
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                    log.info("the collector takes batches in their order only; it is older than this daemon")
                    self._decided.set()
                    return
                if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
                    await self._lane.was_not_taken()
                why = f"{error.code().name}: {error.details()}"
            except AnswerError as error:
                why = str(error)
            except Exception as error:  # whatever it is, it is tried again
                log.exception("the stream of late batches failed")
                why = repr(error)
            log.info("what comes late cannot be sent now", why=why)
            await asyncio.sleep(BACKOFF_S * random.uniform(0.5, 1.0))

    async def _receive(self, response: IngestResponse) -> None:
        self._is_taken = True
        self._decided.set()
        count_rejections(response, self._observed)
        await self._lane.receive(response.acknowledged_sequence)

    async def _requests(self) -> AsyncIterator[IngestRequest]:
        yield sent_now(hello=self._hello)
        await self._decided.wait()
        await asyncio.sleep(random.uniform(0, START_WITHIN_S))
        async for together in self._lane.batches():
            batch = merged(Batch.FromString(one.whole) for one in together)
            yield sent_now(batch=batch)
            await asyncio.sleep(batch.ByteSize() / self._bytes_per_s)

    async def _acknowledge(self, through: int) -> None:
        await self._source.acknowledge_late(through)
        if await self._source.late_after(through) is None:
            await self._source.acknowledge_late(LARGEST_STORED)  # what is left cannot be read
            log.info("what waited is with the collector")
            self._lane.begin()
