"""From the folder where jobs leave captures into the batches and the spool, each once, whoever is killed at whatever moment.

A note's figures go into a batch, unless its process's stream brings them. Then the capture is kept in the spool: with its
snapshot, or, where none comes, without. Only then its files are removed; what is found again after a crash is known by its id.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import structlog

from allocscope.daemon.capture_folder import CaptureFolder, Left, Look
from allocscope.daemon.capture_orders import CaptureOrders
from allocscope.daemon.capture_spool import CaptureSpool
from allocscope.daemon.capture_thread import CaptureThread
from allocscope.daemon.keeper import Keeper
from allocscope.daemon.notes import Figures, OnDisk, ReadNote, read_note
from allocscope.daemon.observed import Observed
from allocscope.daemon.presence import Presence
from allocscope.model.figures import duration
from allocscope.model.identity import Process
from allocscope.model.wire import WireError, capture_to_wire
from allocscope.proto.v1.capture_service_pb2 import CaptureHello

log = structlog.get_logger()

FIGURES_WITHIN_S = 5.0
"""How long a note's figures are left to the stream, which brings them in order with what came before."""
SNAPSHOT_WITHIN_S = 60.0
"""After its note, or after it was last written to, a snapshot is waited for so long, while its process is there."""
LONGEST_SNAPSHOT_S = 600.0
"""The same, after the note, though it is written to."""
MOST_READ = 64
"""Notes in one round."""
RETRY_S = 5.0
"""After the disk did not take a capture."""


@dataclass(slots=True)
class _Noted:
    """A note that was read, whose capture is not in the spool yet."""

    process: Process
    uid: int
    last_sequence: int
    problem: str | None
    """Why no snapshot will come; None: one may."""
    version: tuple[int, int]
    """Of its file."""
    since_s: float
    """When it was left, monotonic."""
    figures: OnDisk | None = None
    """None: they are not brought yet."""


