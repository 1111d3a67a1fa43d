"""What would help: captures with a history are replayed, one at a time, and what comes of it is kept and told.

What there is to do lies in the database (`allocscope.storage.advice`), so that a restart loses nothing and several collectors share
the work. Each looks there for what others found, too, since an alert may stand at one and be judged at another.
"""

from __future__ import annotations

import asyncio
import secrets
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, BinaryIO

import structlog

from allocscope.collector.advice_facts import device_facts
from allocscope.collector.advice_process import WORKER, Replayed, replay
from allocscope.collector.advice_task import Failure, Limits, ReplayTask
from allocscope.collector.observation import Observation
from allocscope.model import Advice, AdviceKind
from allocscope.storage.advice import AdviceClaim, AdviceRecord
from allocscope.storage.captures import CaptureRecord
from allocscope.storage.errors import StorageError
from allocscope.storage.repository import Repository

log = structlog.get_logger(__name__)

EVERY_S = 5.0
LEASE_S, RENEW_EVERY_S = 20.0, 5.0
"""A collector that was killed has given up its claim after the one; the other bears a database that is busy for a while."""
RECEIVED_WITHIN_US = 86_400_000_000
"""What a job did the day before helps nobody any more."""
MOST_TRIES = 3
"""Claims of a capture of which none came to its end: it may be what ends collectors."""
NEWS_AT_ONCE, REMEMBERED = 200, 1000

Told = Callable[[Sequence[AdviceRecord]], None]


