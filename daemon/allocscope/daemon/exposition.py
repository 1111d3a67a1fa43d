"""/metrics: the node's bills and the daemon's own health, from one frozen view that each round replaces."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

from allocscope.daemon.errors import ListenError
from allocscope.model import metrics
from allocscope.model.identity import Device, Process
from allocscope.model.node import DeviceReading
from allocscope.model.sample import Sample

MOST_SCRAPES = 8
"""At a time; who comes later is turned away."""
SCRAPE_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class AllocatorView:
    """What one allocator's lines are made of."""

    process: Process
    device_uuid: str
    sample: Sample
    headroom_bytes: int | None = None
    largest_free_block_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class NodeView:
    """What /metrics tells of the node."""

    readings: tuple[DeviceReading, ...] = ()
    allocators: tuple[AllocatorView, ...] = ()
    processes: tuple[Process, ...] = ()
    nvml_up: bool = False
    connected: bool = False
    spool_bytes: int = 0
    spool_limit_bytes: int = 0
    spool_batches: int = 0


class NodeCollector(Collector):
    """Asked for each scrape; what is gone from the view is gone from here."""

    def __init__(self, node: str, version: str, view: Callable[[], NodeView]) -> None:
        self._node, self._version, self._view = node, version, view

    def describe(self) -> Iterable[Family]:
        """Nothing is asked for at registration."""
        return ()

    def collect(self) -> Iterator[Family]:
        """Every family that has something to tell."""
        view = self._view()
        yield from (family for family in self._of_node(view) if family.samples)

    def _of_node(self, view: NodeView) -> Iterator[Family]:
        yield _figures(metrics.BUILD_INFO, {(self._version,): 1})
        yield _figures(metrics.PROCESSES, {(): len(view.processes)})
        yield _figures(metrics.NVML_UP, {(): int(view.nvml_up)})
        yield _figures(metrics.COLLECTOR_CONNECTED, {(): int(view.connected)})
        yield _figures(metrics.SPOOL_BYTES, {(): view.spool_bytes})
        yield _figures(metrics.SPOOL_LIMIT_BYTES, {(): view.spool_limit_bytes})
        yield _figures(metrics.SPOOL_BATCHES, {(): view.spool_batches})
        yield from self._of_devices(view)
        yield from self._of_allocators(view)

    def _of_devices(self, view: NodeView) -> Iterator[Family]:
        devices = [reading.device for reading in view.readings]
        totals = {(*self._labels(d), d.model or ""): d.total_bytes for d in devices if d.total_bytes is not None}
        yield _figures(metrics.DEVICE_MEMORY_TOTAL_BYTES, totals)
        problems = {self._labels(r.device): int(r.problem is not None) for r in view.readings if _has_nvml(r)}
        yield _figures(metrics.DEVICE_PROBLEM, problems)
        whose = {process.process_id: process for process in view.processes}
        lines = _Sums()
        for reading in view.readings:
            for entry in reading.bill.entries if reading.bill else ():
                owner = whose.get(entry.process_id or "")
                lines.add((*self._labels(reading.device), *_job_labels(owner), entry.line.value), entry.bytes)
        yield _figures(metrics.BILL_BYTES, lines)

    def _of_allocators(self, view: NodeView) -> Iterator[Family]:
        """Processes of one job that tell no ranks share a series."""
        devices = {reading.device.uuid: reading.device for reading in view.readings}
        sums = {metric: _Sums() for metric in _OF_SAMPLE}
        largest: dict[metrics.Metric, dict[tuple[str, ...], int]] = {metric: {} for metric in _OF_ALLOCATOR}
        for allocator in view.allocators:
            device = devices.get(allocator.device_uuid)
            if device is None:
                continue
            labels = (*self._labels(device), *_job_labels(allocator.process))
            for metric, name in _OF_SAMPLE.items():
                sums[metric].add(labels, getattr(allocator.sample, name))
            for metric, name in _OF_ALLOCATOR.items():
                if (figure := getattr(allocator, name)) is not None:
                    largest[metric][labels] = max(figure, largest[metric].get(labels, 0))
        for metric, figures in (*sums.items(), *largest.items()):
            yield _figures(metric, figures)

    def _labels(self, device: Device) -> tuple[str, str, str]:
        return (self._node, str(device.index), device.uuid)


