"""The tables, as the newest migration leaves them. A column has the name of the field that it keeps.

Figures are signed 64-bit integers, NULL where not known; enums are kept by value, lists as JSON text, both readable in SQL.
Numbers (`job_number`, …) are given in the order of arrival and never again; lists are ordered by them.
"""

from __future__ import annotations

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Float,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    PrimaryKeyConstraint,
    Table,
    Text,
    UniqueConstraint,
)

from allocscope.model import COLUMNS, Line

HEAD = "0003"
"""The newest revision."""
REVISIONS = ("0001", "0002", "0003")
"""All of them, oldest first."""

metadata = MetaData()

NUMBER = BigInteger().with_variant(Integer, "sqlite")
"""SQLite counts up only what is called INTEGER."""
JSON_OR_NULL = JSON(none_as_null=True)


def _number(name: str) -> Column[int]:
    return Column(name, NUMBER, primary_key=True, autoincrement=True)


def _figure(name: str) -> Column[int | None]:
    return Column(name, BigInteger, nullable=True)


def _known(name: str) -> Column[int]:
    return Column(name, BigInteger, nullable=False)


def _words(name: str) -> Column[str]:
    return Column(name, Text, nullable=False)


def _maybe_words(name: str) -> Column[str | None]:
    return Column(name, Text, nullable=True)


nodes = Table(
    "nodes",
    metadata,
    _words("node"),
    _words("daemon_id"),
    _words("version"),
    _maybe_words("metrics_address"),
    _known("first_received_us"),
    _known("last_received_us"),
    PrimaryKeyConstraint("node", name="nodes_key"),
)

daemons = Table(
    "daemons",
    metadata,
    _words("node"),
    _words("daemon_id"),
    _known("acknowledged_sequence"),
    _known("closed_us"),
    _known("received_us"),
    PrimaryKeyConstraint("node", "daemon_id", name="daemons_key"),
)

jobs = Table(
    "jobs",
    metadata,
    _number("job_number"),
    _words("job"),
    _known("first_received_us"),
    UniqueConstraint("job", name="jobs_job"),
    sqlite_autoincrement=True,
)

processes = Table(
    "processes",
    metadata,
    _number("process_number"),
    _words("process_id"),
    _words("job"),
    _figure("rank"),
    _figure("world_size"),
    _figure("local_rank"),
    _known("pid"),
    _words("host"),
    _known("started_us"),
    _maybe_words("torch_version"),
    _maybe_words("allocator_conf"),
    _maybe_words("program"),
    Column("devices", JSON, nullable=False),
    _words("node"),
    _words("daemon_id"),
    _known("batch_sequence"),
    _known("first_received_us"),
    _known("last_received_us"),
    UniqueConstraint("process_id", name="processes_process_id"),
    Index("processes_job", "job", "process_number"),
    Index("processes_node", "node", "process_number"),
    sqlite_autoincrement=True,
)

devices = Table(
    "devices",
    metadata,
    _number("device_number"),
    _words("uuid"),
    _known("index"),
    _maybe_words("model"),
    _figure("total_bytes"),
    _figure("allowed_bytes"),
    _words("node"),
    _words("daemon_id"),
    _known("batch_sequence"),
    _known("time_us"),
    _known("received_us"),
    Column("from_nvml", Boolean, nullable=False),
    _figure("free_bytes"),
    _figure("driver_bytes"),
    Column("processes", JSON, nullable=False),
    Column("bill", JSON_OR_NULL, nullable=True),
    _maybe_words("problem"),
    _maybe_words("problem_kind"),
    _maybe_words("parent_uuid"),
    UniqueConstraint("uuid", name="devices_uuid"),
    Index("devices_node", "node", "device_number"),
    sqlite_autoincrement=True,
)
"""With the latest reading of each; what was read before lives on in `bills`."""

allocators = Table(
    "allocators",
    metadata,
    _number("allocator_id"),
    _words("process_id"),
    _words("device_uuid"),
    UniqueConstraint("process_id", "device_uuid", name="allocators_process_id_device_uuid"),
    sqlite_autoincrement=True,
)
"""Small numbers for long names. process_id "": the device's own lines of the bill."""

samples = Table(
    "samples",
    metadata,
    _known("allocator_id"),
    _known("sequence"),
    _known("time_us"),
    _known("received_us"),
    *(_figure(name) for name in COLUMNS),
    PrimaryKeyConstraint("allocator_id", "sequence", name="samples_key"),
    Index("samples_time", "allocator_id", "time_us"),
    sqlite_with_rowid=False,
)

MAP_SUMS = (
    "reserved_bytes",
    "allocated_bytes",
    "requested_bytes",
    "rounding_bytes",
    "awaiting_free_bytes",
    "stranded_bytes",
    "releasable_bytes",
    "private_bytes",
)
"""Sums over a block map's groups."""

block_maps = Table(
    "block_maps",
    metadata,
    _known("allocator_id"),
    _known("sequence"),
    _known("time_us"),
    _known("received_us"),
    _figure("call_us"),
    *(_figure(name) for name in MAP_SUMS),
    _figure("largest_free_block_bytes"),
    Column("groups", JSON, nullable=False),
    PrimaryKeyConstraint("allocator_id", "sequence", name="block_maps_key"),
    Index("block_maps_time", "allocator_id", "time_us"),
)

