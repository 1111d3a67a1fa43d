"""Every metric that Allocscope exposes: what it is called, what it counts, and what it tells you.

The catalogue has one entry a name. /metrics of daemon and collector and the documentation come from it.
A family is gone when what it speaks of is gone; a figure that is not known is absent, never 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """A metric's type, as Prometheus has it."""

    GAUGE = "gauge"
    COUNTER = "counter"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric family."""

    name: str
    """As exposed; a counter's ends in _total."""
    kind: Kind
    labels: tuple[str, ...]
    unit: str
    """bytes, seconds, ratio, or "" for a count or a state."""
    help: str
    """What it tells you."""
    by: tuple[str, ...] = ("daemon", "collector")
    """Which processes expose it."""


DURATION_BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Of every histogram of a loop or a write."""

NODE_LABELS = ("node", "gpu", "uuid")
JOB_LABELS = (*NODE_LABELS, "job", "rank")
"""Labels are bounded: a device has few processes, and a job that is gone takes its series with it."""


def _gauge(name: str, labels: tuple[str, ...], unit: str, text: str, *by: str) -> Metric:
    return Metric(name, Kind.GAUGE, labels, unit, text, by or ("daemon", "collector"))


def _counter(name: str, labels: tuple[str, ...], unit: str, text: str, *by: str) -> Metric:
    return Metric(name, Kind.COUNTER, labels, unit, text, by or ("daemon", "collector"))


def _loop(loop: str, text: str, *by: str) -> tuple[Metric, ...]:
    """A loop or a write that reports on itself: how long it took, when it last went well, how often it did not."""
    return (
        Metric(f"allocscope_{loop}_seconds", Kind.HISTOGRAM, (), "seconds", f"How long {text} took.", by),
        _gauge(
            f"allocscope_{loop}_last_success_timestamp_seconds",
            (),
            "seconds",
            f"When {text} last went well, unix time; it stands still where something hangs or fails.",
            *by,
        ),
        _counter(f"allocscope_{loop}_failures_total", (), "", f"How often {text} failed.", *by),
    )


BILL_BYTES = _gauge(
    "allocscope_bill_bytes",
    (*JOB_LABELS, "line"),
    "bytes",
    "Where every byte of a device is: the lines of a device add up to allocscope_device_memory_total_bytes."
    " `stranded` is what fragmentation costs; `releasable` is cached and can be given back."
    " Lines of the device itself (free, driver, other_processes) have an empty job and rank.",
)
DEVICE_MEMORY_TOTAL_BYTES = _gauge(
    "allocscope_device_memory_total_bytes", (*NODE_LABELS, "model"), "bytes", "The device's memory."
)
HEADROOM_BYTES = _gauge(
    "allocscope_headroom_bytes",
    JOB_LABELS,
    "bytes",
    "The largest single request that would succeed now, after all that the allocator itself would try."
    " Much less than free + releasable + stranded: the free bytes lie in holes.",
)
LARGEST_FREE_BLOCK_BYTES = _gauge(
    "allocscope_largest_free_block_bytes",
    JOB_LABELS,
    "bytes",
    "The largest free block in the allocator's cache: what a request can get without asking the driver.",
)
RESERVED_BYTES = _gauge(
    "allocscope_reserved_bytes", JOB_LABELS, "bytes", "What the allocator got from the driver; all that NVML can see."
)
ALLOCATED_BYTES = _gauge(
    "allocscope_allocated_bytes", JOB_LABELS, "bytes", "What the program holds of it: blocks in its hands."
)
ALLOC_RETRIES_TOTAL = _counter(
    "allocscope_alloc_retries_total",
    JOB_LABELS,
    "",
    "How often the allocator gave its whole cache back and tried again. Each stalls the device; a rising rate says that"
    " the next refusal is near.",
)
OOMS_TOTAL = _counter(
    "allocscope_ooms_total",
    JOB_LABELS,
    "",
    "How many OutOfMemoryErrors were raised; the program may have caught them.",
)
LAST_OOM_TIMESTAMP_SECONDS = _gauge(
    "allocscope_last_oom_timestamp_seconds",
    JOB_LABELS,
    "seconds",
    "When an OutOfMemoryError was last heard of, unix time by the collector's clock. It stays for ten minutes, though the job"
    " ends by it, so that a scrape sees it; absent: none lately.",
    "collector",
)
FORECAST_STATE = _gauge(
    "allocscope_forecast_state",
    JOB_LABELS,
    "",
    "How near the allocator is to an OutOfMemoryError: 0 ok, 1 watch, 2 at risk, 3 critical.",
    "collector",
)
FORECAST_MARGIN_RATIO = _gauge(
    "allocscope_forecast_margin_ratio",
    JOB_LABELS,
    "ratio",
    "Headroom less the largest request that the job is known to make, as a part of the device; below 0: that request"
    " would fail now.",
    "collector",
)
FORECAST_REQUEST_BYTES = _gauge(
    "allocscope_forecast_request_bytes",
    JOB_LABELS,
    "bytes",
    "The largest request that the job is known to make again: what the headroom is held against.",
    "collector",
)
FORECAST_SECONDS_TO_OOM = _gauge(
    "allocscope_forecast_seconds_to_oom",
    JOB_LABELS,
    "seconds",
    "How long it will last, where a trend tells.",
    "collector",
)
FORECAST_CAUSE = _gauge(
    "allocscope_forecast_cause",
    (*JOB_LABELS, "cause"),
    "",
    "1 for the cause that the forecast names: fragmentation, leak, growth, capacity or neighbour.",
    "collector",
)

SAMPLES_INGESTED_TOTAL = _counter(
    "allocscope_samples_ingested_total",
    (),
    "",
    "Samples taken in: by a daemon from its jobs, by a collector into its database. Standing still while jobs run: look"
    " at rejected and dropped.",
)
SAMPLES_REJECTED_TOTAL = _counter(
    "allocscope_samples_rejected_total",
    ("reason",),
    "",
    "Samples, block maps and events that were refused because they say what cannot be; the log says whose.",
)
DROPPED_TOTAL = _counter(
    "allocscope_dropped_total",
    ("what", "reason"),
    "",
    "Data lost before it was stored: samples, block maps, events, whole batches or captures, and why.",
)
SPOOL_BYTES = _gauge(
    "allocscope_spool_bytes",
    (),
    "bytes",
    "What the daemon keeps on disk until the collector has it; it grows while the collector is away.",
    "daemon",
)
SPOOL_LIMIT_BYTES = _gauge(
    "allocscope_spool_limit_bytes",
    (),
    "bytes",
    "At which size the spool drops its oldest block maps, and then its oldest batches.",
    "daemon",
)
SPOOL_BATCHES = _gauge(
    "allocscope_spool_batches", (), "", "How many batches wait for the collector's acknowledgement.", "daemon"
)
CAPTURE_SPOOL_BYTES = _gauge(
    "allocscope_capture_spool_bytes",
    (),
    "bytes",
    "Captures, compressed, that the daemon keeps on disk until the collector has them.",
    "daemon",
)
CAPTURE_SPOOL_LIMIT_BYTES = _gauge(
    "allocscope_capture_spool_limit_bytes", (), "bytes", "At which size the oldest captures are dropped.", "daemon"
)
CAPTURE_SPOOL_CAPTURES = _gauge(
    "allocscope_capture_spool_captures", (), "", "How many captures wait for the collector.", "daemon"
)
PROCESSES = _gauge("allocscope_processes", (), "", "Processes with a probe that report now.")
PROCESSES_WITHOUT_PROBE = _gauge(
    "allocscope_processes_without_probe",
    NODE_LABELS,
    "",
    "Processes that use the device and have no probe, so that nothing is known of them but what NVML tells: their bytes are the"
    " bill's other_processes. Whose they are: `allocscope devices`. Absent where NVML does not tell a device's processes.",
    "daemon",
)
NVML_UP = _gauge(
    "allocscope_nvml_up",
    (),
    "",
    "1 while NVML answers, 0 while it does not: then driver, other processes and free are only what jobs know.",
    "daemon",
)
NVML_PROBLEM = _gauge(
    "allocscope_nvml_problem",
    ("kind",),
    "",
    "1 while NVML as a whole does not answer, with the kind of problem (no_library, no_driver, driver_mismatch, hangs,"
    " unknown, …; not_read: it is switched off). Gone when it is over; `allocscope doctor` says what to do.",
    "daemon",
)
DEVICE_PROBLEM = _gauge(
    "allocscope_device_problem",
    (*NODE_LABELS, "kind"),
    "",
    "1 while NVML does not tell all of this device, with the kind of problem (lost, hangs, not_supported, no_processes, …)."
    " Gone when it is over. Without a UUID: one that NVML could never name.",
    "daemon",
)
COLLECTOR_CONNECTED = _gauge(
    "allocscope_collector_connected", (), "", "1 while the daemon's stream to its collector is open.", "daemon"
)
NODE_CLOCK_OFFSET_SECONDS = _gauge(
    "allocscope_node_clock_offset_seconds",
    ("node",),
    "seconds",
    "How far a node's clock is ahead of the collector's, travel time included; minutes of it make graphs disagree.",
    "collector",
)
NODE_LAST_SEEN_TIMESTAMP_SECONDS = _gauge(
    "allocscope_node_last_seen_timestamp_seconds",
    ("node",),
    "seconds",
    "When a node last sent anything, unix time by the collector's clock; while the collector itself was away nobody is silent.",
    "collector",
)
FLEET_ALLOCATORS = _gauge(
    "allocscope_fleet_allocators",
    ("state",),
    "",
    "How many allocators the forecast sees in each state: the fleet's health in one look.",
    "collector",
)
FLEET_BILL_BYTES = _gauge(
    "allocscope_fleet_bill_bytes",
    ("line",),
    "bytes",
    "Where the fleet's bytes are: the bills of all devices, added up. `stranded` is what fragmentation costs the fleet.",
    "collector",
)
FLEET_DEVICE_MEMORY_TOTAL_BYTES = _gauge(
    "allocscope_fleet_device_memory_total_bytes",
    (),
    "bytes",
    "The memory of all devices that have a bill.",
    "collector",
)
ALERTS_FIRING = _gauge("allocscope_alerts_firing", ("severity",), "", "Alerts that stand now.", "collector")
NOTIFICATIONS_TOTAL = _counter(
    "allocscope_notifications_total",
    ("receiver", "outcome"),
    "",
    "Alerts handed to Alertmanager or a webhook: sent, retried, or given up.",
    "collector",
)
CAPTURES_TOTAL = _counter(
    "allocscope_captures_total",
    ("reason", "outcome"),
    "",
    "Captures by why they were taken (oom, asked, forecast) and what came of it: kept, failed (no snapshot came), or refused"
    " because it is damaged or too large; the log says whose.",
    "collector",
)
CAPTURES_ORDERED_TOTAL = _counter(
    "allocscope_captures_ordered_total",
    ("reason", "outcome"),
    "",
    "Captures that people or the forecast wanted: ordered, refused because as many were on order as may be, or given up"
    " because no answer came.",
    "collector",
)
CAPTURES_STORED_BYTES = _gauge(
    "allocscope_captures_stored_bytes", (), "bytes", "What the snapshots in the database take, compressed.", "collector"
)
CAPTURES_LIMIT_BYTES = _gauge(
    "allocscope_captures_limit_bytes", (), "bytes", "What they may take; beyond it the oldest are dropped.", "collector"
)
ADVICE_TOTAL = _counter(
    "allocscope_advice_total",
    ("kind",),
    "",
    "Captures that were replayed under other settings, by what came of it: setting, program, nothing (none helps), no_change, or"
    " unknown (no replay could be made, or it says nothing).",
    "collector",
)
ADVICE_FAILED_TOTAL = _counter(
    "allocscope_advice_failed_total",
    ("reason",),
    "",
    "Captures of which no replay could be made, by why: its time or memory was over (time, memory), the worker died (killed, crashed),"
    " the snapshot cannot be read or has no history (snapshot, no_history), is gone, the system has no room for it (system), or it was"
    " begun too often (given_up).",
    "collector",
)
ADVICE_WAITING = _gauge(
    "allocscope_advice_waiting", (), "", "Captures with a history that wait for their replay.", "collector"
)
BUILD_INFO = _gauge("allocscope_build_info", ("version",), "", "1, with the version that runs.")

_BILL = _loop("bill", "making the bills of a node's devices", "daemon")
_NVML = _loop("nvml", "reading one device by NVML", "daemon")
_OWNERS = _loop("owners", "a look at whose the processes are that are new on a device", "daemon")
_KUBELET = _loop("kubelet", "a question to the node's kubelet for the names of pods", "daemon")
_SPOOL_WRITE = _loop("spool_write", "writing a batch to the spool's disk, fsync included", "daemon")
_UPLINK = _loop("uplink", "a batch's way from the first send to the collector's acknowledgement", "daemon")
_CAPTURE_INTAKE = _loop("capture_intake", "a round of taking in what jobs left in the folder for captures", "daemon")
_CAPTURE_PACK = _loop("capture_pack", "keeping one capture in the spool, compressing included", "daemon")
_CAPTURE_UPLINK = _loop("capture_uplink", "one capture's way to the collector", "daemon")
_INGEST = _loop("ingest", "taking in a batch, from its arrival to its acknowledgement", "collector")
_STORE = _loop("store", "one transaction into the database", "collector")
_EVALUATE = _loop("evaluate", "a round of forecasts and alert rules", "collector")
_NOTIFY = _loop("notify", "delivering a round of alerts", "collector")
_CAPTURE_KEEP = _loop(
    "capture_keep", "taking in a capture, from its first word to its place in the database", "collector"
)
_CAPTURE_ORDERS = _loop("capture_orders", "a look for captures that are on order", "collector")
_ADVICE = _loop("advice", "replaying one capture and judging what would help", "collector")
_RETENTION = _loop("retention", "a round of roll-ups and deletions", "collector")

CATALOGUE: tuple[Metric, ...] = (
    BILL_BYTES,
    DEVICE_MEMORY_TOTAL_BYTES,
    HEADROOM_BYTES,
    LARGEST_FREE_BLOCK_BYTES,
    RESERVED_BYTES,
    ALLOCATED_BYTES,
    ALLOC_RETRIES_TOTAL,
    OOMS_TOTAL,
    LAST_OOM_TIMESTAMP_SECONDS,
    FORECAST_STATE,
    FORECAST_REQUEST_BYTES,
    FORECAST_MARGIN_RATIO,
    FORECAST_SECONDS_TO_OOM,
    FORECAST_CAUSE,
    SAMPLES_INGESTED_TOTAL,
    SAMPLES_REJECTED_TOTAL,
    DROPPED_TOTAL,
    SPOOL_BYTES,
    SPOOL_LIMIT_BYTES,
    SPOOL_BATCHES,
    CAPTURE_SPOOL_BYTES,
    CAPTURE_SPOOL_LIMIT_BYTES,
    CAPTURE_SPOOL_CAPTURES,
    PROCESSES,
    PROCESSES_WITHOUT_PROBE,
    NVML_UP,
    NVML_PROBLEM,
    DEVICE_PROBLEM,
    COLLECTOR_CONNECTED,
    NODE_CLOCK_OFFSET_SECONDS,
    NODE_LAST_SEEN_TIMESTAMP_SECONDS,
    FLEET_ALLOCATORS,
    FLEET_BILL_BYTES,
    FLEET_DEVICE_MEMORY_TOTAL_BYTES,
    ALERTS_FIRING,
    NOTIFICATIONS_TOTAL,
    CAPTURES_TOTAL,
    CAPTURES_ORDERED_TOTAL,
    CAPTURES_STORED_BYTES,
    CAPTURES_LIMIT_BYTES,
    ADVICE_TOTAL,
    ADVICE_FAILED_TOTAL,
    ADVICE_WAITING,
    BUILD_INFO,
    *_BILL,
    *_NVML,
    *_OWNERS,
    *_KUBELET,
    *_SPOOL_WRITE,
    *_UPLINK,
    *_CAPTURE_INTAKE,
    *_CAPTURE_PACK,
    *_CAPTURE_UPLINK,
    *_INGEST,
    *_STORE,
    *_EVALUATE,
    *_NOTIFY,
    *_CAPTURE_KEEP,
    *_CAPTURE_ORDERS,
    *_ADVICE,
    *_RETENTION,
)
BY_NAME = {metric.name: metric for metric in CATALOGUE}
