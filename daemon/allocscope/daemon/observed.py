"""What the daemon says of itself: durations of its loops, and what it refused and lost."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics

from allocscope.model.metrics import (
    BY_NAME,
    DROPPED_TOTAL,
    DURATION_BUCKETS_S,
    SAMPLES_INGESTED_TOTAL,
    SAMPLES_REJECTED_TOTAL,
    Metric,
)

disable_created_metrics()  # type: ignore[no-untyped-call]  # a series more for each, which nobody asks for

REASONS_TOLD = 64
"""Labels are bounded whatever a job or a collector says; further reasons count as "other"."""


class Loop:
    """A loop or a write that is watched."""

    def __init__(self, name: str, registry: CollectorRegistry) -> None:
        seconds, success, failures = (
            BY_NAME[f"allocscope_{name}_{what}"]
            for what in ("seconds", "last_success_timestamp_seconds", "failures_total")
        )
        self._seconds = Histogram(seconds.name, seconds.help, buckets=DURATION_BUCKETS_S, registry=registry)
        # Registered with the first success: until then there is no time to tell.
        self._new_success = partial(Gauge, success.name, success.help, registry=registry)
        self._success: Gauge | None = None
        self._telling = threading.Lock()
        self._failures = Counter(failures.name, failures.help, registry=registry)

    @contextmanager
    def round(self) -> Iterator[None]:
        """One round; an exception counts as a failure, and goes on."""
        began = time.perf_counter()
        try:
            yield
        except BaseException:
            self._failures.inc()
            raise
        self.took(time.perf_counter() - began)

    def took(self, seconds: float) -> None:
        """A round went well; from any thread."""
        self._seconds.observe(seconds)
        with self._telling:
            self._success = self._success or self._new_success()
            self._success.set_to_current_time()

    def failed(self) -> None:
        """A round did not."""
        self._failures.inc()


class Tally:
    """A counter by reasons that others may name."""

    def __init__(self, metric: Metric, registry: CollectorRegistry) -> None:
        self._counter = Counter(metric.name, metric.help, metric.labels, registry=registry)
        self._told: set[tuple[str, ...]] = set()

    def add(self, count: int, *labels: str) -> None:
        """Count `count` more of it."""
        if labels not in self._told:
            if len(self._told) >= REASONS_TOLD:
                labels = (*labels[:-1], "other")
            self._told.add(labels)
        self._counter.labels(*labels).inc(count)


class Observed:
    """All of it, on one registry."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.bill, self.nvml = Loop("bill", registry), Loop("nvml", registry)
        self.owners, self.kubelet = Loop("owners", registry), Loop("kubelet", registry)
        self.spool_write, self.uplink = Loop("spool_write", registry), Loop("uplink", registry)
        self.capture_intake, self.capture_pack = Loop("capture_intake", registry), Loop("capture_pack", registry)
        self.capture_uplink = Loop("capture_uplink", registry)
        self.ingested = Counter(SAMPLES_INGESTED_TOTAL.name, SAMPLES_INGESTED_TOTAL.help, registry=registry)
        self.rejected = Tally(SAMPLES_REJECTED_TOTAL, registry)
        self.dropped = Tally(DROPPED_TOTAL, registry)