LINES = tuple(f"{line.value}_bytes" for line in Line)

bills = Table(
    "bills",
    metadata,
    _known("allocator_id"),
    _known("time_us"),
    _known("received_us"),
    *(_figure(name) for name in LINES),
    _words("inexact"),
    PrimaryKeyConstraint("allocator_id", "time_us", name="bills_key"),
    sqlite_with_rowid=False,
)
"""A process's lines of its device's bill, or the device's own; `inexact` names those that are not exact, by commas."""

events = Table(
    "events",
    metadata,
    _number("event_number"),
    _words("process_id"),
    _known("sequence"),
    _known("time_us"),
    _known("received_us"),
    _words("kind"),
    _maybe_words("device_uuid"),
    _figure("requested_bytes"),
    _figure("device_total_bytes"),
    _figure("device_free_bytes"),
    _figure("dropped_count"),
    _maybe_words("message"),
    UniqueConstraint("process_id", "sequence", name="events_process_id_sequence"),
    sqlite_autoincrement=True,
)


def _forecast_columns() -> tuple[
    Column[int] | Column[str] | Column[int | None] | Column[str | None] | Column[float], ...
]:
    return (
        _known("time_us"),
        _known("made_us"),
        _words("state"),
        _maybe_words("cause"),
        _figure("headroom_bytes"),
        _figure("request_bytes"),
        Column("margin_ratio", Float, nullable=True),
        Column("seconds_to_oom", Float, nullable=True),
        _words("summary"),
    )


forecasts = Table(
    "forecasts",
    metadata,
    Column("allocator_id", NUMBER, nullable=False, autoincrement=False),
    *_forecast_columns(),
    PrimaryKeyConstraint("allocator_id", name="forecasts_key"),
)

forecast_changes = Table(
    "forecast_changes",
    metadata,
    _number("change_number"),
    _known("allocator_id"),
    *_forecast_columns(),
    Index("forecast_changes_allocator", "allocator_id", "change_number"),
    sqlite_autoincrement=True,
)

alerts = Table(
    "alerts",
    metadata,
    _number("alert_number"),
    _words("alert_id"),
    _words("name"),
    _words("severity"),
    _words("state"),
    _known("at_us"),
    _known("updated_us"),
    _figure("resolved_us"),
    _maybe_words("cause"),
    _maybe_words("job"),
    Column("labels", JSON, nullable=False),
    _words("summary"),
    _words("description"),
    _maybe_words("advice"),
    UniqueConstraint("alert_id", name="alerts_alert_id"),
    Index("alerts_job", "job", "alert_number"),
    Index("alerts_state", "state", "alert_number"),
    sqlite_autoincrement=True,
)

captures = Table(
    "captures",
    metadata,
    _number("capture_number"),
    _words("capture_id"),
    _words("process_id"),
    _words("job"),
    _figure("rank"),
    _words("node"),
    _maybe_words("device_uuid"),
    _words("reason"),
    _words("state"),
    Column("tensors", Boolean, nullable=False),
    _figure("history_us"),
    _figure("most_history_entries"),
    _figure("ordered_us"),
    _figure("sent_us"),
    _figure("time_us"),
    _figure("received_us"),
    _figure("snapshot_bytes"),
    _figure("history_entries"),
    _figure("stored_bytes"),
    _figure("upload_number"),
    _maybe_words("problem"),
    UniqueConstraint("capture_id", name="captures_capture_id"),
    Index("captures_job", "job", "capture_number"),
    Index("captures_process", "process_id", "capture_number"),
    Index("captures_state", "state", "capture_number"),
    sqlite_autoincrement=True,
)
"""`upload_number`: whose pieces are the snapshot, NULL where there is none."""

capture_uploads = Table(
    "capture_uploads",
    metadata,
    _number("upload_number"),
    _words("capture_id"),
    _known("touched_us"),
    sqlite_autoincrement=True,
)
"""Those under way, and those whose pieces go (touched at 0): what is kept is in `captures`."""

capture_pieces = Table(
    "capture_pieces",
    metadata,
    _known("upload_number"),
    _known("piece_number"),
    Column("content", LargeBinary, nullable=False),
    PrimaryKeyConstraint("upload_number", "piece_number", name="capture_pieces_key"),
)
"""Snapshots as one gzip stream, cut into pieces that are numbered from 0."""

advice = Table(
    "advice",
    metadata,
    _number("advice_number"),
    _words("capture_id"),
    _words("process_id"),
    _words("device_uuid"),
    _words("job"),
    _figure("rank"),
    _words("node"),
    _known("made_us"),
    _words("kind"),
    Column("advice", JSON, nullable=False),
    UniqueConstraint("capture_id", "device_uuid", name="advice_capture_id_device_uuid"),
    Index("advice_job", "job", "advice_number"),
    sqlite_autoincrement=True,
)
"""What a replay of a capture's history says of one device; `advice` is the whole of it."""

advice_claims = Table(
    "advice_claims",
    metadata,
    _words("capture_id"),
    _words("claimed_by"),
    _known("until_us"),
    _known("tries"),
    Column("settled", Boolean, nullable=False),
    PrimaryKeyConstraint("capture_id", name="advice_claims_key"),
)
"""Captures that somebody works on, until then, or has done with."""
