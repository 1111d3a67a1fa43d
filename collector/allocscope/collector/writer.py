"""The one thread that writes to the database: what waits is stored together, in one transaction, and then acknowledged."""

from __future__ import annotations

import asyncio
import random
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

import structlog

from allocscope.collector.decode import LONGEST_TEXT, Refusal, decode
from allocscope.collector.observation import Observation
from allocscope.collector.pieces import joined, pieces, size
from allocscope.proto.v1 import collector_service_pb2
from allocscope.storage.errors import StorageError, Unstorable
from allocscope.storage.records import NodeBatch, Stored

log = structlog.get_logger(__name__)

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 5.0
LATE_AT_ONCE_BYTES = 256 << 10
"""So much of what is late is stored along with what is new, which must not wait for it long."""
LATE_LOOKED_AT_S = 0.5
"""How soon it is seen that there is time again for what is late."""
DEFECTS_BORNE = 5
"""So often a batch that makes us fail in a way we do not know is tried, alone, before its pieces are."""


class Store(Protocol):
    """The part of a Repository that is used here."""

    def store(self, batches: Sequence[NodeBatch]) -> Stored:
        """All of these in one transaction."""
        ...


@dataclass(frozen=True, slots=True)
class Arrival:
    """A batch as it came, and whom to tell when it is stored."""

    claimed: collector_service_pb2.Batch
    node: str
    daemon_id: str
    received_us: int
    done: Callable[[int, Sequence[Refusal]], None]
    """Called on the event loop, with the batch's number and what was refused of it."""
    late: bool = False
    """Newer ones of its daemon have overtaken it; it has time."""

    @property
    def size_bytes(self) -> int:
        """On the wire."""
        return self.claimed.ByteSize()


class Budget:
    """So many bytes may wait; who brings more, waits. Used on the event loop only."""

    def __init__(self, total_bytes: int) -> None:
        self._free_bytes, self._total_bytes = total_bytes, total_bytes
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def take(self, size_bytes: int) -> int:
        """Returns what to give back: one thing larger than the whole budget passes alone."""
        size_bytes = min(size_bytes, self._total_bytes)
        if self._waiting or size_bytes > self._free_bytes:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append((size_bytes, turn))
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self.give_back(size_bytes)
                raise
        else:
            self._free_bytes -= size_bytes
        return size_bytes

    def give_back(self, size_bytes: int) -> None:
        """Those who wait go on, in their order."""
        self._free_bytes += size_bytes
        while self._waiting and (self._waiting[0][1].done() or self._waiting[0][0] <= self._free_bytes):
            size_bytes, turn = self._waiting.popleft()
            if not turn.done():
                self._free_bytes -= size_bytes
                turn.set_result(None)


@dataclass(slots=True)
class _Entry:
    arrival: Arrival
    taken_bytes: int
    batch: NodeBatch | None = None
    refused: tuple[Refusal, ...] = ()

    def read(self) -> None:
        """From the claim to what can be stored of it."""
        arrival = self.arrival
        try:
            self.batch, self.refused = decode(
                arrival.claimed,
                node=arrival.node,
                daemon_id=arrival.daemon_id,
                received_us=arrival.received_us,
                late=arrival.late,
            )
        except Exception as error:  # (a batch that cannot be read must not stop the others)
            log.error("a batch cannot be read", node=arrival.node, sequence=arrival.claimed.sequence, exc_info=error)
            self.refuse("unreadable", f"{type(error).__name__}: {error}", _claimed_size(arrival.claimed))

    def refuse(self, reason: str, text: str, count: int) -> None:
        """All of it."""
        self.batch = None
        self.refused = (*self.refused, Refusal(reason, text[:LONGEST_TEXT], count))


def _claimed_size(claimed: collector_service_pb2.Batch) -> int:
    """How many samples, maps and events."""
    samples = sum(len(chunk.sequence) for chunk in claimed.samples)
    return samples + len(claimed.block_maps) + len(claimed.events)


class _Ending(Exception):  # noqa: N818  (no failure)
    """The process ends before the database took it."""


@dataclass(slots=True)
class _Queue:
    """Entries between the loop and the thread."""

    entries: deque[_Entry] = field(default_factory=deque)
    late: deque[_Entry] = field(default_factory=deque)
    changed: threading.Condition = field(default_factory=threading.Condition)
    closed: bool = False


