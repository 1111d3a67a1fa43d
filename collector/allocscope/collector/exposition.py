"""/metrics: the fleet's and the forecast's families, made anew for each scrape; who is gone is not in them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.metadata import version

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from allocscope.alerts.rules import Subject
from allocscope.alerts.states import AlertState
from allocscope.collector.fleet import Fleet, Watched
from allocscope.collector.nodes import NodeState
from allocscope.model import Line, State, metrics


class FleetCollector(Collector):
    """What is followed now."""

    def __init__(self, fleet: Fleet, nodes: Callable[[], Sequence[NodeState]]) -> None:
        self._fleet, self._nodes = fleet, nodes

    def collect(self) -> Iterator[Metric]:
        """One scrape."""
        watched = list(self._fleet.watched.values())
        yield from allocator_families(watched)
        yield from (oom_family(self._fleet.ooms), *node_families(self._nodes(), self._fleet.heard_before))
        yield from fleet_families(self._fleet, watched)

    def describe(self) -> Iterable[Metric]:
        """Names without a scrape."""
        return ()


def _gauge(metric: metrics.Metric) -> GaugeMetricFamily:
    return GaugeMetricFamily(metric.name, metric.help, labels=metric.labels)


def allocator_families(watched: Sequence[Watched]) -> Iterator[Metric]:
    """What is foreseen of each allocator, and the counters that it is foreseen from."""
    state, margin = _gauge(metrics.FORECAST_STATE), _gauge(metrics.FORECAST_MARGIN_RATIO)
    seconds, cause = _gauge(metrics.FORECAST_SECONDS_TO_OOM), _gauge(metrics.FORECAST_CAUSE)
    request = _gauge(metrics.FORECAST_REQUEST_BYTES)
    headroom, largest = _gauge(metrics.HEADROOM_BYTES), _gauge(metrics.LARGEST_FREE_BLOCK_BYTES)
    reserved, allocated = _gauge(metrics.RESERVED_BYTES), _gauge(metrics.ALLOCATED_BYTES)
    retries, ooms = (
        CounterMetricFamily(m.name, m.help, labels=m.labels) for m in (metrics.ALLOC_RETRIES_TOTAL, metrics.OOMS_TOTAL)
    )
    for labels, one in sorted(_by_labels(watched).items()):
        forecast, sample = one.watch.forecast, one.sample
        figures: list[tuple[GaugeMetricFamily | CounterMetricFamily, float | None]] = [
            (largest, one.largest_free_block_bytes)
        ]
        if sample:
            figures += [
                (reserved, sample.reserved_bytes),
                (allocated, sample.allocated_bytes),
                (retries, sample.num_alloc_retries),
                (ooms, sample.num_ooms),
            ]
        if forecast:
            figures += [
                (state, forecast.state.level),
                (margin, forecast.margin_ratio),
                (seconds, forecast.seconds_to_oom),
                (headroom, forecast.headroom_bytes),
                (request, forecast.request_bytes),
            ]
            if forecast.cause:
                cause.add_metric([*labels, forecast.cause.value], 1)
        for family, value in figures:
            if value is not None:
                family.add_metric(labels, value)
    yield from (state, margin, seconds, cause, request, headroom, largest, reserved, allocated, retries, ooms)


def _by_labels(watched: Iterable[Watched]) -> dict[tuple[str, ...], Watched]:
    """A rank that was restarted, or that does not know its rank, may be there twice: the worse counts, then the newer."""
    return {_labels(one): one for one in sorted(watched, key=_weight)}


def _weight(one: Watched) -> tuple[int, int]:
    return one.watch.forecast.state.level if one.watch.forecast else -1, one.heard_us


def _labels(one: Watched) -> tuple[str, ...]:
    return _of_subject(one.watch.subject)


def _of_subject(subject: Subject) -> tuple[str, ...]:
    labels = subject.labels()
    return tuple(labels.get(name, "") for name in metrics.JOB_LABELS)


def oom_family(ooms: Mapping[Subject, int]) -> Metric:
    """Who ran out of memory lately. Of processes of one job that tell no ranks, the latest."""
    latest: dict[tuple[str, ...], int] = {}
    for subject, heard_us in list(ooms.items()):
        labels = _of_subject(subject)
        latest[labels] = max(heard_us, latest.get(labels, 0))
    family = _gauge(metrics.LAST_OOM_TIMESTAMP_SECONDS)
    for labels, heard_us in latest.items():
        family.add_metric(labels, heard_us / 1e6)
    return family


def node_families(nodes: Sequence[NodeState], heard_before: Mapping[str, int]) -> Iterator[Metric]:
    """Clocks and presence. `heard_before`: of nodes that were there before this process, and have not come back."""
    offset, seen = _gauge(metrics.NODE_CLOCK_OFFSET_SECONDS), _gauge(metrics.NODE_LAST_SEEN_TIMESTAMP_SECONDS)
    for state in nodes:
        if state.clock_offset_us is not None:
            offset.add_metric([state.hello.node], state.clock_offset_us / 1e6)
    for node, seen_us in {**heard_before, **{state.hello.node: state.last_seen_us for state in nodes}}.items():
        seen.add_metric([node], seen_us / 1e6)
    yield from (offset, seen)


def fleet_families(fleet: Fleet, watched: Sequence[Watched]) -> Iterator[Metric]:
    """Sums over everybody."""
    processes = _gauge(metrics.PROCESSES)
    processes.add_metric([], len({one.ref.process_id for one in watched}))
    states = Counter(one.watch.forecast.state for one in watched if one.watch.forecast)
    allocators = _gauge(metrics.FLEET_ALLOCATORS)
    for state in State:
        allocators.add_metric([state.value], states[state])
    bill, total = _gauge(metrics.FLEET_BILL_BYTES), _gauge(metrics.FLEET_DEVICE_MEMORY_TOTAL_BYTES)
    bills = [known.reading.bill for known in list(fleet.devices.values()) if known.reading.bill]
    lines = Counter[Line]()
    for one_bill in bills:
        for entry in one_bill.entries:
            lines[entry.line] += entry.bytes
    for line in Line:
        bill.add_metric([line.value], lines[line])
    total.add_metric([], sum(one_bill.total_bytes for one_bill in bills))
    firing = _gauge(metrics.ALERTS_FIRING)
    severities = Counter(a.condition.rule.severity.value for a in fleet.standing() if a.state is AlertState.FIRING)
    for severity in ("info", "warning", "critical"):
        firing.add_metric([severity], severities[severity])
    build = _gauge(metrics.BUILD_INFO)
    build.add_metric([version("allocscope")], 1)
    yield from (processes, allocators, bill, total, firing, build)
