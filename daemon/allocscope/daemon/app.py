"""The daemon, wired together: what starts in which order, the round that everything goes through, and the orderly end."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import structlog

from allocscope.daemon.capture_side import CaptureSide
from allocscope.daemon.collector_way import CollectorWay
from allocscope.daemon.config import DaemonSettings, default_socket, default_spool
from allocscope.daemon.devices import Devices
from allocscope.daemon.durable import write_atomically
from allocscope.daemon.errors import AddressesError, GroupError, ProcError, SocketError
from allocscope.daemon.exposition import NodeCollector, NodeView
from allocscope.daemon.intake import Intake
from allocscope.daemon.jobs_server import JobsServer
from allocscope.daemon.kubelet import Kubelet
from allocscope.daemon.listen import JobsSocket
from allocscope.daemon.losses import Losses
from allocscope.daemon.metrics_server import MetricsServer
from allocscope.daemon.node import Node
from allocscope.daemon.nvml import SWITCHED_OFF, Nvml, NvmlRound, load_pynvml
from allocscope.daemon.nvml_problems import ProblemNews
from allocscope.daemon.nvml_watch import NvmlWatch
from allocscope.daemon.observed import Observed
from allocscope.daemon.outbox import Outbox
from allocscope.daemon.owners import Owners
from allocscope.daemon.peers import Peers
from allocscope.daemon.procfs import Procfs
from allocscope.daemon.rights import folder_risk, what_is_lost
from allocscope.daemon.service import ProbeService
from allocscope.daemon.spool import Spool
from allocscope.daemon.status import status, with_status
from allocscope.daemon.uplink import CollectorUplink
from allocscope.proto.v1.collector_service_pb2 import NodeHello

log = structlog.get_logger()

SERVER_GRACE_S = 0.5
LEAST_PAUSE_S = 0.02
"""Between two rounds, however many jobs ask for one."""


class Daemon:
    """One daemon, from its start to its end."""

    def __init__(self, settings: DaemonSettings, load_nvml: Callable[[], Any] = load_pynvml) -> None:
        """Takes what it needs of the machine; DaemonError: that is not to be had."""
        root = os.geteuid() == 0
        self._settings = settings
        way = CollectorWay.of(settings)
        for warning in way.warnings():
            log.warning("a secret is open to others", file=warning)
        if not os.path.exists(settings.proc / "stat"):  # noqa: PTH110 (Path.exists raises where it may not look)
            raise ProcError(settings.proc)
        self._node_name = settings.node or socket.gethostname()
        self._socket = settings.socket or default_socket(os.environ, root=root)
        self._observed = observed = Observed()
        self._node = Node()
        self._hasten = asyncio.Event()
        self._intake = Intake(self._hasten.set)
        procfs, kubelet = Procfs(settings.proc), Kubelet(settings.kubelet_socket, settings.pod_logs)
        self._owners = Owners(procfs, kubelet, round_=observed.owners.round, question=observed.kubelet.round)
        self._devices = Devices(self._node, procfs, self._owners)
        self._peers = Peers(procfs)
        self._lost = what_is_lost(procfs, settings.kubelet_socket)
        self._watch = self._new_watch(load_nvml) if settings.nvml else None
        self._news = ProblemNews()

        self._view = NodeView()
        observed.registry.register(NodeCollector(self._node_name, _version(), lambda: self._view))
        self._metrics = MetricsServer(settings.metrics_listen, observed.registry, partial(with_status, self._status))
        spool_folder = settings.spool or default_spool(os.environ, root=root)
        self._spool = Spool(spool_folder, settings.spool_limit_bytes, limit_age_s=settings.spool_limit_age_s)
        losses = Losses(observed, self._intake)
        self._outbox = Outbox(self._spool, self._intake, losses, observed)
        self._captures = CaptureSide(
            settings,
            way,
            self._node_name,
            self._socket,
            spool_folder,
            self._node,
            self._intake,
            self._devices,
            observed,
        )
        self._service = ProbeService(
            self._node, self._intake, observed, self._captures.orders, self._devices.total_bytes
        )
        self._server = JobsServer(self._service, self._peers.of)
        self._jobs_socket = JobsSocket(
            self._socket, self._server.start, group=settings.socket_group, mode=int(settings.socket_mode, 8)
        )
        self._uplink = CollectorUplink(
            way,
            self._hello(),
            self._outbox,
            observed,
            losses,
            self._service.order,
            backlog_bytes_per_s=settings.backlog_bytes_per_s,
        )

    @property
    def metrics_address(self) -> str:
        """HOST:PORT of /metrics as bound."""
        return self._metrics.address

    async def run(self, stopping: asyncio.Event) -> None:
        """Until `stopping` is set."""
        try:
            await self._jobs_socket.open()
        except (SocketError, GroupError):
            await self._outbox.close()
            self._metrics.close()
            raise
        self._metrics.start()
        if self._watch:
            self._watch.start()
        self._owners.start(time.monotonic)
        uplink = asyncio.create_task(self._uplink.run())
        self._captures.start()
        try:
            self._say_ready()
            await self._go_round(stopping)
        finally:
            log.info("stopping")
            self._jobs_socket.unlink()
            await self._captures.end()
            stopped = asyncio.create_task(self._server.stop(SERVER_GRACE_S))
            await self._round()
            await stopped
            await self._round()  # what came in the grace
            with suppress(TimeoutError):
                await asyncio.wait_for(self._uplink.drain(self._outbox.last_sequence), self._settings.drain_s)
            uplink.cancel()
            await asyncio.wait([uplink])
            if self._watch:
                self._watch.stop()
            self._owners.stop()
            await self._outbox.close()
            self._metrics.close()
            log.info("stopped", waiting=self._spool.batches)

    # the round

    async def _go_round(self, stopping: asyncio.Event) -> None:
        stop = asyncio.create_task(stopping.wait())
        while not stop.done():
            hasten = asyncio.create_task(self._hasten.wait())
            await asyncio.wait([stop, hasten], timeout=self._settings.interval_s, return_when=asyncio.FIRST_COMPLETED)
            hasten.cancel()
            await self._jobs_socket.look_after(time.monotonic())
            is_hastened = self._hasten.is_set()
            self._hasten.clear()
            await self._round(is_hastened=is_hastened)
            await asyncio.wait([stop], timeout=LEAST_PAUSE_S)

    async def _round(self, *, is_hastened: bool = True) -> None:
        """Make the bills, close the batch, write it, and tell those who wait for it."""
        try:
            with self._observed.bill.round():
                self._take_stock()
        except Exception:  # what is wrong with one round's figures must not end the rounds
            log.exception("no bill this time")
        self._outbox.close_batch(_wall_us())
        await self._outbox.write()
        self._outbox.tell(at_once=is_hastened)
        self._uplink.wake()

    def _take_stock(self) -> None:
        """Who is here, what the devices say, and what /metrics is to show."""
        now_s = time.monotonic()
        for gone in self._node.retire(
            now_s,
            gone_after_s=self._settings.gone_after_s,
            silent_after_s=self._settings.silent_after_s,
            is_alive=self._devices.is_alive,
        ):
            log.info("process gone", job=gone.process.job, rank=gone.process.rank, process=gone.process.process_id)
        latest = self._watch.latest() if self._watch else SWITCHED_OFF
        self._tell(latest, now_s)
        readings = self._devices.read(latest, _wall_us())
        self._intake.add_readings(readings, [a.message for a in self._node if a.allocators])
        self._view = NodeView(
            readings=readings,
            allocators=tuple(self._devices.allocators(readings)),
            processes=tuple(attached.process for attached in self._node),
            nvml=latest,
            connected=self._uplink.is_connected,
            spool_bytes=self._spool.size_bytes,
            spool_limit_bytes=self._settings.spool_limit_bytes,
            spool_batches=self._spool.batches,
            capture_spool_bytes=self._captures.spool.bytes,
            capture_spool_limit_bytes=self._captures.spool.limit_bytes,
            capture_spool_captures=len(self._captures.spool),
        )

    def _tell(self, latest: NvmlRound, now_s: float) -> None:
        """Log what is wrong with NVML when it begins, and when it is over."""
        begun, well = self._news.step(latest.problems(), now_s)
        for where, problem in begun.items():
            log.warning("nvml", where=where, kind=problem.kind.value, problem=problem.text)
        for where in well:
            log.info("nvml is well again", where=where)

    def _say_ready(self) -> None:
        addresses = {"metrics": self._metrics.address, "socket": os.fspath(self._socket), "pid": os.getpid()}
        if file := self._settings.addresses_file:
            try:
                write_atomically(file, json.dumps(addresses) + "\n")
            except OSError as error:
                raise AddressesError(file, error.strerror or str(error)) from error
        for lost in filter(None, (*self._lost, self._peers.problem)):
            log.info("this daemon's rights", lost=lost)
        if risk := folder_risk(self._socket, os.geteuid()):
            log.warning("others could come between jobs and daemon", why=risk)
        log.info("ready", node=self._node_name, collector=self._settings.collector, **addresses)

    def _status(self) -> Mapping[str, Any]:
        return status(self._view, node=self._node_name, version=_version(), socket=self._socket)

    def _hello(self) -> NodeHello:
        address = self._settings.metrics_address or self._metrics.reachable_address(socket.gethostname())
        return NodeHello(
            node=self._node_name, daemon_id=self._spool.daemon_id, version=_version(), metrics_address=address
        )

    def _new_watch(self, load_nvml: Callable[[], Any]) -> NvmlWatch:
        settings, loop = self._settings, self._observed.nvml
        return NvmlWatch(
            Nvml(load_nvml),
            interval_s=settings.nvml_interval_s,
            timeout_s=settings.nvml_timeout_s,
            clock=time.monotonic,
            on_read=lambda seconds, went_well: loop.took(seconds) if went_well else loop.failed(),
        )


async def serve(settings: DaemonSettings) -> None:
    """A daemon until SIGTERM, SIGINT, or SIGHUP where that is not ignored (nohup); DaemonError: it cannot start."""
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) is signal.SIG_DFL:
            asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    await Daemon(settings).run(stopping)


def set_up_log(settings: DaemonSettings) -> None:
    """Log lines on standard error, for people or for machines."""
    last: Any = structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    if settings.log_format == "json":
        last = structlog.processors.JSONRenderer()
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            last,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, settings.log_level.upper())),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )


def _version() -> str:
    try:
        return version("allocscope")
    except PackageNotFoundError:
        return "0"


def _wall_us() -> int:
    return time.time_ns() // 1000
