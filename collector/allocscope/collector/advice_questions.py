"""Questions about advice, put to a Repository. Answers are JSON-ready; nothing here knows HTTP."""

from __future__ import annotations

from collections.abc import Callable

from allocscope.collector.advice import RECEIVED_WITHIN_US
from allocscope.collector.questions import Questions
from allocscope.collector.views import Json
from allocscope.model.advice_plain import advice_to_plain
from allocscope.storage.advice import AdviceRecord
from allocscope.storage.captures import OPEN, CaptureRecord
from allocscope.storage.repository import Repository

MOST_UNDER_WAY = 100


class AdviceQuestions:
    """What people ask of advice."""

    def __init__(
        self, repository: Repository, questions: Questions, *, now_us: Callable[[], int], is_made_here: bool
    ) -> None:
        """`is_made_here`: whether this collector replays captures."""
        self._repository, self._questions = repository, questions
        self._now_us, self._is_made_here = now_us, is_made_here

    def page(self, cursor: str | None, limit: int) -> Json:
        """Of the fleet, the one that came last first."""
        page = self._repository.advice.page(cursor=cursor, limit=limit)
        return {"items": [self._view(record) for record in page.items], "next_cursor": page.next_cursor}

    def of_job(
        self,
        job_id: str,
        *,
        rank: int | None = None,
        uuid: str | None = None,
        capture_id: str | None = None,
        cursor: str | None = None,
        limit: int = 100,
    ) -> Json:
        """Of a job, the one that came last first, and what is still to come. UnknownJob."""
        self._questions.known_job(job_id)
        under_way = [self._capture_under_way(capture) for capture in self._under_way(job_id, rank)]
        page = self._repository.advice.page(
            job=job_id, rank=rank, device_uuid=uuid, capture_id=capture_id, cursor=cursor, limit=limit
        )
        return {
            "job": job_id,
            "items": [self._view(record) for record in page.items],
            "next_cursor": page.next_cursor,
            "under_way": under_way,
            "is_made_here": self._is_made_here,
        }

    def _under_way(self, job_id: str, rank: int | None) -> list[CaptureRecord]:
        """Captures with a history that are on order, or that wait for their replay."""
        captures: list[CaptureRecord] = []
        for state in OPEN:
            page = self._repository.captures.page(job=job_id, state=state, limit=MOST_UNDER_WAY)
            captures += [capture for capture in page.items if capture.history_us]
        since_us = self._now_us() - RECEIVED_WITHIN_US
        captures += self._repository.advice.unsettled(job_id, received_since_us=since_us, limit=MOST_UNDER_WAY)
        return [capture for capture in captures if rank is None or capture.rank == rank]

    def _capture_under_way(self, capture: CaptureRecord) -> Json:
        return {
            "capture_id": capture.capture_id,
            "rank": capture.rank,
            "node": capture.node,
            "uuid": capture.device_uuid,
            "reason": capture.reason.value,
            "state": capture.state.value,
        }

    def _view(self, record: AdviceRecord) -> Json:
        known = self._repository.device(record.device_uuid)
        return advice(record, known.reading.device.index if known else None)


def advice(record: AdviceRecord, gpu: int | None) -> Json:
    """What a replay of one capture says of one device. `gpu`: the device's index on its node."""
    return {
        "capture_id": record.capture_id,
        "job_id": record.job,
        "job": record.job,
        "rank": record.rank,
        "process_id": record.process_id,
        "node": record.node,
        "gpu": gpu,
        "uuid": record.device_uuid,
        "made_us": record.made_us,
        **advice_to_plain(record.advice),
    }