class Writer:
    """Stores arrivals in their order. What the database refuses for a while waits; nothing is acknowledged before it is stored."""

    def __init__(
        self,
        store: Store,
        observation: Observation,
        *,
        queue_bytes: int,
        commit_batches: int,
        stored: Callable[[Sequence[NodeBatch], Sequence[tuple[str, Refusal]]], None],
        may_take_late: Callable[[], bool] = lambda: True,
    ) -> None:
        """`stored` is called on the writer's thread with what was just committed and what was refused; it must not block.

        `may_take_late`: whether there is time for what is late.
        """
        self._store, self._observation, self._commit_batches, self._stored = store, observation, commit_batches, stored
        self._may_take_late = may_take_late
        self._budget, self._late_budget = Budget(queue_bytes), Budget(queue_bytes // 4)
        self._queue = _Queue()
        self._stop = threading.Event()
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="writer", daemon=True)
        self.failing: str | None = None
        """Why the database does not take anything now; None: it does."""

    def start(self) -> None:
        """From here on arrivals are stored."""
        self._thread.start()

    async def put(self, arrival: Arrival) -> None:
        """Returns once there is room."""
        taken_bytes = await self._budget_of(arrival).take(arrival.size_bytes)
        with self._queue.changed:
            queue = self._queue.late if arrival.late else self._queue.entries
            queue.append(_Entry(arrival, taken_bytes))
            self._queue.changed.notify()

    def _budget_of(self, arrival: Arrival) -> Budget:
        return self._late_budget if arrival.late else self._budget

    async def close(self, timeout_s: float) -> None:
        """What waits is still stored, unless the database does not take it within that time; daemons then send it again."""
        with self._queue.changed:
            self._queue.closed = True
            self._queue.changed.notify()
        if not self._thread.is_alive():
            return
        await asyncio.to_thread(self._thread.join, timeout_s)
        self._stop.set()
        await asyncio.to_thread(self._thread.join, timeout_s)

    def _run(self) -> None:
        while entries := self._next():
            for entry in entries:
                entry.read()
            if not self._keep(entries):
                return

    def _next(self) -> list[_Entry]:
        """What waits, up to one transaction's worth; nothing once the queue is closed and empty.

        What is late gets the room that the others leave, and goes before them: what is newest is written last.
        """
        queue = self._queue
        with queue.changed:
            while not (queue.entries or queue.closed or self._has_time_for_late()):
                queue.changed.wait(LATE_LOOKED_AT_S if queue.late else None)
            count = min(len(queue.entries), self._commit_batches)
            entries = [queue.entries.popleft() for _ in range(count)]
            room_bytes, late = LATE_AT_ONCE_BYTES, list[_Entry]()
            while room_bytes > 0 and len(late) + count < self._commit_batches and self._has_time_for_late():
                late.append(queue.late.popleft())
                room_bytes -= late[-1].taken_bytes
            return late + entries

    def _has_time_for_late(self) -> bool:
        return bool(self._queue.late) and self._may_take_late()

    def _keep(self, entries: list[_Entry]) -> bool:
        """Until all is stored, or refused; False: the process ends before."""
        try:
            self._keep_together(entries)
        except _Ending:
            return False
        return True

    def _keep_together(self, entries: list[_Entry]) -> None:
        batches = [entry.batch for entry in entries if entry.batch is not None]
        try:
            self._store_all(batches, defects_borne=DEFECTS_BORNE if len(entries) == 1 else 1)
        except _Ending:
            raise
        except Exception as error:  # noqa: BLE001  (a defect must end neither this thread nor everybody's storing)
            if len(entries) > 1:
                for entry in entries:
                    self._keep_together([entry])
                return
            self._keep_pieces(entries[0], batches[0], error)
        self._hand_on(entries)

    def _keep_pieces(self, entry: _Entry, batch: NodeBatch, error: Exception) -> None:
        """What cannot be kept costs itself only. The batch's own number comes last, with all that is kept."""
        log.error("a batch cannot be stored whole", node=batch.node, sequence=batch.sequence, error=repr(error))
        kept, refused = self._sift(pieces(batch))
        entry.batch, entry.refused = joined(batch, kept), (*entry.refused, *refused)
        try:
            self._store_all([entry.batch])
        except _Ending:
            raise
        except Exception as again:
            log.exception("a batch cannot be stored", node=batch.node, sequence=batch.sequence)
            entry.refuse("not_storable", str(again), size(kept))

    def _sift(self, parts: list[NodeBatch]) -> tuple[list[NodeBatch], list[Refusal]]:
        """Those that are kept, and why not the others: halved until what cannot be kept stands alone."""
        try:
            self._store_all(parts)
        except _Ending:
            raise
        except Exception as error:  # noqa: BLE001  (see _keep_together)
            if len(parts) == 1:
                return [], [Refusal("not_storable", str(error)[:LONGEST_TEXT], size(parts) or 1)]
            half = len(parts) // 2
            first, second = self._sift(parts[:half]), self._sift(parts[half:])
            return first[0] + second[0], first[1] + second[1]
        return parts, []

    def _store_all(self, batches: Sequence[NodeBatch], *, defects_borne: int = 1) -> None:
        """Returns once they are stored. What the database does not take for a while waits; what it never will is raised."""
        pause_s, defects = FIRST_PAUSE_S, 0
        while not self._stop.is_set():
            try:
                self._store_once(batches)
            except Unstorable:
                raise
            except StorageError as error:
                self._fails(error)
            except Exception as error:
                defects += 1
                if defects >= defects_borne:
                    raise
                self._fails(error)
            else:
                self._works()
                return
            self._stop.wait(pause_s * random.uniform(0.5, 1.5))
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        raise _Ending

    def _store_once(self, batches: Sequence[NodeBatch]) -> None:
        if batches:
            with self._observation.store.round():
                stored = self._store.store(batches)
            self._observation.samples.inc(stored.samples)

    def _hand_on(self, entries: list[_Entry]) -> None:
        batches = [entry.batch for entry in entries if entry.batch is not None]
        self._stored(batches, [(entry.arrival.node, refusal) for entry in entries for refusal in entry.refused])
        with suppress(RuntimeError):  # the loop is closed: the database answered after we gave it up
            self._loop.call_soon_threadsafe(self._finish, entries)

    def _finish(self, entries: list[_Entry]) -> None:
        for entry in entries:
            for refusal in entry.refused:
                self._observation.rejected.labels(refusal.reason).inc(refusal.count)
            entry.arrival.done(entry.arrival.claimed.sequence, entry.refused)
            self._budget_of(entry.arrival).give_back(entry.taken_bytes)

    def _fails(self, error: Exception) -> None:
        if self.failing is None:
            log.error("the database takes nothing; daemons keep what they have until it does", error=str(error))
        self.failing = str(error)

    def _works(self) -> None:
        if self.failing is not None:
            log.info("the database takes data again")
        self.failing = None