class Captures:
    """Takes what jobs leave, for as long as it runs."""

    def __init__(
        self,
        folder: CaptureFolder,
        spool: CaptureSpool,
        thread: CaptureThread,
        orders: CaptureOrders,
        figures: Figures,
        presence: Presence,
        keeper: Keeper,
        observed: Observed,
        *,
        interval_s: float,
        on_kept: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`on_kept` is called when there is a capture for the collector; `clock` in seconds, monotonic."""
        self._folder, self._spool, self._thread, self._orders = folder, spool, thread, orders
        self._figures, self._presence, self._keeper, self._observed = figures, presence, keeper, observed
        self._interval_s = interval_s
        self._on_kept, self._clock = on_kept, clock
        self._noted: dict[str, _Noted] = {}
        self._unremoved: set[str] = set()
        """Kept, but for their files, which could not be removed."""
        self._packing: asyncio.Task[None] | None = None
        self._pack_not_before_s = 0.0
        self._hasten = asyncio.Event()
        self._told: dict[str, str] = {}

    async def run(self) -> None:
        """Look, take, and again, for ever."""
        try:
            while True:
                await self._try_round()
                with suppress(TimeoutError):
                    async with asyncio.timeout(
                        self._interval_s
                    ):  # wait_for may lose a cancellation (Python before 3.12)
                        await self._hasten.wait()
                self._hasten.clear()
        finally:
            if self._packing:
                self._packing.cancel()
                await asyncio.wait([self._packing])

    async def _try_round(self) -> None:
        try:
            with self._observed.capture_intake.round():
                await self._round()
            self._told.pop("round", None)
        except OSError as error:
            why = f"{error.strerror or error} ({error.filename or self._folder.path})"
            self._tell("round", f"captures that jobs leave cannot be taken: {why}")
        except Exception as error:  # one round's trouble must not end the rounds
            if self._told.get("round") != repr(error):
                log.exception("no captures are taken this time")
            self._told["round"] = repr(error)

    async def _round(self) -> None:
        gone = self._gone()  # before the look: what a process left as its last is then there to be seen
        look = await self._thread.do(self._folder.look)
        await self._read_new(look)
        for capture_id in self._noted.keys() - look.notes.keys():
            del self._noted[capture_id]
        for capture_id, noted in list(self._noted.items()):
            await self._bring(capture_id, noted, gone)
        self._pack_next(look, gone)
        await self._answer_orders(gone)
        await self._thread.do(self._spool.drop_old)

    def _gone(self) -> set[str]:
        """Processes from which nothing more will come."""
        is_gone = self._presence.is_gone
        gone = {id_ for ordered in self._orders if is_gone(id_ := ordered.process_id, ordered.at_s)}
        for noted in self._noted.values():
            if is_gone(id_ := noted.process.process_id, noted.since_s, noted.process):
                gone.add(id_)
        return gone

    # notes

    async def _read_new(self, look: Look) -> None:
        new = [
            left
            for id_, left in look.notes.items()
            if id_ not in self._noted or self._noted[id_].version != left.version
        ]
        for left in new[:MOST_READ]:
            if self._is_kept(left.capture_id, look):
                await self._remove(left.capture_id)
                continue
            with suppress(FileNotFoundError):
                await self._read(left)

    def _is_kept(self, capture_id: str, look: Look) -> bool:
        """Whether only its files are left to be removed. One that was kept without a snapshot may get one yet."""
        kept = self._spool.get(capture_id)
        return capture_id in self._unremoved or (
            kept is not None and (kept.has_snapshot or capture_id not in look.snapshots)
        )

    async def _read(self, left: Left) -> None:
        try:
            read = await self._thread.do(read_note, self._folder, left.capture_id)
            self._presence.check(read)
        except ValueError as error:
            reason = error.reason if isinstance(error, WireError) else "unreadable"
            await self._thread.do(self._folder.drop, left.capture_id, reason, str(error))
            return
        self._orders.noted(read.note)
        known = self._noted.get(left.capture_id)
        if known is None:
            _log(read)
        self._noted[left.capture_id] = _Noted(
            process=read.note.process,
            uid=read.uid,
            last_sequence=read.last_sequence,
            problem=read.note.capture.problem if read.note.capture.snapshot_bytes is None else None,
            version=left.version,
            since_s=self._clock() - left.age_s,
            figures=known.figures if known else None,
        )

    async def _bring(self, capture_id: str, noted: _Noted, gone: set[str]) -> None:
        process_id = noted.process.process_id
        is_early = process_id not in gone and self._clock() - noted.since_s < FIGURES_WITHIN_S
        is_left_to_stream = is_early and self._presence.may_bring(process_id, noted.last_sequence)
        if noted.figures or (noted.last_sequence and is_left_to_stream):
            return
        read = await self._read_again(capture_id, noted)
        if read:
            noted.figures = await self._figures.bring(read)

    async def _read_again(self, capture_id: str, noted: _Noted) -> ReadNote | None:
        """None: somebody took it away, or wrote another, which the next round reads as a new one."""
        with suppress(FileNotFoundError, ValueError):
            read = await self._thread.do(read_note, self._folder, capture_id)
            if (read.uid, read.note.process.process_id) == (noted.uid, noted.process.process_id):
                return read
        self._noted.pop(capture_id, None)
        return None

    # into the spool

    def _pack_next(self, look: Look, gone: set[str]) -> None:
        """One at a time, in the order in which they came."""
        if self._packing or self._clock() < self._pack_not_before_s:
            return
        for capture_id, noted in self._noted.items():
            problem = None if capture_id in look.snapshots else self._no_snapshot(capture_id, noted, look, gone)
            is_ready = capture_id in look.snapshots or problem is not None
            if is_ready and noted.figures and noted.figures.is_set():
                self._packing = asyncio.create_task(self._pack(capture_id, noted, problem))
                self._packing.add_done_callback(self._packed)
                return

    def _no_snapshot(self, capture_id: str, noted: _Noted, look: Look, gone: set[str]) -> str | None:
        """Why none is waited for; None: it is."""
        waited_s = self._clock() - noted.since_s
        unfinished = look.unfinished.get(capture_id)
        if noted.problem is not None:
            return noted.problem
        if noted.process.process_id in gone:
            return "its process ended before the snapshot was written"
        if unfinished and unfinished.age_s < SNAPSHOT_WITHIN_S and waited_s < LONGEST_SNAPSHOT_S:
            return None
        if waited_s < SNAPSHOT_WITHIN_S:
            return None
        return f"its process did not write the snapshot within {duration(waited_s)}"

    def _packed(self, task: asyncio.Task[None]) -> None:
        self._packing = None
        self._hasten.set()
        if not task.cancelled() and (error := task.exception()):
            self._pack_not_before_s = self._clock() + RETRY_S
            why = (isinstance(error, OSError) and error.strerror) or repr(error)
            self._tell("pack", f"a capture cannot be kept, is left where it is, and tried again: {why}")
        elif not task.cancelled() and self._told.pop("pack", ""):
            log.info("captures can be kept again")

    async def _pack(self, capture_id: str, noted: _Noted, problem: str | None) -> None:
        """`problem` says why there is no snapshot; None: there is one. OSError: no disk has room."""
        self._noted[capture_id] = self._noted.pop(capture_id)  # the next one's turn, should this one not be kept
        read = await self._read_again(capture_id, noted)  # it may be a later one than was read first
        if read is None:
            return
        hello = CaptureHello(capture=read.message.capture, process=read.message.process)
        with self._observed.capture_pack.round():
            if problem is None:
                await self._keeper.keep_with_snapshot(hello, noted.uid)
            else:
                await self._keeper.keep_without_snapshot(hello, problem)
        self._noted.pop(capture_id, None)
        await self._remove(capture_id)
        self._on_kept()

    async def _remove(self, capture_id: str) -> None:
        """Kept it is already: if its files stay, they are not taken again."""
        try:
            await self._thread.do(self._folder.remove, capture_id)
            self._unremoved.discard(capture_id)
        except OSError:
            self._unremoved.add(capture_id)
            raise

    # orders

    async def _answer_orders(self, gone: set[str]) -> None:
        """Who waits for a capture that will not come is told why."""
        for ordered in self._orders:
            problem = self._orders.problem(ordered, is_gone=ordered.process_id in gone)
            if problem is None:
                continue
            if self._spool.get(ordered.order.capture_id) is None:
                answer = capture_to_wire(ordered.answer(problem, time.time_ns() // 1000))
                process = self._presence.introduction(ordered.process_id)
                await self._keeper.keep_without_snapshot(CaptureHello(capture=answer, process=process), problem)
                self._on_kept()
            self._orders.settle(ordered)

    def _tell(self, what: str, problem: str) -> None:
        """Log what is wrong when it begins, or changes."""
        if self._told.get(what) != problem:
            self._told[what] = problem
            log.error(problem)


def _log(read: ReadNote) -> None:
    capture, process = read.note.capture, read.note.process
    log.info(
        "capture noted", capture=capture.capture_id, reason=capture.reason.value, job=process.job, rank=process.rank
    )
