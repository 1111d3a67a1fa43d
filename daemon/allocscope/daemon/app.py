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
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import structlog

from allocscope.daemon.config import DaemonSettings, default_socket, default_spool
from allocscope.daemon.devices import Devices
from allocscope.daemon.errors import AddressesError, GroupError, SocketError
from allocscope.daemon.exposition import MetricsServer, NodeCollector, NodeView
from allocscope.daemon.intake import ClosedBatch, Intake
from allocscope.daemon.listen import bind, new_server
from allocscope.daemon.node import Node
from allocscope.daemon.nvml import SWITCHED_OFF, Nvml, NvmlWatch, load_pynvml, problems
from allocscope.daemon.observed import Observed
from allocscope.daemon.procfs import Procfs
from allocscope.daemon.service import ProbeService
from allocscope.daemon.spool import Spool, SpooledBatch, write_atomically
from allocscope.daemon.spool_thread import SpoolThread
from allocscope.daemon.uplink import CollectorUplink
from allocscope.proto.v1.collector_service_pb2 import NodeHello

log = structlog.get_logger()

HEARTBEAT_S = 10.0
"""A node without devices and jobs says at least so often that it is there."""
UNWRITTEN_BYTES = 16 << 20
"""What is kept in memory while the spool cannot be written."""
SERVER_GRACE_S = 0.5


