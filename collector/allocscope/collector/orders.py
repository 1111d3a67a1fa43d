"""Captures that are on order: told to their nodes over the streams that are open here, and given up where nobody answers.

Orders are rows of the database, so that whoever takes one need not be the collector whose stream the node has: each looks once a
second for those of its nodes. A stream is told of each order once; the next stream of that node again, if it was not answered.
Used on the event loop, but for `wake`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import structlog

from allocscope.collector.observation import Observation
from allocscope.model import wire
from allocscope.model.figures import duration
from allocscope.proto.v1.collector_service_pb2 import ProcessOrder
from allocscope.storage.captures import CaptureRecord, CaptureState, CaptureStore
from allocscope.storage.errors import StorageError

log = structlog.get_logger(__name__)

EVERY_S = 1.0
ANSWER_WITHIN_US = 420_000_000
"""After the history that is to be recorded first. Daemons give up sooner, and say more of why."""
MOST_OPEN = 2_000
"""Orders that one look is for."""


@dataclass(slots=True, eq=False)
class Outbox:
    """A stream that takes orders."""

    node: str
    hand: Callable[[ProcessOrder], None]
    told: set[str] = field(default_factory=set)
    """By capture id."""

    def tell(self, record: CaptureRecord) -> bool:
        """Whether it was new to it."""
        if record.capture_id in self.told:
            return False
        self.told.add(record.capture_id)
        self.hand(ProcessOrder(process_id=record.process_id, order=wire.order_to_wire(record.order)))
        return True


class Orders:
    """The orders of this collector's nodes."""

    def __init__(self, captures: CaptureStore, observation: Observation, *, now_us: Callable[[], int]) -> None:
        self._captures, self._observation, self._now_us = captures, observation, now_us
        self._loop = asyncio.get_running_loop()
        self._outboxes: dict[str, Outbox] = {}
        self._unmarked: list[str] = []
        """Told, and the database does not know it yet."""
        self._news = asyncio.Event()

    def attach(self, node: str, hand: Callable[[ProcessOrder], None]) -> Outbox:
        """A node's stream is open; a stream of before gets no more."""
        outbox = self._outboxes[node] = Outbox(node, hand)
        self._news.set()
        return outbox

    def detach(self, outbox: Outbox) -> None:
        """It ended."""
        if self._outboxes.get(outbox.node) is outbox:
            del self._outboxes[outbox.node]

    def wake(self) -> None:
        """Something was just ordered. From any thread."""
        self._loop.call_soon_threadsafe(self._news.set)

    async def follow(self) -> None:
        """For ever."""
        while True:
            await self.look()
            try:
                await asyncio.wait_for(self._news.wait(), EVERY_S)
            except TimeoutError:
                continue
            self._news.clear()

    async def look(self) -> None:
        """Once; what the database does not allow now it may the next time."""
        try:
            with self._observation.capture_orders.round():
                records = await asyncio.to_thread(self._captures.open_orders, limit=MOST_OPEN)
                await self._give_up(records)
                self._tell(records)
                await self._mark()
        except StorageError as error:
            log.warning("captures on order cannot be looked up now", error=str(error))
        except Exception:  # (whatever it is, other orders are looked for the next time)
            log.exception("a look for captures on order failed")

    def _tell(self, records: Sequence[CaptureRecord]) -> None:
        now_us = self._now_us()
        for record in records:
            outbox = self._outboxes.get(record.node)
            if outbox is not None and now_us < _due_us(record) and outbox.tell(record):
                self._unmarked.append(record.capture_id)
                log.info(
                    "capture ordered", capture=record.capture_id, node=record.node, job=record.job, rank=record.rank
                )
        still_open = {record.capture_id for record in records}
        for outbox in self._outboxes.values():
            outbox.told &= still_open

    async def _mark(self) -> None:
        if self._unmarked:
            await asyncio.to_thread(self._captures.sent, list(self._unmarked), sent_us=self._now_us())
            self._unmarked.clear()

    async def _give_up(self, records: Sequence[CaptureRecord]) -> None:
        now_us = self._now_us()
        late = {record.capture_id: record for record in records if now_us >= _due_us(record)}
        if not late:
            return
        problems = {id_: why_late(record) for id_, record in late.items()}
        if not await asyncio.to_thread(self._captures.fail, problems):
            return  # another collector was first
        for record in late.values():
            self._observation.captures_ordered.labels(record.reason.value, "given_up").inc()
            log.warning("no answer to an order", capture=record.capture_id, node=record.node, job=record.job)


def _due_us(record: CaptureRecord) -> int:
    """When an answer should have come."""
    return (record.ordered_us or 0) + (record.history_us or 0) + ANSWER_WITHIN_US


def why_late(record: CaptureRecord) -> str:
    """Why there is no snapshot, for people."""
    waited = duration((ANSWER_WITHIN_US + (record.history_us or 0)) / 1e6)
    if record.state is CaptureState.SENT:
        return (
            f"node {record.node!r} was told of it, and no answer came within {waited}: does its daemon reach the"
            " collector, and is it of a version that takes captures? Its log says more"
        )
    return f"node {record.node!r} had no stream to a collector for {waited}: look whether its daemon runs"
