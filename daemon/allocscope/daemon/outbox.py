"""From a closed batch to the spool's disk: then its jobs are told that they need keep nothing of it.

While the disk takes nothing batches are kept in memory, the oldest given up where they are too many, their block maps before
the rest; and the collector gets them from there: what it has, its jobs are told of too.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

import structlog

from allocscope.daemon.intake import ClosedBatch, Intake, Owed
from allocscope.daemon.losses import Losses
from allocscope.daemon.observed import Observed
from allocscope.daemon.spool import Spool
from allocscope.daemon.spool_frames import Counts
from allocscope.daemon.spool_segment import SpooledBatch
from allocscope.daemon.spool_thread import SpoolThread
from allocscope.proto.v1.collector_service_pb2 import Batch

log = structlog.get_logger()

HEARTBEAT_S = 10.0
"""A node without devices and jobs says at least so often that it is there."""
TOLD_EVERY_ROUNDS = 2
"""Jobs that wait for nothing are told so seldom what is on disk: to tell sixteen of them each second costs a quarter of all."""
UNWRITTEN_BYTES = 16 << 20
"""What is kept in memory while the spool cannot be written."""


@dataclass(slots=True)
class _Unwritten:
    """A batch that is not on disk yet."""

    batch: SpooledBatch
    closed: ClosedBatch


class Outbox:
    """Numbers batches, writes them, and has them ready for the collector. Used on the event loop."""

    def __init__(self, spool: Spool, intake: Intake, losses: Losses, observed: Observed) -> None:
        """Takes the spool over, and closes it."""
        self._spool, self._intake, self._losses, self._observed = spool, intake, losses, observed
        self._disk = SpoolThread(spool)
        self._next_sequence, self._unused_before = spool.next_sequence, spool.unused_at_start
        self._unwritten: deque[_Unwritten] = deque()
        self._untold: dict[Owed, int] = {}
        """Up to which number each has everything on disk, and does not know it yet."""
        self._rounds_untold = 0
        self._last_closed_s = 0.0
        self._is_failing = False

    @property
    def last_sequence(self) -> int:
        """The newest batch's number."""
        return self._next_sequence - 1

    @property
    def waiting_in_order(self) -> int:
        """Batches on disk that are not acknowledged, but for those that come late, count."""
        return self._spool.in_order

    @property
    def waiting_late(self) -> int:
        """Batches that come late and are not acknowledged, count."""
        return self._spool.late

    def close_batch(self, closed_us: int) -> None:
        """Everything that came so far becomes a batch, or some, unless there is nothing to tell."""
        now_s = time.monotonic()
        if self._intake.is_empty and now_s - self._last_closed_s < HEARTBEAT_S:
            return
        self._last_closed_s = now_s
        first = max(self._next_sequence, self._spool.next_sequence)  # a collector may know of more than the spool does
        for closed in self._intake.close(first, closed_us):
            self._next_sequence = closed.batch.sequence + 1
            closed.batch.unused_before, self._unused_before = self._unused_before, 0
            self._unwritten.append(_Unwritten(_spooled(closed), closed))
        for what, count in self._intake.take_too_large().items():
            log.warning("too large for a batch", what=what, count=count)
            self._losses.count("too_large", what, count)

    async def write(self) -> None:
        """Have on disk what was closed; what cannot be now is tried again with the next."""
        batches = [one.batch for one in self._unwritten]
        if not batches:
            return
        try:
            with self._observed.spool_write.round():
                await self._disk.do(lambda: self._spool.write(batches))
        except OSError as error:
            if not self._is_failing:
                log.error(
                    "the spool cannot be written; kept in memory, tried again", why=error.strerror, batches=len(batches)
                )
            self._is_failing = True
            self._give_up_the_oldest()
            return
        if self._is_failing:
            log.info("the spool can be written again")
            self._is_failing = False
        self._settle(batches[-1].sequence)
        self._count_losses()

    def tell(self, *, at_once: bool) -> None:
        """Tell jobs what they need not keep: at once where somebody waits for it, else every few rounds."""
        self._rounds_untold += 1
        if not at_once and self._rounds_untold < TOLD_EVERY_ROUNDS:
            return
        self._rounds_untold, untold, self._untold = 0, self._untold, {}
        for owed, sequence in untold.items():
            owed.acknowledge(sequence)

    async def close(self) -> None:
        """Let go of the spool."""
        await self._disk.close()

    # for the uplink

    async def after(self, sequence: int) -> SpooledBatch | None:
        """The first batch with a higher number, but for those that come late."""
        batch = await self._disk.do(lambda: self._spool.after(sequence))
        if batch is None and self._is_failing:
            return next((one.batch for one in self._unwritten if one.batch.sequence > sequence), None)
        return batch

    async def late_after(self, sequence: int) -> SpooledBatch | None:
        """The first batch with a higher number, of those that come late."""
        return await self._disk.do(lambda: self._spool.late_after(sequence))

    async def acknowledge(self, through: int) -> None:
        """The collector has everything up to this number, but for what comes late."""
        if self._is_failing:
            self._settle(through)
        await self._disk.do(lambda: self._spool.acknowledge(through))

    async def acknowledge_late(self, through: int) -> None:
        """The collector has everything up to this number that comes late."""
        await self._disk.do(lambda: self._spool.acknowledge_late(through))

    async def postpone(self) -> None:
        """What waits comes late from now on. OSError: it does not."""
        await self._disk.do(self._spool.postpone)

    def late_before(self, sequence: int) -> int:
        """How many numbers directly before this one come late."""
        return self._spool.late_before(sequence)

    # what becomes of batches

    def _settle(self, through: int) -> None:
        while self._unwritten and self._unwritten[0].batch.sequence <= through:
            self._untold.update(self._unwritten.popleft().closed.owed)

    def _give_up_the_oldest(self) -> None:
        """Of what could not be written, while there is too much."""
        too_much = sum(len(one.batch.whole) for one in self._unwritten) - UNWRITTEN_BYTES
        for one in list(self._unwritten)[:-1]:
            if too_much > 0 and one.batch.block_maps:
                too_much -= len(one.batch.block_maps)
                self._losses.add("spool_write_failed", Counts(block_maps=one.batch.counts.block_maps))
                one.batch = one.batch.without_maps()
        while too_much > 0 and len(self._unwritten) > 1:
            lost = self._unwritten.popleft()
            too_much -= len(lost.batch.payload)
            self._intake.inherit(lost.closed)
            self._losses.add("spool_write_failed", lost.batch.counts, batches=1)

    def _count_losses(self) -> None:
        while self._spool.lost:
            loss = self._spool.lost.pop()
            if loss.reason == "torn" and not loss.batches:
                log.info("cut off what a crash left unfinished; whoever sent it sends it again", bytes=loss.bytes)
            else:
                self._losses.add(loss.reason, loss.counts, batches=loss.batches)


def _spooled(closed: ClosedBatch) -> SpooledBatch:
    """With the block maps apart, which may be given up before the rest."""
    maps = Batch(block_maps=closed.batch.block_maps).SerializeToString()
    closed.batch.ClearField("block_maps")
    return SpooledBatch(closed.batch.sequence, closed.batch.SerializeToString(), closed.counts, maps)
