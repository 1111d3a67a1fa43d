"""HTTP: the API under /api/v1, /metrics, health, service discovery and the page. Every parameter is bounded."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from enum import StrEnum
from http import HTTPStatus
from pathlib import Path as FilePath
from typing import Annotated, Any
from urllib.parse import unquote

import structlog
from fastapi import FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse, Response
from fastapi.staticfiles import StaticFiles
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from allocscope.collector.advice_api import add_advice
from allocscope.collector.advice_questions import AdviceQuestions
from allocscope.collector.capture_api import CAPTURE_STATUS, add_captures
from allocscope.collector.capture_questions import CaptureQuestions
from allocscope.collector.capture_refusals import CaptureRefusal
from allocscope.collector.parameters import Cursor, Limit, Name, Refused, Seconds, problems_of
from allocscope.collector.questions import Questions, UnknownJob
from allocscope.model import COLUMNS, Line, State
from allocscope.storage.errors import BadCursor, StorageError, TooManyOrders, UnknownMetric

log = structlog.get_logger(__name__)

STATIC = FilePath(__file__).parent / "static"
JOBS = "/api/v1/jobs/"
MOST_POINTS = 11_000
"""Of one series, as in Prometheus."""
LATEST_CAPTURES, LATEST_ADVICE = 20, 5
"""Of a job; api/v1/captures and api/v1/jobs/ID/advice have all."""
LARGEST_BODY_BYTES = 1 << 16


class AlertState(StrEnum):
    """How far an alert has come."""

    PENDING = "pending"
    FIRING = "firing"
    RESOLVED = "resolved"


def create_api(
    questions: Questions,
    captures: CaptureQuestions,
    advice: AdviceQuestions,
    *,
    registry: CollectorRegistry,
    failing: Callable[[], str | None],
) -> ASGIApp:
    """The whole HTTP application. `failing`: why nothing can be stored now; None: it can."""
    api = FastAPI(
        title="Allocscope",
        version="1",
        description="Where every byte of a fleet's device memory is, and who will run out of it. "
        "Figures that are not known are null. Sizes are bytes, times unix microseconds where a name ends in _us.",
        docs_url=None,
        redoc_url=None,
    )
    _add_errors(api)
    _add_lists(api, questions)
    _add_jobs(api, questions, captures, advice)
    add_captures(api, captures)
    add_advice(api, advice)
    _add_operations(api, questions, registry, failing)
    api.mount("/static", StaticFiles(directory=STATIC))
    return _Headers(_SmallBodies(_WholeNames(api)))


def _add_lists(api: FastAPI, questions: Questions) -> None:
    @api.get("/api/v1/fleet")
    def fleet() -> dict[str, Any]:
        """The fleet in a few figures."""
        return questions.fleet()

    @api.get("/api/v1/nodes")
    def nodes(cursor: Cursor = None, limit: Limit = 100) -> dict[str, Any]:
        """Nodes by name."""
        return questions.nodes(cursor, limit)

    @api.get("/api/v1/devices")
    def devices(node: Name = None, cursor: Cursor = None, limit: Limit = 100) -> dict[str, Any]:
        """Devices with their bills, in the order in which they were first read."""
        return questions.devices(node, cursor, limit)

    @api.get("/api/v1/jobs")
    def jobs(cursor: Cursor = None, limit: Limit = 100) -> dict[str, Any]:
        """Jobs with the allocator that is worst off, the job that came last first."""
        return questions.jobs(cursor, limit)

    @api.get("/api/v1/risks")
    def risks(at_least: State = State.WATCH, cursor: Cursor = None, limit: Limit = 100) -> dict[str, Any]:
        """Allocators that are not well, the worst of a page first."""
        return questions.risks(at_least, cursor, limit)

    @api.get("/api/v1/alerts")
    def alerts(
        job: Name = None, state: AlertState | None = None, cursor: Cursor = None, limit: Limit = 100
    ) -> dict[str, Any]:
        """Alerts, the one that came last first."""
        return questions.alerts(job, state.value if state else None, cursor, limit)


def _add_jobs(api: FastAPI, questions: Questions, captures: CaptureQuestions, advice: AdviceQuestions) -> None:
    @api.get(JOBS + "{job_id}")
    def job(job_id: str) -> dict[str, Any]:
        """One job with its processes, allocators, latest events, captures and advice. A job's id is its name, percent-encoded."""
        about = questions.job(unquote(job_id))
        latest = captures.page(unquote(job_id), None, None, LATEST_CAPTURES)
        advised = advice.of_job(unquote(job_id), limit=LATEST_ADVICE)
        return {**about, "captures": latest["items"], "advice": advised["items"]}

    @api.get(JOBS + "{job_id}/bill")
    def bill(job_id: str) -> dict[str, Any]:
        """The bills of the devices that a job uses."""
        return questions.bill(unquote(job_id))

    @api.get(JOBS + "{job_id}/series")
    def series(
        job_id: str,
        metric: Annotated[str, Query(max_length=64, description="A counter of a sample, or a line of the bill.")],
        from_: Annotated[
            Seconds, Query(alias="from", description="Unix seconds; by default 900 s before `to`.")
        ] = None,
        to: Annotated[Seconds, Query(description="Unix seconds; by default the job's latest moment.")] = None,
        step: Annotated[
            float | None, Query(ge=0.001, le=31_536_000, allow_inf_nan=False, description="Seconds.")
        ] = None,
    ) -> dict[str, Any]:
        """A figure over time, one series an allocator, by the job's own clock."""
        name = _metric(metric)
        from_us, to_us, step_us = (None if value is None else round(value * 1e6) for value in (from_, to, step))
        _bounded(from_us, to_us, step_us)
        return questions.series(unquote(job_id), name, from_us, to_us, step_us)


