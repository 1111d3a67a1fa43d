"""/metrics: the node's bills and the daemon's own health, from one frozen view that each round replaces."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

from allocscope.daemon.nvml import SWITCHED_OFF, NvmlRound
from allocscope.daemon.nvml_device import NvmlDevice
from allocscope.model import metrics
from allocscope.model.identity import Device, Process
from allocscope.model.node import DeviceReading
from allocscope.model.sample import Sample


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
    nvml: NvmlRound = SWITCHED_OFF
    connected: bool = False
    spool_bytes: int = 0
    spool_limit_bytes: int = 0
    spool_batches: int = 0
    capture_spool_bytes: int = 0
    capture_spool_limit_bytes: int = 0
    capture_spool_captures: int = 0


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
        yield _figures(metrics.NVML_UP, {(): int(view.nvml.problem is None)})
        yield _figures(metrics.NVML_PROBLEM, {(p.kind,): 1 for p in (view.nvml.problem,) if p})
        yield _figures(metrics.COLLECTOR_CONNECTED, {(): int(view.connected)})
        yield _figures(metrics.SPOOL_BYTES, {(): view.spool_bytes})
        yield _figures(metrics.SPOOL_LIMIT_BYTES, {(): view.spool_limit_bytes})
        yield _figures(metrics.SPOOL_BATCHES, {(): view.spool_batches})
        yield _figures(metrics.CAPTURE_SPOOL_BYTES, {(): view.capture_spool_bytes})
        yield _figures(metrics.CAPTURE_SPOOL_LIMIT_BYTES, {(): view.capture_spool_limit_bytes})
        yield _figures(metrics.CAPTURE_SPOOL_CAPTURES, {(): view.capture_spool_captures})
        yield from self._of_devices(view)
        yield from self._of_allocators(view)

    def _of_devices(self, view: NodeView) -> Iterator[Family]:
        devices = [reading.device for reading in view.readings]
        totals = {(*self._labels(d), d.model or ""): d.total_bytes for d in devices if d.total_bytes is not None}
        yield _figures(metrics.DEVICE_MEMORY_TOTAL_BYTES, totals)
        problems = [(device, device.problem) for device in view.nvml.devices if device.problem]
        yield _figures(metrics.DEVICE_PROBLEM, {(*self._labels(d), problem.kind): 1 for d, problem in problems})
        told = {device.uuid for device in view.nvml.devices if device.processes is not None}
        yield _figures(
            metrics.PROCESSES_WITHOUT_PROBE,
            {
                self._labels(reading.device): sum(1 for process in reading.processes if process.process_id is None)
                for reading in view.readings
                if reading.device.uuid in told
            },
        )
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

    def _labels(self, device: Device | NvmlDevice) -> tuple[str, str, str]:
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


def _figures(metric: metrics.Metric, figures: dict[Any, int]) -> Family:
    make = CounterMetricFamily if metric.kind is metrics.Kind.COUNTER else GaugeMetricFamily
    family = make(metric.name, metric.help, labels=metric.labels)
    for labels, figure in figures.items():
        family.add_metric(labels, figure)
    return family
