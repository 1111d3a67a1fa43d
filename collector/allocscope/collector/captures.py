"""CaptureService: whole snapshots from the daemons into the database, piece by piece, without looking into them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import grpc
import structlog

from allocscope.collector.arrivals import Claim, Refused, claim_of
from allocscope.collector.observation import Observation
from allocscope.collector.whole_gzip import WholeGzip
from allocscope.model.figures import duration
from allocscope.proto.v1 import capture_service_pb2, capture_service_pb2_grpc
from allocscope.storage.captures import CaptureArrival, CaptureStore, Dropped, Kept
from allocscope.storage.errors import StorageError, Unstorable
from allocscope.storage.repository import Repository

log = structlog.get_logger(__name__)

Request = capture_service_pb2.KeepRequest
Response = capture_service_pb2.KeepResponse
Requests = AsyncIterator[Request]
Context = grpc.aio.ServicerContext[Request, Response]

AT_ONCE = 4
"""Snapshots that come in at a time; others wait."""
MOST_WAITING = 256
WITHIN_S = 60.0
"""A daemon that says nothing more for so long is given up."""
PIECE_BYTES = 1 << 20
"""Of a row in the database."""


@dataclass(frozen=True, slots=True)
class CaptureLimits:
    """What is kept, by the collector's settings."""

    largest_bytes: int
    """Of one snapshot, as it is."""
    stored_bytes: int
    """Of all snapshots together, as they are kept."""


class CaptureService(capture_service_pb2_grpc.CaptureServiceServicer):
    """Serves daemons."""

    def __init__(
        self,
        repository: Repository,
        observation: Observation,
        limits: CaptureLimits,
        *,
        now_us: Callable[[], int],
        came: Callable[[], None] = lambda: None,
    ) -> None:
        """`came` is called when there is a new one."""
        self._repository, self._captures, self._came = repository, repository.captures, came
        self._observation, self._limits, self._now_us = observation, limits, now_us
        self._turns = asyncio.Semaphore(AT_ONCE)
        self._waiting = 0
        observation.captures_limit.set(limits.stored_bytes)

    async def Keep(  # pyright: ignore[reportIncompatibleMethodOverride]  # noqa: N802  (gRPC's name; it takes a coroutine, too)
        self, requests: Requests, context: Context
    ) -> Response:
        """One capture."""
        try:
            with self._observation.capture_keep.round():
                return await self._keep(requests)
        except Refused as refused:
            log.warning("a capture is not taken", code=refused.code.name, why=refused.text)
            if refused.for_good:
                self._observation.captures.labels(refused.reason, "refused").inc()
            await context.abort(refused.code, refused.text)
        except StorageError as error:
            log.warning("a capture cannot be kept now", why=str(error))
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))

    async def _keep(self, requests: Requests) -> Response:
        claim = await asyncio.to_thread(claim_of, await _next(requests), self._repository)
        capture = claim.capture
        if not claim.is_kept:
            if capture.snapshot_bytes is None:
                await _nothing_more(requests, claim)
                await self._settle(claim.arrival(self._now_us()))
            else:
                self._check_size(claim, capture.snapshot_bytes)
                async with self._turn(claim):
                    await self._receive(requests, claim)
        return Response(capture_id=capture.capture_id)

    def _check_size(self, claim: Claim, snapshot_bytes: int) -> None:
        if snapshot_bytes > self._limits.largest_bytes:
            raise claim.too_large(
                f"its snapshot has {snapshot_bytes} bytes, and at most {self._limits.largest_bytes} are kept"
                " (the collector's capture_largest_bytes)"
            )

    @asynccontextmanager
    async def _turn(self, claim: Claim) -> AsyncIterator[None]:
        """Few at a time: each takes a thread now and then, and the database."""
        if self._waiting >= MOST_WAITING:
            raise claim.refused(
                grpc.StatusCode.UNAVAILABLE, f"{self._waiting} captures wait for their turn: send it again later"
            )
        self._waiting += 1
        try:
            await self._turns.acquire()
        finally:
            self._waiting -= 1
        try:
            yield
        finally:
            self._turns.release()

    async def _receive(self, requests: Requests, claim: Claim) -> None:
        begin = self._captures.begin
        upload = await asyncio.to_thread(begin, claim.capture.capture_id, received_us=self._now_us())
        incoming = _Incoming(claim, self._captures, upload, self._limits, self._now_us)
        try:
            while (request := await _next(requests)) is not None:
                await incoming.take(claim.piece_of(request))
            arrival = await incoming.end()
            await self._settle(arrival)
        except BaseException:  # a broken call too
            asyncio.get_running_loop().run_in_executor(None, self._discard, upload)
            raise

    def _discard(self, upload: int) -> None:
        try:
            self._captures.discard(upload)
        except StorageError as error:
            log.warning("what came of a capture is taken away later", why=str(error))

    async def _settle(self, arrival: CaptureArrival) -> None:
        """It is whole: keep it."""
        capture = arrival.capture
        try:
            kept: Kept = await asyncio.to_thread(self._captures.keep, arrival, limit_bytes=self._limits.stored_bytes)
        except Unstorable as error:
            raise Refused(grpc.StatusCode.INVALID_ARGUMENT, str(error), capture.reason.value) from error
        if not kept.is_new:
            return
        outcome = "failed" if arrival.upload is None else "kept"
        self._observation.captures.labels(capture.reason.value, outcome).inc()
        log.info(
            "a capture came",
            outcome=outcome,
            capture=capture.capture_id,
            job=arrival.process.job,
            rank=arrival.process.rank,
            node=arrival.node,
            reason=capture.reason.value,
            stored_bytes=arrival.stored_bytes,
            problem=capture.problem,
        )
        self._came()
        note_dropped(self._observation, kept.dropped)
        await asyncio.to_thread(note_totals, self._observation, self._captures)