def _metric(name: str) -> str | Line:
    lines = {line.value: line for line in Line}
    if name in lines:
        return lines[name]
    if name in COLUMNS:
        return name
    raise UnknownMetric(name, (*lines, *COLUMNS))


def _bounded(from_us: int | None, to_us: int | None, step_us: int | None) -> None:
    span_us = 900_000_000 if from_us is None or to_us is None else to_us - from_us
    if span_us <= 0:
        raise Refused(
            HTTPStatus.UNPROCESSABLE_ENTITY, "bad_range", "`from` must lie before `to`", from_us=from_us, to_us=to_us
        )
    if from_us is not None and to_us is None:
        raise Refused(HTTPStatus.UNPROCESSABLE_ENTITY, "bad_range", "`from` needs a `to`", from_us=from_us)
    if step_us is not None and span_us // step_us > MOST_POINTS:
        message = f"{span_us // step_us} points are too many (at most {MOST_POINTS}): take a longer step"
        raise Refused(HTTPStatus.UNPROCESSABLE_ENTITY, "too_many_points", message, step_us=step_us)


def _add_operations(
    api: FastAPI, questions: Questions, registry: CollectorRegistry, failing: Callable[[], str | None]
) -> None:
    @api.get("/healthz")
    def healthz() -> dict[str, str]:
        """The process answers."""
        return {"status": "ok"}

    @api.get("/readyz")
    def readyz() -> Response:
        """What daemons send can be stored."""
        why = failing()
        if why is None:
            return JSONResponse({"status": "ok"})
        return _error(HTTPStatus.SERVICE_UNAVAILABLE, "storage", why)

    @api.get("/metrics", include_in_schema=False)
    def metrics() -> Response:
        """For Prometheus."""
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    @api.get("/sd/prometheus")
    def scrape_targets() -> list[dict[str, Any]]:
        """The daemons, for Prometheus's http_sd_configs."""
        return questions.scrape_targets()

    @api.get("/", include_in_schema=False)
    def page() -> Response:
        """The page."""
        return FileResponse(STATIC / "index.html")


# errors


def _error(status: int, code: str, message: str, **details: Any) -> JSONResponse:
    return JSONResponse({"error": {"code": code, "message": message, "details": details}}, status_code=status)


Handler = Callable[[Request, Any], Awaitable[Response]]
_CODES = {404: "not_found", 405: "method_not_allowed", 413: "too_large", 415: "not_json"}


