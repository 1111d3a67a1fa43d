"""Captures over HTTP: which there are, downloads, and orders for new ones."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated, Any, Literal
from urllib.parse import unquote

from fastapi import Depends, FastAPI, Request
from fastapi.responses import Response, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException

from allocscope.collector.capture_questions import CaptureQuestions, Wish
from allocscope.collector.capture_refusals import (
    CaptureRefusal,
    JobEnded,
    NoSnapshot,
    NotReady,
    SnapshotDropped,
    UnknownCapture,
    UnknownDevice,
    UnknownRank,
)
from allocscope.collector.parameters import Cursor, Limit, Name
from allocscope.storage.captures import CaptureState

CAPTURE_STATUS: dict[type[CaptureRefusal], HTTPStatus] = {
    UnknownCapture: HTTPStatus.NOT_FOUND,
    NotReady: HTTPStatus.CONFLICT,
    NoSnapshot: HTTPStatus.NOT_FOUND,
    SnapshotDropped: HTTPStatus.GONE,
    JobEnded: HTTPStatus.CONFLICT,
    UnknownRank: HTTPStatus.NOT_FOUND,
    UnknownDevice: HTTPStatus.UNPROCESSABLE_ENTITY,
}
"""What each refusal is in HTTP's words."""
LONGEST_HISTORY_S = 600.0
MOST_HISTORY_ENTRIES = 1_000_000
"""As many as a probe records."""


class OrderBody(BaseModel):
    """A capture that is wanted. All of it may be left out."""

    model_config = ConfigDict(strict=True, extra="forbid")

    rank: Annotated[
        Annotated[int, Field(ge=0, le=2**31 - 1)] | Literal["all"] | None,
        Field(description='A rank, or "all"; by default the one that is nearest to running out of memory.'),
    ] = None
    process_id: Annotated[str | None, Field(max_length=512, description="One process, instead of a rank.")] = None
    device: Annotated[
        str | None, Field(max_length=512, description="A UUID, or a GPU's index on its node; by default all devices.")
    ] = None
    history_s: Annotated[
        float | None,
        Field(
            ge=0.1,
            le=LONGEST_HISTORY_S,
            allow_inf_nan=False,
            description="Record the history, without stacks, for so long first; by default none is recorded for it.",
        ),
    ] = None
    history_entries: Annotated[
        int | None, Field(ge=1, le=MOST_HISTORY_ENTRIES, description="At most so many entries of it.")
    ] = None
    tensors: Annotated[bool, Field(description="Whether to tell who holds the live tensors.")] = False

    def wish(self) -> Wish:
        """In our words."""
        return Wish(
            rank=self.rank if isinstance(self.rank, int) else None,
            all_ranks=self.rank == "all",
            process_id=self.process_id,
            device=self.device,
            history_us=None if self.history_s is None else round(self.history_s * 1e6),
            most_history_entries=self.history_entries,
            tensors=self.tensors,
        )


def _json_only(request: Request) -> None:
    """Another site's page can send anything but this without asking the browser first, and the browser asks us."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise HTTPException(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "send JSON, with content-type: application/json")


def add_captures(api: FastAPI, captures: CaptureQuestions) -> None:
    """The routes."""

    @api.get("/api/v1/captures")
    def list_captures(
        job: Name = None, state: CaptureState | None = None, cursor: Cursor = None, limit: Limit = 100
    ) -> dict[str, Any]:
        """Captures from their order on, the one that came last first."""
        return captures.page(job, state, cursor, limit)

    @api.get("/api/v1/captures/{capture_id}/about")
    def about(capture_id: str) -> dict[str, Any]:
        """One capture: what has become of it, and what is in it."""
        return captures.about(capture_id)

    @api.get(
        "/api/v1/captures/{capture_id}",
        response_class=Response,
        responses={200: {"content": {"application/octet-stream": {}}}},
    )
    def download(capture_id: str, request: Request) -> Response:
        """The snapshot, a pickle as torch.cuda.memory._dump_snapshot() writes it: PyTorch's viewer opens it, and `allocscope inspect`."""
        snapshot = captures.snapshot(capture_id)
        headers = {
            "content-disposition": f'attachment; filename="{snapshot.file_name}"',
            "vary": "accept-encoding",
        }
        if accepts_gzip(request.headers.get("accept-encoding", "")):
            headers |= {"content-encoding": "gzip", "content-length": str(snapshot.stored_bytes)}
            return StreamingResponse(snapshot.packed(), headers=headers, media_type="application/octet-stream")
        headers |= {"content-length": str(snapshot.snapshot_bytes)}
        return StreamingResponse(snapshot.plain(), headers=headers, media_type="application/octet-stream")

    @api.post("/api/v1/jobs/{job_id}/captures", status_code=HTTPStatus.ACCEPTED, dependencies=[Depends(_json_only)])
    def order(job_id: str, body: OrderBody) -> dict[str, Any]:
        """Order captures of a job that runs, one a chosen process. They come in a while: ask what has become of each."""
        return captures.order(unquote(job_id), body.wish())


def accepts_gzip(header: str) -> bool:
    """Whether an Accept-Encoding header allows it (RFC 9110, 12.5.3); none does not."""
    weights: dict[str, float] = {}
    for part in header.split(","):
        coding, *parameters = (piece.strip().lower() for piece in part.split(";"))
        weights[coding] = _weight(parameters)
    return weights.get("gzip", weights.get("x-gzip", weights.get("*", 0.0))) > 0


def _weight(parameters: list[str]) -> float:
    for parameter in parameters:
        name, _, value = parameter.partition("=")
        if name.strip() == "q":
            try:
                return float(value)
            except ValueError:
                return 0.0
    return 1.0
