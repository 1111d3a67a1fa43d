"""From the folder to the collector with a crash before each single thing that is done to the disk: nothing is lost, nothing kept twice."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from io import BufferedIOBase
from pathlib import Path
from typing import Any

import pytest

from allocscope.daemon import capture_uplink as capture_uplink_module
from allocscope.daemon.capture_folder import CaptureFolder
from allocscope.daemon.capture_losses import CaptureLosses
from allocscope.daemon.capture_orders import CaptureOrders
from allocscope.daemon.capture_place import CapturePlace
from allocscope.daemon.capture_spool import CaptureSpool
from allocscope.daemon.capture_thread import CaptureThread
from allocscope.daemon.capture_uplink import CaptureUplink
from allocscope.daemon.captures import Captures
from allocscope.daemon.collector_way import CollectorWay
from allocscope.daemon.intake import Intake
from allocscope.daemon.keeper import Keeper
from allocscope.daemon.node import Node
from allocscope.daemon.notes import Figures
from allocscope.daemon.observed import Observed
from allocscope.daemon.presence import RETURNS_WITHIN_S, Presence
from allocscope.model import CaptureOrder
from allocscope.model.captures import FOLDER
from tests.daemon.capture_fakes import ID, FakeCaptures, dead_process, dropped, leave_note, leave_whole, note
from tests.daemon.fakes import WAIT_S, FakeCollector, acknowledge

RANDOM = os.urandom(1_100_000)
"""Does not shrink: two pieces."""
WITHOUT = "d" * 32


class Crash(BaseException):
    """Nothing runs any more."""


class CrashingThread(CaptureThread):
    """Does so many things, and then nothing more."""

    def __init__(self, left: int) -> None:
        super().__init__()
        self._left = left
        self.crashed = asyncio.Event()
        self.is_over = False
        """Whatever still wants to tidy up may not."""
        self.done: Counter[str] = Counter()
        self._results: list[object] = []

    async def do(self, work: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._left <= 0 and not _only_looks(work):
            self.crashed.set()
            if self.is_over:
                raise asyncio.CancelledError
            await asyncio.Event().wait()  # whoever asked waits until its task is cancelled, and does nothing further
        if not _only_looks(work):
            self._left -= 1
            self.done[work.__name__] += 1
        result = await super().do(work, *args, **kwargs)
        self._results.append(result)
        return result

    def close(self) -> None:
        """As a killed process leaves its files: closed, and not tidied up."""
        super().close()
        for result in self._results:
            for file in (result, *(getattr(result, name, None) for name in ("_file", "_snapshot"))):
                if isinstance(file, BufferedIOBase):
                    file.close()


def _only_looks(work: Callable[..., Any]) -> bool:
    return work.__name__ in ("look", "drop_old", "read_note")


class Life:
    """One life of a daemon's captures."""

    def __init__(self, tmp_path: Path, address: str, *, crash_after: int = 1 << 30, now_s: float = 0.0) -> None:
        self.now_s = now_s
        self.thread, observed, node = CrashingThread(crash_after), Observed(), Node()
        self.observed = observed
        losses = CaptureLosses(observed)
        self.place = CapturePlace(tmp_path / FOLDER, group_id=None, socket_mode=0o660)
        folder = CaptureFolder(self.place, losses, limit_bytes=1 << 30)
        self.spool = CaptureSpool(tmp_path / "spool", 1 << 30, losses)
        self.orders = CaptureOrders(self._clock)
        self.intake = Intake(lambda: None)
        self.uplink = CaptureUplink(
            CollectorWay(address), "node-1", self.spool, self.thread, observed, losses, bytes_per_s=1 << 40
        )
        self.alive = {dead_process().process_id: False}
        self.captures = Captures(
            folder,
            self.spool,
            self.thread,
            self.orders,
            Figures(node, self.intake, observed, lambda _: None),
            Presence(
                node,
                is_alive=lambda process: self.alive.get(process.process_id),
                owners=lambda _: frozenset(),
                clock=self._clock,
            ),
            Keeper(folder, self.spool, self.thread, losses, 1 << 30),
            observed,
            interval_s=0.001,
            on_kept=self.uplink.wake,
            clock=self._clock,
        )
        self.batches: list[Any] = []

    def _clock(self) -> float:
        return self.now_s

    def rounds(self) -> float:
        """Looks at the folder that were done."""
        return self.observed.registry.get_sample_value("allocscope_capture_intake_seconds_count") or 0

    async def some_rounds(self) -> None:
        begun_with = self.rounds()
        await until(lambda: self.rounds() > begun_with + 3)

    def has_noted(self, capture_id: str) -> bool:
        return capture_id in self.captures._noted

    @asynccontextmanager
    async def lived(self) -> AsyncIterator[None]:
        work = (self.captures.run(), self.uplink.run(), self._write_batches())
        tasks = [asyncio.create_task(each) for each in work]
        try:
            yield
        finally:
            self.thread._left, self.thread.is_over = 0, True
            for task in tasks:
                task.cancel()
            for task in tasks:
                with suppress(asyncio.CancelledError):
                    await asyncio.wait_for(task, WAIT_S)
            self.thread.close()
            self.place.close()

    async def _write_batches(self) -> None:
        while True:
            for closed in self.intake.close(1, 1):
                self.batches.append(closed.batch)
                acknowledge(closed)
            await asyncio.sleep(0)


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not holds():  # noqa: ASYNC110 (what threads do)
            await asyncio.sleep(0.002)