class Daemon:
    """One daemon, from its start to its end."""

    def __init__(self, settings: DaemonSettings, load_nvml: Callable[[], Any] = load_pynvml) -> None:
        """Takes what it needs of the machine; DaemonError: that is not to be had."""
        root = os.geteuid() == 0
        self._settings = settings
        self._node_name = settings.node or socket.gethostname()
        self._socket = settings.socket or default_socket(os.environ, root=root)
        self._observed = observed = Observed()
        self._node = Node()
        self._hasten = asyncio.Event()
        self._intake = Intake(self._hasten.set)
        self._devices = Devices(self._node, Procfs())
        self._watch = self._new_watch(load_nvml) if settings.nvml else None
        self._told: set[str] = set()
        self._unwritten: deque[tuple[SpooledBatch, ClosedBatch]] = deque()
        self._last_closed_s = 0.0
        self._write_failed = False

        self._view = NodeView()
        observed.registry.register(NodeCollector(self._node_name, _version(), lambda: self._view))
        self._metrics = MetricsServer(settings.metrics_listen, observed.registry)
        self._spool = Spool(settings.spool or default_spool(os.environ, root=root), settings.spool_limit_bytes)
        self._next_sequence = self._spool.next_sequence
        self._disk = SpoolThread(self._spool)
        self._service = ProbeService(self._node, self._intake, observed, self._devices.total_bytes)
        self._uplink = CollectorUplink(settings.collector, self._hello(), self._disk, observed, self._service.order)

    @property
    def metrics_address(self) -> str:
        """HOST:PORT of /metrics as bound."""
        return self._metrics.address

    async def run(self, stopping: asyncio.Event) -> None:
        """Until `stopping` is set."""
        server = new_server(self._service)
        try:
            bind(server, self._socket, group=self._settings.socket_group, mode=int(self._settings.socket_mode, 8))
        except (SocketError, GroupError):
            await self._disk.close()
            self._metrics.close()
            raise
        await server.start()
        self._metrics.start()
        if self._watch:
            self._watch.start()
        uplink = asyncio.create_task(self._uplink.run())
        try:
            self._say_ready()
            await self._go_round(stopping)
        finally:
            log.info("stopping")
            with suppress(OSError):
                self._socket.unlink()
            stopped = asyncio.create_task(server.stop(SERVER_GRACE_S))
            await self._round()
            await stopped
            await self._round()  # what came in the grace
            with suppress(TimeoutError):
                await asyncio.wait_for(self._uplink.drain(self._next_sequence - 1), self._settings.drain_s)
            uplink.cancel()
            await asyncio.wait([uplink])
            if self._watch:
                self._watch.stop()
            await self._disk.close()
            self._metrics.close()
            log.info("stopped", waiting=self._spool.batches)

    # the round

    async def _go_round(self, stopping: asyncio.Event) -> None:
        stop = asyncio.create_task(stopping.wait())
        while not stop.done():
            hasten = asyncio.create_task(self._hasten.wait())
            await asyncio.wait([stop, hasten], timeout=self._settings.interval_s, return_when=asyncio.FIRST_COMPLETED)
            hasten.cancel()
            self._hasten.clear()
            await self._round()

    async def _round(self) -> None:
        """Make the bills, close the batch, write it, and tell those who wait for it."""
        try:
            with self._observed.bill.round():
                self._take_stock()
        except Exception:  # what is wrong with one round's figures must not end the rounds
            log.exception("no bill this time")
        self._close_batch()
        await self._write()

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
        self._tell(tuple(problems(latest)))
        readings = self._devices.read(latest, _wall_us())
        self._intake.add_readings(readings, [a.message for a in self._node if a.allocators])
        self._view = NodeView(
            readings=readings,
            allocators=tuple(self._devices.allocators(readings)),
            processes=tuple(attached.process for attached in self._node),
            nvml_up=latest.problem is None,
            connected=self._uplink.is_connected,
            spool_bytes=self._spool.bytes,
            spool_limit_bytes=self._settings.spool_limit_bytes,
            spool_batches=self._spool.batches,
        )

    def _close_batch(self) -> None:
        now_s = time.monotonic()
        if self._intake.is_empty and now_s - self._last_closed_s < HEARTBEAT_S:
            return
        self._last_closed_s = now_s
        first = max(self._next_sequence, self._spool.next_sequence)  # a collector may know of more than the spool does
        for closed in self._intake.close(first, _wall_us()):
            self._next_sequence = closed.batch.sequence + 1
            spooled = SpooledBatch(closed.batch.sequence, closed.batch.SerializeToString(), closed.counts)
            self._unwritten.append((spooled, closed))
        if self._intake.too_large:
            log.warning("too large for a batch", **self._intake.too_large)
            for what, count in self._intake.too_large.items():
                self._observed.dropped.add(count, what, "too_large")
            self._intake.too_large.clear()

    async def _write(self) -> None:
        batches = [spooled for spooled, _ in self._unwritten]
        if not batches:
            return
        try:
            with self._observed.spool_write.round():
                await self._disk.write(batches)
        except OSError as error:
            if not self._write_failed:
                log.error(
                    "the spool cannot be written; kept in memory, tried again", why=error.strerror, batches=len(batches)
                )
            self._write_failed = True
            self._give_up_the_oldest()
            return
        if self._write_failed:
            log.info("the spool can be written again")
            self._write_failed = False
        for _ in batches:
            self._unwritten.popleft()[1].acknowledge()
        self._count_losses()
        self._uplink.wake()

    def _give_up_the_oldest(self) -> None:
        """Of what could not be written, while there is too much."""
        while len(self._unwritten) > 1 and sum(len(s.payload) for s, _ in self._unwritten) > UNWRITTEN_BYTES:
            lost, given_up = self._unwritten.popleft()
            self._intake.inherit(given_up)
            self._count_loss("spool_write_failed", 1, lost.counts.samples, lost.counts.block_maps, lost.counts.events)

    # what is told

    def _count_losses(self) -> None:
        while self._spool.lost:
            loss = self._spool.lost.pop()
            self._count_loss(loss.reason, loss.batches, loss.counts.samples, loss.counts.block_maps, loss.counts.events)

    def _count_loss(self, reason: str, batches: int, samples: int, block_maps: int, events: int) -> None:
        counts = {"batches": batches, "samples": samples, "block_maps": block_maps, "events": events}
        log.warning("lost from the spool", reason=reason, **counts)
        for what, count in counts.items():
            if count:
                self._observed.dropped.add(count, what, reason)

    def _tell(self, problems: tuple[str, ...]) -> None:
        """Log what is wrong with NVML when it begins, and when it is over."""
        now = set(problems)
        for problem in now - self._told:
            log.warning("nvml", problem=problem)
        if self._told and not now:
            log.info("nvml is well again")
        self._told = now

    def _say_ready(self) -> None:
        addresses = {"metrics": self._metrics.address, "socket": os.fspath(self._socket), "pid": os.getpid()}
        if file := self._settings.addresses_file:
            try:
                write_atomically(file, json.dumps(addresses) + "\n")
            except OSError as error:
                raise AddressesError(file, error.strerror or str(error)) from error
        log.info("ready", node=self._node_name, collector=self._settings.collector, **addresses)

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
            on_round=lambda seconds, went_well: loop.took(seconds) if went_well else loop.failed(),
        )


async def serve(settings: DaemonSettings) -> None:
    """A daemon until SIGTERM or SIGINT; DaemonError: it cannot start."""
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
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