class _Incoming:
    """A snapshot on its way into the database."""

    def __init__(
        self, claim: Claim, captures: CaptureStore, upload: int, limits: CaptureLimits, now_us: Callable[[], int]
    ) -> None:
        self._claim, self._captures, self._upload, self._limits = claim, captures, upload, limits
        self._now_us = now_us
        self._whole = WholeGzip(limits.largest_bytes)
        self._buffer = bytearray()
        self._piece_count = self._stored_bytes = 0

    async def take(self, piece: bytes) -> None:
        """Some bytes of the gzip stream."""
        self._buffer += piece
        while len(self._buffer) >= PIECE_BYTES:
            await self._put(PIECE_BYTES)

    async def end(self) -> CaptureArrival:
        """No more come: what is to be kept, if it is whole."""
        if self._buffer:
            await self._put(len(self._buffer))
        with self._claim.judging():
            snapshot_bytes = self._whole.end()
        if snapshot_bytes != self._claim.capture.snapshot_bytes:
            raise self._claim.damaged(
                f"its snapshot has {snapshot_bytes} bytes, and {self._claim.capture.snapshot_bytes} were announced"
            )
        arrival = self._claim.arrival(self._now_us())
        return replace(arrival, upload=self._upload, piece_count=self._piece_count, stored_bytes=self._stored_bytes)

    async def _put(self, count: int) -> None:
        piece = bytes(self._buffer[:count])
        del self._buffer[:count]
        if self._stored_bytes + count > self._limits.stored_bytes:
            raise self._claim.too_large(
                f"it takes more than the {self._limits.stored_bytes} bytes that all captures together may take"
                " (the collector's captures_limit_bytes)"
            )
        begun_s = time.monotonic()
        await asyncio.to_thread(self._store, piece)
        # Samples come first: at least half of the time the database is theirs.
        await asyncio.sleep(time.monotonic() - begun_s)

    def _store(self, piece: bytes) -> None:
        with self._claim.judging():
            self._whole.see(piece)
        self._captures.add(self._upload, self._piece_count, piece, received_us=self._now_us())
        self._piece_count += 1
        self._stored_bytes += len(piece)


async def _next(requests: Requests) -> Request | None:
    """None: there is no more."""
    try:
        async with asyncio.timeout(WITHIN_S):
            return await anext(requests, None)
    except TimeoutError:
        text = f"nothing came for {duration(WITHIN_S)}: send the capture again"
        raise Refused(grpc.StatusCode.DEADLINE_EXCEEDED, text, None) from None


async def _nothing_more(requests: Requests, claim: Claim) -> None:
    if await _next(requests) is not None:
        raise claim.damaged("it is announced without a snapshot, and one comes")


def note_dropped(observation: Observation, dropped: Dropped) -> None:
    """Snapshots that went."""
    for why, captures in (("age", dropped.for_age), ("room", dropped.for_room)):
        if captures:
            observation.dropped.labels("captures", why).inc(captures)
            log.info("captures dropped", captures=captures, why=why)


def note_totals(observation: Observation, captures: CaptureStore) -> None:
    """What is kept now."""
    observation.captures_stored.set(captures.totals().stored_bytes)
