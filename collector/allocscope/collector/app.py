"""Wires one collector process together."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import grpc
import structlog
import uvicorn
from anyio.to_thread import current_default_thread_limiter

from allocscope.collector.advice import Advisor
from allocscope.collector.advice_questions import AdviceQuestions
from allocscope.collector.advice_task import Limits
from allocscope.collector.api import create_api
from allocscope.collector.capture_questions import CaptureQuestions
from allocscope.collector.captures import CaptureLimits, CaptureService
from allocscope.collector.config import CollectorSettings, default_database
from allocscope.collector.credentials import GrpcSide, HttpSide
from allocscope.collector.errors import AddressesError, ListenError
from allocscope.collector.evaluate import Evaluator
from allocscope.collector.exposition import FleetCollector
from allocscope.collector.foreseen import Foreseen
from allocscope.collector.http_admission import HttpAdmission
from allocscope.collector.ingest import IngestService
from allocscope.collector.nodes import Nodes
from allocscope.collector.observation import Observation
from allocscope.collector.orders import Orders
from allocscope.collector.questions import Questions
from allocscope.collector.retention import Retention, keep_pruned
from allocscope.collector.tell import notifiers
from allocscope.collector.writer import Writer
from allocscope.proto.v1 import capture_service_pb2_grpc, collector_service_pb2_grpc
from allocscope.storage.repository import Repository
from allocscope.storage.sql import open_repository

log = structlog.get_logger(__name__)

READERS = 8
"""Requests over HTTP that are answered at a time; others wait."""
LARGEST_MESSAGE_BYTES = 16 << 20
GRPC_OPTIONS = (
    ("grpc.so_reuseport", 0),  # a second collector on the port is refused, instead of sharing it
    ("grpc.max_receive_message_length", LARGEST_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 20_000),  # a node that vanished without a word gives its name free again
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
)


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where a collector is, once it is ready."""

    grpc: str
    http: str
    pid: int


def now_us() -> int:
    """This machine's clock."""
    return time.time_ns() // 1000


async def serve(settings: CollectorSettings, repository: Repository, stop: asyncio.Event) -> None:
    """Run until `stop`; then end in order: no new data, what came is stored, alerts are told, answers are given."""
    grpc_side, http_side = GrpcSide(settings), HttpSide(settings)
    observation, nodes = Observation(), Nodes()
    with listening(settings.http_listen) as http_socket:
        http_address = _address(http_socket)
        captures = repository.captures
        orders = Orders(captures, observation, now_us=now_us)
        tell = notifiers(
            settings, observation, page_address=settings.page_address or f"{http_side.scheme}://{http_address}"
        )
        evaluator = Evaluator(
            repository,
            observation,
            nodes=nodes.all,
            publish=tell.publish,
            foreseen=Foreseen(captures, observation, wake=orders.wake, enabled=settings.capture_at_risk),
            now_us=now_us,
            retire_after_s=settings.retire_after_s,
        )
        writer = Writer(
            repository,
            observation,
            queue_bytes=settings.queue_bytes,
            commit_batches=settings.commit_batches,
            stored=evaluator.put,
            may_take_late=lambda: not evaluator.behind,
        )
        ingest = IngestService(
            registry=repository, nodes=nodes, writer=writer, orders=orders, observation=observation, now_us=now_us
        )
        limits = CaptureLimits(settings.capture_largest_bytes, settings.captures_limit_bytes)
        advisor = Advisor(
            repository,
            observation,
            Limits(settings.advice_time_limit_s, settings.advice_memory_bytes),
            now_us=now_us,
            told=evaluator.advise,
            enabled=settings.advice,
        )
        keep = CaptureService(repository, observation, limits, now_us=now_us, came=advisor.wake)
        observation.registry.register(FleetCollector(evaluator.fleet, nodes.all))
        questions = Questions(
            repository, nodes=nodes.all, now_us=now_us, live_for_us=round(settings.retire_after_s * 1e6)
        )
        asked = CaptureQuestions(repository, questions, observation, now_us=now_us, wake=orders.wake)
        advice = AdviceQuestions(repository, questions, now_us=now_us, is_made_here=settings.advice)
        api = create_api(questions, asked, advice, registry=observation.registry, failing=lambda: writer.failing)
        if http_side.tokens is not None:
            api = HttpAdmission(api, http_side.tokens)
        current_default_thread_limiter().total_tokens = READERS
        tell.start()
        evaluator.start()
        writer.start()
        retention = Retention(settings.keep_days, settings.captures_keep_days, settings.captures_limit_bytes)
        loops = [
            asyncio.create_task(keep_pruned(repository, observation, retention, now_us=now_us)),
            asyncio.create_task(orders.follow()),
            asyncio.create_task(advisor.follow()),
        ]
        try:
            async with (
                serving_grpc(ingest, keep, settings.grpc_listen, grpc_side) as grpc_address,
                serving_http(api, http_socket, http_side),
            ):
                addresses = Addresses(grpc_address, http_address, os.getpid())
                if settings.addresses_file:
                    write_addresses(settings.addresses_file, addresses)
                log.info("ready", grpc=grpc_address, page=f"{http_side.scheme}://{http_address}")
                await stop.wait()
                log.info("ending")
        finally:
            for loop in loops:
                loop.cancel()
            await asyncio.wait(loops)
            await writer.close(settings.drain_s)
            await asyncio.to_thread(evaluator.close, settings.drain_s)
            await asyncio.to_thread(tell.close, settings.drain_s)


