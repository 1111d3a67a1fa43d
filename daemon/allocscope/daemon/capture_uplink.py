"""Captures toward the collector, beside the batches: one at a time, no faster than told, each until the collector has it on its disk."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import grpc
import structlog

from allocscope.daemon.capture_call import CaptureRefused, send
from allocscope.daemon.capture_losses import CaptureLosses
from allocscope.daemon.capture_spool import CaptureSpool, SpooledCapture
from allocscope.daemon.capture_thread import CaptureThread
from allocscope.daemon.collector_trouble import trouble
from allocscope.daemon.collector_way import CollectorWay
from allocscope.daemon.errors import CredentialsError
from allocscope.daemon.observed import Observed
from allocscope.daemon.packing import strip
from allocscope.daemon.procfs import printable
from allocscope.daemon.uplink import CHANNEL_OPTIONS, FIRST_BACKOFF_S, LONGEST_PROBLEM, REFUSED, REFUSED_BACKOFF_S

log = structlog.get_logger()

LONGEST_BACKOFF_S = 15.0
NEVER_TAKEN = {grpc.StatusCode.INVALID_ARGUMENT: "refused", grpc.StatusCode.RESOURCE_EXHAUSTED: "too_large"}
"""Answers that will not change, and what they count as."""


class CaptureUplink:
    """Sends for as long as it runs, whatever becomes of the collector."""

    def __init__(
        self,
        way: CollectorWay,
        node: str,
        spool: CaptureSpool,
        thread: CaptureThread,
        observed: Observed,
        losses: CaptureLosses,
        *,
        bytes_per_s: int,
    ) -> None:
        """`node` is this one's name."""
        self._way, self._node = way, node
        self._spool, self._thread, self._observed, self._losses = spool, thread, observed, losses
        self._bytes_per_s = bytes_per_s
        self._news = asyncio.Event()
        self._failed: Counter[str] = Counter()
        """By capture: how often the collector answered that it cannot take it now."""
        self._backoff_s = FIRST_BACKOFF_S
        self._problem = ""

    def wake(self) -> None:
        """There is a new capture."""
        self._news.set()

    async def run(self) -> None:
        """Send, and again, for ever."""
        while True:
            await self._wait_for_one()
            try:
                pause_s = await self._try_all()
            except Exception:  # whatever it is, the way to the collector is tried again
                log.exception("a capture could not be sent")
                pause_s = REFUSED_BACKOFF_S
            await self._pause(pause_s)

    async def _pause(self, at_least_s: float) -> None:
        """Longer each time, until the collector takes one."""
        if at_least_s:
            self._backoff_s = max(self._backoff_s, at_least_s)
            await asyncio.sleep(self._backoff_s * random.uniform(0.5, 1.0))
            self._backoff_s = min(self._backoff_s * 2, max(LONGEST_BACKOFF_S, at_least_s))

    async def _wait_for_one(self) -> None:
        while not len(self._spool):
            await self._news.wait()
            self._news.clear()

    async def _try_all(self) -> float:
        """All that there are, on one connection, as far as it goes; how long to pause then at least, seconds."""
        capture = None
        try:
            with self._way.open_blocking(CHANNEL_OPTIONS) as channel:
                while capture := self._next():
                    await self._send(channel, capture)
                    self._settled(capture)
            return 0.0
        except CaptureRefused as refusal:
            assert capture is not None
            return await self._was_refused(capture, refusal)
        except CredentialsError as error:
            self._tell(str(error))
            return FIRST_BACKOFF_S
        except OSError as error:
            self._tell(f"the spool's disk: {error}")
            return FIRST_BACKOFF_S

    def _next(self) -> SpooledCapture | None:
        """What failed least often, then what somebody waits for, then the oldest: one that fails holds no other one up."""
        captures = self._spool.captures()
        for gone in self._failed.keys() - {capture.capture_id for capture in captures}:
            del self._failed[gone]
        return min(captures, key=lambda c: (self._failed[c.capture_id], not c.is_asked_for), default=None)

    async def _send(self, channel: grpc.Channel, capture: SpooledCapture) -> None:
        stored = await self._thread.do(self._spool.open, capture)
        if stored is None:
            return
        with self._observed.capture_uplink.round():
            kept = await send(channel, self._node, stored, self._bytes_per_s)
        if kept != capture.capture_id:
            raise CaptureRefused(grpc.StatusCode.INTERNAL, f"it kept {kept!r} for capture {capture.capture_id}")
        await self._thread.do(self._spool.remove, capture)

    # what becomes of it

    def _settled(self, capture: SpooledCapture) -> None:
        del self._failed[capture.capture_id]
        self._backoff_s = FIRST_BACKOFF_S
        if self._problem:
            log.info("captures go to the collector again", address=self._way.address)
            self._problem = ""

    async def _was_refused(self, capture: SpooledCapture, refusal: CaptureRefused) -> float:
        """How long to pause at least, seconds."""
        code, why = refusal.code, refusal.why
        if code in NEVER_TAKEN:
            return await self._give_up(capture, NEVER_TAKEN[code], f"the collector refused it: {why}")
        if code is not grpc.StatusCode.UNAVAILABLE:
            self._failed[capture.capture_id] += 1
        if code is grpc.StatusCode.UNIMPLEMENTED:
            why = "it is older than this daemon and takes no captures; they are kept until it is renewed, or they are a week old"
        tls = await asyncio.to_thread(trouble, self._way) if code is grpc.StatusCode.UNAVAILABLE else None
        self._tell(tls or f"{code.name}: {why}")
        return REFUSED_BACKOFF_S if code in REFUSED else FIRST_BACKOFF_S

    async def _give_up(self, capture: SpooledCapture, reason: str, why: str) -> float:
        """Its snapshot, where it has one, so that who waits for it learns why it is missing; else all of it."""
        self._losses.add(reason, capture.capture_id, why)
        del self._failed[capture.capture_id]
        try:
            if capture.has_snapshot:
                await self._thread.do(strip, self._spool, capture, why)
            else:
                await self._thread.do(self._spool.remove, capture)
            return 0.0
        except OSError as error:
            self._failed[capture.capture_id] += 1
            self._tell(f"the spool's disk: {error}")
            return FIRST_BACKOFF_S

    def _tell(self, problem: str) -> None:
        """Log what is wrong when it begins, or changes."""
        problem = printable(problem)[:LONGEST_PROBLEM]
        if problem != self._problem:
            self._problem = problem
            log.warning("no captures go to the collector", address=self._way.address, why=problem)
