"""Captures as people ask for them: which there are, what one holds, and a new one, of whom. Nothing here knows HTTP."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from allocscope.collector import capture_views
from allocscope.collector.capture_refusals import JobEnded, UnknownCapture, UnknownDevice, UnknownRank, why_not
from allocscope.collector.observation import Observation
from allocscope.collector.questions import MOST_RANKS, Questions
from allocscope.collector.snapshots import Snapshot
from allocscope.collector.views import Json
from allocscope.model import CaptureReason, Forecast
from allocscope.storage.captures import CaptureRecord, CaptureState, OrderLimits
from allocscope.storage.errors import TooManyOrders
from allocscope.storage.records import ProcessRecord
from allocscope.storage.repository import Repository

ASKED_LIMITS = OrderLimits(of_process=4, of_job=1024, of_fleet=1024)


@dataclass(frozen=True, slots=True)
class Wish:
    """A capture that somebody asks for; which processes, by default the one that is nearest to running out."""

    rank: int | None = None
    all_ranks: bool = False
    process_id: str | None = None
    device: str | None = None
    """A UUID, or a GPU's index on its node; None: all that the process uses."""
    history_us: int | None = None
    most_history_entries: int | None = None
    tensors: bool = False


class CaptureQuestions:
    """What people ask of captures."""

    def __init__(
        self,
        repository: Repository,
        questions: Questions,
        observation: Observation,
        *,
        now_us: Callable[[], int],
        wake: Callable[[], None],
    ) -> None:
        """`wake` is called when something was ordered; it must not block."""
        self._repository, self._captures, self._questions = repository, repository.captures, questions
        self._observation, self._now_us, self._wake = observation, now_us, wake

    # which there are

    def page(self, job: str | None, state: CaptureState | None, cursor: str | None, limit: int) -> Json:
        """The one that came last first."""
        page = self._captures.page(job=job, state=state, cursor=cursor, limit=limit)
        return {"items": self._views(page.items), "next_cursor": page.next_cursor}

    def about(self, capture_id: str) -> Json:
        """One of them."""
        return self._views([self._record(capture_id)])[0]

    def _views(self, records: Sequence[CaptureRecord]) -> list[Json]:
        gpus = {uuid: self._gpu(uuid) for uuid in {record.device_uuid for record in records}}
        return [capture_views.capture(record, gpus[record.device_uuid]) for record in records]

    def _gpu(self, uuid: str | None) -> int | None:
        known = self._repository.device(uuid) if uuid else None
        return known.device.index if known else None

    def _record(self, capture_id: str) -> CaptureRecord:
        record = self._captures.find(capture_id)
        if record is None:
            text = f"there is no capture {capture_id[:64]!r} (allocscope capture --list, or /api/v1/captures, lists those that there are)"
            raise UnknownCapture(text, capture_id=capture_id[:64])
        return record

    # what one holds

    def snapshot(self, capture_id: str) -> Snapshot:
        """To be read."""
        record = self._record(capture_id)
        first = self._captures.piece(capture_id, 0) if record.state is CaptureState.KEPT else None
        if first is None:
            raise why_not(self._record(capture_id))
        return Snapshot(record, first, lambda number: self._captures.piece(capture_id, number))

    # a new one

    def order(self, job_id: str, wish: Wish) -> Json:
        """One capture a chosen process, from now on on order."""
        self._questions.known_job(job_id)
        live = self._questions.live_processes(job_id)
        if not live:
            text = f"job {job_id[:100]!r} has ended, or is silent: only what runs can be captured"
            raise JobEnded(
                f"{text} (captures of before: allocscope capture --list, or /api/v1/captures?job=…)", job_id=job_id
            )
        now_us = self._now_us()
        records = [self._ordered(process, wish, now_us) for process in self._chosen(job_id, live, wish)]
        try:
            self._captures.order(records, ASKED_LIMITS)
        except TooManyOrders:
            self._observation.captures_ordered.labels(CaptureReason.ASKED.value, "refused").inc(len(records))
            raise
        self._observation.captures_ordered.labels(CaptureReason.ASKED.value, "ordered").inc(len(records))
        self._wake()
        return {"items": self._views(records)}

    def _chosen(self, job_id: str, live: Sequence[ProcessRecord], wish: Wish) -> Sequence[ProcessRecord]:
        of_id = [one for one in live if wish.process_id in (None, one.process.process_id)]
        if wish.rank is not None:
            of_id = [one for one in of_id if one.process.rank == wish.rank]
        if not of_id:
            raise _unknown_rank(job_id, live, wish)
        newest = _newest_by_rank(of_id)
        if wish.all_ranks:
            return newest
        return [min(newest, key=self._gravity(job_id))]

    def _gravity(self, job_id: str) -> Callable[[ProcessRecord], tuple[int, float, int]]:
        """The process whose margin is lowest first, then those of which nothing is foreseen, by rank."""
        worst: dict[str, Forecast] = {}
        for record in self._repository.forecasts(job=job_id, limit=MOST_RANKS).items:
            process_id = record.allocator.process_id
            worst[process_id] = max(worst.get(process_id, record.forecast), record.forecast, key=_nearness)

        def gravity(one: ProcessRecord) -> tuple[int, float, int]:
            rank = one.process.rank if one.process.rank is not None else 0
            forecast = worst.get(one.process.process_id)
            if forecast is None:
                return 0, float("inf"), rank
            level, nearness = _nearness(forecast)
            return -level, -nearness, rank

        return gravity

    def _ordered(self, one: ProcessRecord, wish: Wish, now_us: int) -> CaptureRecord:
        return CaptureRecord(
            secrets.token_hex(16),
            one.process.process_id,
            one.process.job,
            one.node,
            CaptureReason.ASKED,
            CaptureState.ORDERED,
            rank=one.process.rank,
            device_uuid=self._device_uuid(one, wish.device),
            tensors=wish.tensors,
            history_us=wish.history_us,
            most_history_entries=wish.most_history_entries,
            ordered_us=now_us,
        )

    def _device_uuid(self, one: ProcessRecord, device: str | None) -> str | None:
        if device is None:
            return None
        refs = self._repository.allocators(process_id=one.process.process_id, limit=100).items
        used = {ref.device_uuid: None for ref in refs} | {known.uuid: None for known in one.process.devices}
        gpus = {uuid: self._gpu(uuid) for uuid in used}
        for uuid, gpu in gpus.items():
            if device == uuid or (gpu is not None and device == str(gpu)):
                return uuid
        shown = ", ".join(uuid if gpu is None else f"{gpu} ({uuid})" for uuid, gpu in gpus.items()) or "none yet"
        whose = "the process" if one.process.rank is None else f"rank {one.process.rank}"
        raise UnknownDevice(
            f"{whose} on {one.node} does not use device {device[:100]!r}; it uses {shown}", device=device
        )


def _nearness(forecast: Forecast) -> tuple[int, float]:
    margin = forecast.margin_ratio
    return forecast.state.level, float("-inf") if margin is None else -margin


def _newest_by_rank(processes: Sequence[ProcessRecord]) -> list[ProcessRecord]:
    """In the order of ranks; of a rank that was restarted the process that came last, which lists begin with."""
    by_rank: dict[object, ProcessRecord] = {}
    for one in processes:
        rank = one.process.rank
        by_rank.setdefault(one.process.process_id if rank is None else rank, one)
    return sorted(by_rank.values(), key=lambda one: -1 if one.process.rank is None else one.process.rank)


def _unknown_rank(job_id: str, live: Sequence[ProcessRecord], wish: Wish) -> UnknownRank:
    ranks = sorted({one.process.rank for one in live if one.process.rank is not None})
    shown = ", ".join(map(str, ranks[:64])) or "of no rank"
    wanted = [f"rank {wish.rank}"] * (wish.rank is not None) + [f"id {wish.process_id}"] * (wish.process_id is not None)
    text = f"no process of job {job_id[:100]!r} that runs is of {' and '.join(wanted)}; those that run are {shown}"
    return UnknownRank(text, ranks=ranks)
