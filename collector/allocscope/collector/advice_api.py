"""Advice over HTTP."""

from __future__ import annotations

from typing import Annotated, Any
from urllib.parse import unquote

from fastapi import FastAPI, Query

from allocscope.collector.advice_questions import AdviceQuestions
from allocscope.collector.parameters import Cursor, Limit, Name


def add_advice(api: FastAPI, advice: AdviceQuestions) -> None:
    """The routes."""

    @api.get("/api/v1/advice")
    def list_advice(cursor: Cursor = None, limit: Limit = 100) -> dict[str, Any]:
        """What would have helped, from replays of jobs' own requests, the one that came last first."""
        return advice.page(cursor, limit)

    @api.get("/api/v1/jobs/{job_id}/advice")
    def of_job(
        job_id: str,
        rank: Annotated[int | None, Query(ge=0, le=2**31 - 1)] = None,
        uuid: Name = None,
        capture: Annotated[str | None, Query(max_length=64, description="Of one capture.")] = None,
        cursor: Cursor = None,
        limit: Limit = 100,
    ) -> dict[str, Any]:
        """What would help a job, the one that came last first; `under_way`: the captures of which advice is still to come."""
        return advice.of_job(unquote(job_id), rank=rank, uuid=uuid, capture_id=capture, cursor=cursor, limit=limit)
