"""What was judged before this process, gone through once more, so that all of it is known again. Nobody is told, and nothing is kept.

It comes to the same as `Fleet.tell`, but for a fraction of the time: samples stay in columns, and words are made only of what stands in
the end. A round takes a sample of each allocator, since it costs about as much to foresee from one as from many.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from allocscope.alerts.forecast import Figures, joined
from allocscope.alerts.watch import JUDGE_EVERY_US
from allocscope.collector.fleet import Fleet, Watched, largest_free_block
from allocscope.model import BlockMap, Event, Sample

NOT_JUDGED = -1


@dataclass(frozen=True, slots=True)
class Past:
    """What an allocator sent and was judged by, in the order of its numbers, none of them twice."""

    watched: Watched
    figures: Figures
    """Of its samples."""
    latest: Sample | None
    """The last of them."""
    others: Sequence[BlockMap | Event]

    def __len__(self) -> int:
        return len(self.figures.sequence) + len(self.others)


def retrace(fleet: Fleet, pasts: Sequence[Past]) -> None:
    """Allocators that were told nothing yet are as they were."""
    pasts = [past for past in pasts if len(past)]
    if pasts:
        _Retracing(fleet, pasts).run()


class _Retracing:
    """Columns have a row for each sample, one allocator's behind the other's, or a row for each allocator."""

    def __init__(self, fleet: Fleet, pasts: Sequence[Past]) -> None:
        self._fleet, self._pasts = fleet, pasts
        self._watches = [past.watched.watch for past in pasts]
        self._rows = np.array([watch.outlook.row for watch in self._watches])
        self._count = np.array([len(past.figures.sequence) for past in pasts])
        self._first = np.cumsum(self._count) - self._count
        self._figures = joined(past.figures for past in pasts)
        self._due, self._last_due = self._find_due()
        self._retries = self._find_retries()
        self._level = np.full(len(pasts), NOT_JUDGED)
        self._cause = np.full(len(pasts), NOT_JUDGED)
        self._steady = np.zeros(len(pasts), np.bool_)
        """Whose latest judgement, made once more, would change nothing."""

    def run(self) -> None:
        """Round by round."""
        others = self._others_by_round()
        for number in range(int(self._count.max(initial=0)) + 1):
            self._tell_others(others.get(number, ()))
            among = np.flatnonzero(self._count > number)
            if among.size:
                self._tell_samples(among, self._first[among] + number)
        for past, watch in zip(self._pasts, self._watches, strict=True):
            watch.settle()
            _leave(past)

    def _find_due(self) -> tuple[np.ndarray, np.ndarray]:
        """Samples that are the first of their second, and the last such one of each allocator."""
        second = self._figures.time_us // JUDGE_EVERY_US
        due = self._begins()
        due[1:] |= second[1:] != second[:-1]
        last = np.zeros_like(due)
        at = np.flatnonzero(due)
        of = np.searchsorted(self._first[self._count > 0], at, side="right")
        last[at[np.append(of[1:] != of[:-1], True)]] = True
        return due, last

    def _find_retries(self) -> np.ndarray:
        """Samples that may tell of flush-and-retry rounds."""
        retries = self._figures.num_alloc_retries
        changed = self._begins()
        changed[1:] |= retries[1:] != retries[:-1]
        found: np.ndarray = changed & (retries >= 0)
        return found

    def _begins(self) -> np.ndarray:
        """The first sample of each allocator."""
        begins = np.zeros(len(self._figures.sequence), np.bool_)
        begins[self._first[self._count > 0]] = True
        return begins

    def _others_by_round(self) -> dict[int, list[tuple[int, BlockMap | Event]]]:
        """Maps and events before the sample of each round, or behind the last: which allocator's, and what."""
        found: dict[int, list[tuple[int, BlockMap | Event]]] = {}
        for i, past in enumerate(self._pasts):
            numbers = [item.sequence for item in past.others]
            for number, item in zip(np.searchsorted(past.figures.sequence, numbers).tolist(), past.others, strict=True):
                found.setdefault(number, []).append((i, item))
        return found

    def _tell_others(self, told: Sequence[tuple[int, BlockMap | Event]]) -> None:
        maps: dict[int, BlockMap] = {}
        for i, item in told:
            if maps and (i in maps or not isinstance(item, BlockMap)):
                self._tell_maps(maps)
                maps = {}
            if isinstance(item, BlockMap):
                maps[i] = item
            else:
                self._tell_event(i, item)
        if maps:
            self._tell_maps(maps)

    def _tell_maps(self, maps: dict[int, BlockMap]) -> None:
        self._fleet.outlooks.observe_maps(self._rows[list(maps)], list(maps.values()))

    def _tell_event(self, i: int, event: Event) -> None:
        watched = self._pasts[i].watched
        watched.watch.settle()
        self._fleet.gather(self._fleet.tell_one(watched, event), watched.heard_us)
        self._steady[i] = False

    def _tell_samples(self, among: np.ndarray, at: np.ndarray) -> None:
        """The samples `at` of these allocators."""
        self._fleet.outlooks.observe(self._rows[among], self._figures.among(at))
        retries = self._retries[at]
        if retries.any():
            for i, one in zip(among[retries].tolist(), at[retries].tolist(), strict=True):
                self._watches[i].observed(self._retried(one))
                self._steady[i] = False
        due = self._due[at]
        if due.any():
            self._judge(among[due], at[due])

    def _retried(self, at: int) -> Sample:
        figures = self._figures
        retries = int(figures.num_alloc_retries[at])
        return Sample(int(figures.sequence[at]), int(figures.time_us[at]), num_alloc_retries=retries)

    def _judge(self, among: np.ndarray, at: np.ndarray) -> None:
        last = self._last_due[at]
        foreseen = self._fleet.outlooks.forecast(self._rows[among], self._figures.time_us[at], in_full=last)
        alike = (foreseen.level == self._level[among]) & (foreseen.cause == self._cause[among]) & self._steady[among]
        self._level[among], self._cause[among] = foreseen.level, foreseen.cause
        for row in np.flatnonzero(~alike | last | (foreseen.level > 0)).tolist():
            i = int(among[row])
            watched, watch = self._pasts[i].watched, self._watches[i]
            self._fleet.gather(watch.judge_in_silence(foreseen, row), watched.heard_us)
            if last[row]:
                watch.settle()
            self._steady[i] = watch.is_steady


def _leave(past: Past) -> None:
    """With the latest of everything."""
    watched, others = past.watched, past.others
    maps = [item for item in others if isinstance(item, BlockMap)]
    if maps:
        watched.largest_free_block_bytes = largest_free_block(maps[-1])
    if past.latest is not None:
        watched.sample = past.latest
    if past.latest and past.latest.sequence > max(
        (item.sequence for item in others if isinstance(item, Event)), default=0
    ):
        watched.died = None
    watched.sequence = max((item.sequence for item in (past.latest, *others[-1:]) if item), default=0)
    if watched.watch.forecast is not None:
        watched.judged_us = watched.watch.forecast.time_us