@pytest.fixture
def captures():
    return FakeCaptures()


@pytest.fixture
def collector(captures, monkeypatch):
    monkeypatch.setattr(capture_uplink_module, "FIRST_BACKOFF_S", 0.01)
    fake = FakeCollector(also=[captures.add_to])
    yield fake
    fake.stop()


def leave_two(folder: Path) -> None:
    """One with a snapshot, one without."""
    leave_whole(folder, note(dead_process()), RANDOM)
    leave_note(folder, note(dead_process(), WITHOUT, first=9))


def is_empty(tmp_path: Path) -> bool:
    return not any((tmp_path / FOLDER).iterdir()) and not any((tmp_path / "spool").iterdir())


def has_crashed_or_done_all(life: Life, tmp_path: Path) -> bool:
    return life.thread.crashed.is_set() or is_empty(tmp_path)


def figures(batches: list[Any]) -> tuple[set[int], set[int]]:
    """The numbers of samples and of events."""
    samples = {number for batch in batches for chunk in batch.samples for number in chunk.sequence}
    return samples, {event.sequence for batch in batches for event in batch.events}


async def test_a_crash_before_each_step_loses_nothing_and_keeps_nothing_twice(tmp_path, collector, captures):
    folder = tmp_path / FOLDER
    folder.mkdir()
    leave_two(folder)
    whole = Life(tmp_path, collector.address)
    async with whole.lived():
        await until(lambda: is_empty(tmp_path))
    steps = sum(whole.thread.done.values())
    assert steps >= 10  # else it is not these that the crashes come before
    for crash_after in range(steps):
        captures.kept.clear()
        leave_two(folder)
        crashing = Life(tmp_path, collector.address, crash_after=crash_after)
        async with crashing.lived():
            await until(partial(has_crashed_or_done_all, crashing, tmp_path))
        after = Life(tmp_path, collector.address)
        async with after.lived():
            await until(lambda: is_empty(tmp_path))
        assert {id_: kept.snapshot if kept.packed else None for id_, kept in captures.kept.items()} == {
            ID: RANDOM,
            WITHOUT: None,
        }, crash_after
        assert figures(crashing.batches + after.batches) == ({7, 9}, {8, 10}), crash_after
        assert dropped(crashing.observed) == dropped(after.observed) == {}


async def test_who_waits_for_a_capture_of_a_process_that_nobody_knows_is_told(tmp_path, collector, captures):
    life = Life(tmp_path, collector.address)
    async with life.lived():
        life.orders.add("e" * 32, CaptureOrder(ID))
        life.now_s = RETURNS_WITHIN_S - 1
        await life.some_rounds()
        assert captures.kept == {}
        life.now_s = RETURNS_WITHIN_S + 1
        await until(lambda: ID in captures.kept)
        hello = captures.kept[ID].hello
        assert hello.capture.process_id == "e" * 32
        assert hello.capture.problem == "the process is not on its node any more, or has no probe that takes orders"
        assert not hello.HasField("process")
        await until(lambda: not list(life.orders))


async def test_a_snapshot_is_waited_for_a_minute_and_longer_while_it_is_written(tmp_path, collector, captures):
    life = Life(tmp_path, collector.address)
    async with life.lived():
        await until((tmp_path / FOLDER).is_dir)
        life.alive["a" * 32] = True
        leave_note(tmp_path / FOLDER, note(dead_process(), figures=False))
        await until(lambda: life.has_noted(ID))
        part = tmp_path / FOLDER / f".{ID}.snapshot.part"
        part.touch()
        for life.now_s in (59, 61, 599):
            await life.some_rounds()
            assert captures.kept == {}
        life.now_s = 601
        await until(lambda: ID in captures.kept)
        assert captures.kept[ID].hello.capture.problem == "its process did not write the snapshot within 10 min"
