"""How the collector's own loops and counters are reported: prometheus_client's, named and bucketed by the catalogue."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from allocscope.model import metrics


class Loop:
    """One loop or write: how long each round took, when one last went well, how often one failed."""

    def __init__(self, registry: CollectorRegistry, loop: str) -> None:
        seconds = metrics.BY_NAME[f"allocscope_{loop}_seconds"]
        success = metrics.BY_NAME[f"allocscope_{loop}_last_success_timestamp_seconds"]
        self._seconds = Histogram(seconds.name, seconds.help, buckets=metrics.DURATION_BUCKETS_S, registry=registry)
        self._last_success = Gauge(success.name, success.help, registry=registry)
        self._failures = counter(registry, metrics.BY_NAME[f"allocscope_{loop}_failures_total"])

    def took(self, seconds: float) -> None:
        """A round went well."""
        self._seconds.observe(seconds)
        self._last_success.set_to_current_time()

    def failed(self) -> None:
        """A round did not."""
        self._failures.inc()

    @contextmanager
    def round(self) -> Iterator[None]:
        """Around one round."""
        begun = time.monotonic()
        try:
            yield
        except BaseException:
            self.failed()
            raise
        self.took(time.monotonic() - begun)


def gauge(registry: CollectorRegistry, metric: metrics.Metric) -> Gauge:
    """A gauge of the catalogue."""
    return Gauge(metric.name, metric.help, metric.labels, registry=registry)


def counter(registry: CollectorRegistry, metric: metrics.Metric) -> Counter:
    """A counter of the catalogue."""
    return Counter(metric.name, metric.help, metric.labels, registry=registry)


class Observation:
    """All that the collector reports of itself."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.ingest = Loop(self.registry, "ingest")
        self.store = Loop(self.registry, "store")
        self.evaluate = Loop(self.registry, "evaluate")
        self.notify = Loop(self.registry, "notify")
        self.retention = Loop(self.registry, "retention")
        self.capture_keep = Loop(self.registry, "capture_keep")
        self.capture_orders = Loop(self.registry, "capture_orders")
        self.advice_loop = Loop(self.registry, "advice")
        self.samples = counter(self.registry, metrics.SAMPLES_INGESTED_TOTAL)
        self.rejected = counter(self.registry, metrics.SAMPLES_REJECTED_TOTAL)
        self.dropped = counter(self.registry, metrics.DROPPED_TOTAL)
        self.notifications = counter(self.registry, metrics.NOTIFICATIONS_TOTAL)
        self.captures = counter(self.registry, metrics.CAPTURES_TOTAL)
        self.captures_ordered = counter(self.registry, metrics.CAPTURES_ORDERED_TOTAL)
        self.captures_stored = gauge(self.registry, metrics.CAPTURES_STORED_BYTES)
        self.captures_limit = gauge(self.registry, metrics.CAPTURES_LIMIT_BYTES)
        self.advice = counter(self.registry, metrics.ADVICE_TOTAL)
        self.advice_failed = counter(self.registry, metrics.ADVICE_FAILED_TOTAL)
        self.advice_waiting = gauge(self.registry, metrics.ADVICE_WAITING)