_OF_SAMPLE = {
    metrics.RESERVED_BYTES: "reserved_bytes",
    metrics.ALLOCATED_BYTES: "allocated_bytes",
    metrics.ALLOC_RETRIES_TOTAL: "num_alloc_retries",
    metrics.OOMS_TOTAL: "num_ooms",
}
_OF_ALLOCATOR = {
    metrics.HEADROOM_BYTES: "headroom_bytes",
    metrics.LARGEST_FREE_BLOCK_BYTES: "largest_free_block_bytes",
}


class _Sums(dict[tuple[str, ...], int]):
    """Figures added up by their labels; what is not known is not there."""

    def add(self, labels: tuple[str, ...], figure: int | None) -> None:
        if figure is not None:
            self[labels] = self.get(labels, 0) + figure


def _job_labels(process: Process | None) -> tuple[str, str]:
    if process is None:
        return ("", "")
    return (process.job, "" if process.rank is None else str(process.rank))


def _has_nvml(reading: DeviceReading) -> bool:
    return reading.from_nvml or reading.problem is not None


def _figures(metric: metrics.Metric, figures: dict[Any, int]) -> Family:
    make = CounterMetricFamily if metric.kind is metrics.Kind.COUNTER else GaugeMetricFamily
    family = make(metric.name, metric.help, labels=metric.labels)
    for labels, figure in figures.items():
        family.add_metric(labels, figure)
    return family


class MetricsServer:
    """An HTTP server in threads of its own, a few at a time."""

    def __init__(self, address: str, registry: CollectorRegistry) -> None:
        """Takes the address; it answers once it is started."""
        self._host, _, port = address.rpartition(":")
        try:
            self._server = _new_server(self._host.strip("[]"), int(port))
        except OSError as error:
            raise ListenError(address, error.strerror or str(error)) from error
        self._server.set_app(make_wsgi_app(registry))
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True)

    @property
    def address(self) -> str:
        """HOST:PORT as bound."""
        return f"{self._host}:{self._server.server_port}"

    def reachable_address(self, host_name: str) -> str:
        """HOST:PORT for others: with the host's name where it listens on every interface."""
        everywhere = self._host in ("0.0.0.0", "[::]")
        return f"{host_name}:{self._server.server_port}" if everywhere else self.address

    def start(self) -> None:
        """Begin to answer."""
        self._thread.start()

    def close(self) -> None:
        """Answer no more."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()


class _Server(WSGIServer):
    """One thread a scrape, a few at a time."""

    daemon_threads = True

    def __init__(self, *arguments: Any) -> None:
        self._room = threading.BoundedSemaphore(MOST_SCRAPES)
        super().__init__(*arguments)

    def server_bind(self) -> None:
        """Without WSGIServer's look-up of the host's full name, which may wait for a DNS server."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a restart need not wait for TIME_WAIT
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        """In a thread, if there is room."""
        if not self._room.acquire(blocking=False):
            self.shutdown_request(request)
            return
        threading.Thread(target=self._answer, args=(request, client_address), daemon=True).start()

    def _answer(self, request: Any, client_address: Any) -> None:
        try:
            self.finish_request(request, client_address)
        except Exception:  # noqa: BLE001 (a client that went away in the middle)
            pass
        finally:
            self._room.release()
            with suppress(OSError):
                self.shutdown_request(request)


class _Handler(WSGIRequestHandler):
    timeout = SCRAPE_TIMEOUT_S

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 (its name there)
        """Scrapes are not logged."""


def _new_server(host: str, port: int) -> _Server:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET

    class Server(_Server):
        address_family = family

    return Server((host, port), _Handler)