def _add_errors(api: FastAPI) -> None:
    async def refused(_: Request, error: Refused) -> Response:
        return _error(error.status, error.code, error.message, **error.details)

    async def unknown_job(_: Request, error: UnknownJob) -> Response:
        return _error(HTTPStatus.NOT_FOUND, "unknown_job", str(error), job_id=error.job_id)

    async def unknown_metric(_: Request, error: UnknownMetric) -> Response:
        return _error(HTTPStatus.UNPROCESSABLE_ENTITY, "unknown_metric", str(error), known=list(error.known))

    async def bad_cursor(_: Request, error: BadCursor) -> Response:
        return _error(HTTPStatus.UNPROCESSABLE_ENTITY, "bad_cursor", str(error))

    async def capture(_: Request, error: CaptureRefusal) -> Response:
        return _error(CAPTURE_STATUS[type(error)], error.code, str(error), **error.details)

    async def too_many(_: Request, error: TooManyOrders) -> Response:
        return _error(HTTPStatus.TOO_MANY_REQUESTS, "too_many_orders", str(error), most=error.most)

    async def storage(_: Request, error: StorageError) -> Response:
        return _error(HTTPStatus.SERVICE_UNAVAILABLE, "storage", str(error))

    async def http(request: Request, error: HTTPException) -> Response:
        code = _CODES.get(error.status_code, "http_error")
        answer = _error(error.status_code, code, str(error.detail), path=request.url.path[:200], method=request.method)
        answer.headers.update(error.headers or {})
        return answer

    async def invalid(_: Request, error: RequestValidationError) -> Response:
        problems = problems_of(error.errors())
        message = "; ".join(f"{problem['parameter']}: {problem['message']}" for problem in problems)
        return _error(HTTPStatus.UNPROCESSABLE_ENTITY, "bad_parameter", message, problems=problems)

    async def unexpected(request: Request, error: Exception) -> Response:
        log.error("a request failed", path=request.url.path, exc_info=error)
        return _error(
            HTTPStatus.INTERNAL_SERVER_ERROR, "internal", "this is a defect of ours; the collector's log says more"
        )

    handlers: dict[type[Exception], Handler] = {
        Refused: refused,
        UnknownJob: unknown_job,
        UnknownMetric: unknown_metric,
        BadCursor: bad_cursor,
        CaptureRefusal: capture,
        TooManyOrders: too_many,
        StorageError: storage,
        HTTPException: http,
        RequestValidationError: invalid,
        Exception: unexpected,
    }
    for kind, handler in handlers.items():
        api.add_exception_handler(kind, handler)


# what surrounds the application


class _WholeNames:
    """A job's name may hold a slash: as long as it is percent-encoded it is one part of the path."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        raw: bytes = scope.get("raw_path") or b""
        if scope["type"] == "http" and raw.startswith(JOBS.encode()):
            scope = {**scope, "path": raw.decode("ascii", "replace")}
        await self._app(scope, receive, send)


class _SmallBodies:
    """What is sent to us is read up to a bound."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        left_bytes = LARGEST_BODY_BYTES

        async def bounded() -> Message:
            nonlocal left_bytes
            message = await receive()
            left_bytes -= len(message.get("body", b""))
            if left_bytes < 0:
                text = f"more than {LARGEST_BODY_BYTES} bytes were sent"
                raise HTTPException(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, text)
            return message

        await self._app(scope, bounded, send)


HEADERS = {
    b"content-security-policy": b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    b"connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    b"x-content-type-options": b"nosniff",
    b"referrer-policy": b"no-referrer",
    b"cross-origin-resource-policy": b"same-origin",
    b"cache-control": b"no-cache",
}
"""Of every answer: nothing from elsewhere, nothing in frames, nothing guessed."""


class _Headers:
    """Adds them."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                given = {name.lower() for name, _ in message["headers"]}
                added = [(name, value) for name, value in HEADERS.items() if name not in given]
                message = {**message, "headers": [*message["headers"], *added]}
            await send(message)

        await self._app(scope, receive, with_headers)