class Advisor:
    """This collector's part of the work. Used on the event loop, but for `wake`."""

    def __init__(
        self,
        repository: Repository,
        observation: Observation,
        limits: Limits,
        *,
        now_us: Callable[[], int],
        told: Told,
        enabled: bool = True,
        command: Sequence[str] = WORKER,
    ) -> None:
        """`told` gets what was found, here or elsewhere, the oldest first, each once. `enabled`: False: others may work, this one does not."""
        self._repository, self._captures, self._advice = repository, repository.captures, repository.advice
        self._observation, self._limits, self._now_us = observation, limits, now_us
        self._told, self._enabled, self._command = told, enabled, command
        self._by = secrets.token_hex(8)
        self._loop = asyncio.get_running_loop()
        self._news = asyncio.Event()
        self._known: OrderedDict[tuple[str, str], None] = OrderedDict()

    def wake(self) -> None:
        """A capture has come. From any thread."""
        self._loop.call_soon_threadsafe(self._news.set)

    async def follow(self) -> None:
        """For ever."""
        while True:
            self._news.clear()
            if not await self.look():
                try:
                    await asyncio.wait_for(self._news.wait(), EVERY_S)
                except TimeoutError:
                    continue

    async def look(self) -> bool:
        """Work on one capture, and tell what is new; whether there was one."""
        worked = False
        try:
            worked = self._enabled and await self._work()
            await self._tell_news()
        except StorageError as error:
            log.warning("advice cannot be looked for now", error=str(error))
        except Exception:  # (whatever it is, the next capture is another)
            log.exception("a look for captures to replay failed")
        return worked

    # one capture

    async def _work(self) -> bool:
        now_us = self._now_us()
        since_us = now_us - RECEIVED_WITHIN_US
        claim = await asyncio.to_thread(
            self._advice.claim,
            self._by,
            now_us=now_us,
            until_us=now_us + round(LEASE_S * 1e6),
            received_since_us=since_us,
        )
        waiting = await asyncio.to_thread(self._advice.waiting, now_us=now_us, received_since_us=since_us)
        self._observation.advice_waiting.set(waiting)
        if claim is None:
            return False
        try:
            with self._observation.advice_loop.round():
                await self._settle(claim, await self._replayed(claim))
        except asyncio.CancelledError:
            await asyncio.to_thread(self._release, claim.capture)
            raise
        return True

    def _release(self, capture: CaptureRecord) -> None:
        try:
            self._advice.release(capture.capture_id, self._by)
        except StorageError as error:
            log.warning("a capture is replayed later than it could be", capture=capture.capture_id, why=str(error))

    async def _replayed(self, claim: AdviceClaim) -> tuple[ReplayTask | None, Replayed]:
        capture = claim.capture
        if claim.tries > MOST_TRIES:
            text = f"it was begun {MOST_TRIES} times, and each time the collector ended before the replay did"
            return None, Replayed({}, Failure("given_up", text))
        task = await asyncio.to_thread(self._task, capture)
        try:
            with tempfile.TemporaryFile(prefix="allocscope-replay-") as file:
                if not await asyncio.to_thread(self._write, file, task, capture):
                    return task, Replayed({}, Failure("gone", "its snapshot was dropped before it could be replayed"))
                return task, await self._while_ours(capture, replay(file, self._limits, self._command))
        except OSError as error:  # a full disk may have room in a while
            if claim.tries < MOST_TRIES:
                raise
            text = f"a temporary file for it, or a process, cannot be had: {error.strerror or error}"
            return task, Replayed({}, Failure("system", text))

    def _task(self, capture: CaptureRecord) -> ReplayTask:
        record = self._repository.process(capture.process_id)
        process = record.process if record else None
        return ReplayTask(
            f"capture {capture.capture_id}",
            process.torch_version if process else None,
            device_facts(self._repository, capture, process) if process else (),
            self._limits,
        )

    def _write(self, file: BinaryIO, task: ReplayTask, capture: CaptureRecord) -> bool:
        """In a file that has no name, so that nothing of it is left whatever happens; whether all of the snapshot is there."""
        file.write(task.to_line())
        number = 0
        while (piece := self._captures.piece(capture.capture_id, number)) is not None:
            file.write(piece)
            number += 1
        file.flush()
        return number > 0

    async def _while_ours(self, capture: CaptureRecord, replaying: Coroutine[Any, Any, Replayed]) -> Replayed:
        """Renew the claim meanwhile."""
        working = asyncio.create_task(replaying)
        try:
            while not (await asyncio.wait([working], timeout=RENEW_EVERY_S))[0]:
                if not await self._renew(capture):
                    return Replayed({}, Failure("gone", "another collector has it by now"))
            return working.result()
        finally:
            working.cancel()
            await asyncio.wait([working])

    async def _renew(self, capture: CaptureRecord) -> bool:
        until_us = self._now_us() + round(LEASE_S * 1e6)
        try:
            return await asyncio.to_thread(self._advice.renew, capture.capture_id, self._by, until_us=until_us)
        except StorageError as error:
            log.warning("a claim cannot be renewed now", capture=capture.capture_id, why=str(error))
            return True

    async def _settle(self, claim: AdviceClaim, found: tuple[ReplayTask | None, Replayed]) -> None:
        task, replayed = found
        capture = claim.capture
        records = _records(capture, task, replayed, self._now_us())
        if not await asyncio.to_thread(self._advice.settle, capture.capture_id, self._by, records):
            return
        if replayed.failure is not None:
            self._observation.advice_failed.labels(replayed.failure.reason).inc()
            log.warning(
                "no advice could be made",
                capture=capture.capture_id,
                job=capture.job,
                rank=capture.rank,
                why=replayed.failure.text,
                said=replayed.last_words or None,
            )
        for record in records:
            kind = record.advice.kind.value
            self._observation.advice.labels(kind).inc()
            log.info("advice", capture=capture.capture_id, job=capture.job, rank=capture.rank, kind=kind)

    # what is new

    async def _tell_news(self) -> None:
        page = await asyncio.to_thread(partial(self._advice.page, limit=NEWS_AT_ONCE))
        new = [record for record in reversed(page.items) if (record.capture_id, record.device_uuid) not in self._known]
        for record in new:
            self._known[record.capture_id, record.device_uuid] = None
        while len(self._known) > REMEMBERED:
            self._known.popitem(last=False)
        if new:
            self._told(new)


def _records(
    capture: CaptureRecord, task: ReplayTask | None, replayed: Replayed, made_us: int
) -> tuple[AdviceRecord, ...]:
    """What is kept: of each device that was replayed its advice, of the others why there is none."""
    found = dict(replayed.advice)
    if replayed.failure is not None:
        devices = [facts.uuid for facts in task.devices] if task else []
        for uuid in devices or [capture.device_uuid or ""]:
            found.setdefault(uuid, Advice(AdviceKind.UNKNOWN, replayed.failure.text))
    return tuple(
        AdviceRecord(
            capture.capture_id, capture.process_id, uuid, capture.job, capture.rank, capture.node, made_us, advice
        )
        for uuid, advice in found.items()
    )