@contextlib.contextmanager
def listening(address: str) -> Iterator[socket.socket]:
    """A socket on HOST:PORT."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, int(port)))
            listener.listen(128)
        except OSError as error:
            raise ListenError("HTTP", address, error.strerror or str(error), "--http-listen") from error
        yield listener


def _address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


@contextlib.asynccontextmanager
async def serving_grpc(ingest: IngestService, keep: CaptureService, address: str, side: GrpcSide) -> AsyncIterator[str]:
    """The daemons' server; yields where it is."""
    server = grpc.aio.server(options=GRPC_OPTIONS, interceptors=side.interceptors)
    collector_service_pb2_grpc.add_CollectorServiceServicer_to_server(ingest, server)
    capture_service_pb2_grpc.add_CaptureServiceServicer_to_server(keep, server)
    try:
        if side.credentials is None:
            port = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, side.credentials)
    except RuntimeError as error:
        raise ListenError("gRPC", address, _why_not(address), "--grpc-listen") from error
    await server.start()
    try:
        yield f"{address.rpartition(':')[0]}:{port}"
    finally:
        await server.stop(grace=0)


def _why_not(address: str) -> str:
    """The system says why it cannot listen; gRPC does not."""
    try:
        with listening(address):
            return "it could not be bound"
    except ListenError as error:
        return error.why


class _Server(uvicorn.Server):
    """Signals are this process's business; says when it is up."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.up = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.up.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.asynccontextmanager
async def serving_http(api: object, listener: socket.socket, side: HttpSide) -> AsyncIterator[None]:
    """The API's server, ready when it yields."""
    config = uvicorn.Config(
        api,  # type: ignore[arg-type]  # an ASGI application
        log_config=None,
        access_log=False,
        lifespan="off",
        server_header=False,
        limit_concurrency=512,
        timeout_graceful_shutdown=2,
    )
    config.load()
    config.ssl = side.context  # uvicorn makes one of files that it reads once
    server = _Server(config)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        await server.up.wait()
        yield
    finally:
        server.should_exit = True
        await task


def write_addresses(path: Path, addresses: Addresses) -> None:
    """Whole or not at all: who waits for the file reads all of it."""
    draft = path.with_name(f"{path.name}.{addresses.pid}")
    try:
        draft.write_text(json.dumps(asdict(addresses)) + "\n", encoding="utf-8")
        draft.replace(path)
    except OSError as error:
        raise AddressesError(path, error.strerror or str(error)) from error


def run(settings: CollectorSettings) -> None:
    """One collector, until SIGTERM or SIGINT."""
    set_up_logging(settings)
    repository = open_repository(settings.database or _default_database())
    try:
        asyncio.run(_until_signalled(settings, repository))
    finally:
        repository.close()


def _default_database() -> str:
    """Its folder is made where it is not there; one that somebody names must be."""
    url = default_database(os.environ, root=os.geteuid() == 0)
    with contextlib.suppress(OSError):  # opening the database says what is wrong
        Path(url.removeprefix("sqlite:///")).parent.mkdir(parents=True, exist_ok=True)
    return url


def set_up_logging(settings: CollectorSettings) -> None:
    """Everything on standard error, ours and our libraries'."""
    level = logging.getLevelNamesMapping()[settings.log_level.upper()]
    render = (
        structlog.processors.JSONRenderer()
        if settings.log_format == "json"
        else structlog.dev.ConsoleRenderer(colors=False)
    )
    shared: list[structlog.types.Processor] = [
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    tail = [structlog.processors.format_exc_info] if settings.log_format == "json" else []
    structlog.configure(
        processors=[*shared, *tail, render],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            processors=[*tail, structlog.stdlib.ProcessorFormatter.remove_processors_meta, render],
            foreign_pre_chain=shared,
        )
    )
    logging.basicConfig(level=max(level, logging.WARNING), handlers=[handler], force=True)


async def _until_signalled(settings: CollectorSettings, repository: Repository) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await serve(settings, repository, stop)
