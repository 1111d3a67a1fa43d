"""The first tables.

Revision ID: 0001
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None

NUMBER = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def _number(name: str) -> sa.Column[int]:
    return sa.Column(name, NUMBER, primary_key=True, autoincrement=True, nullable=False)


def _figure(name: str) -> sa.Column[int]:
    return sa.Column(name, sa.BigInteger(), nullable=True)


def _known(name: str) -> sa.Column[int]:
    return sa.Column(name, sa.BigInteger(), nullable=False)


def _words(name: str) -> sa.Column[str]:
    return sa.Column(name, sa.Text(), nullable=False)


def _maybe_words(name: str) -> sa.Column[str]:
    return sa.Column(name, sa.Text(), nullable=True)


def upgrade() -> None:
    op.create_table(
        "nodes",
        _words("node"),
        _words("daemon_id"),
        _words("version"),
        _maybe_words("metrics_address"),
        _known("first_received_us"),
        _known("last_received_us"),
        sa.PrimaryKeyConstraint("node", name="nodes_key"),
    )
    op.create_table(
        "daemons",
        _words("node"),
        _words("daemon_id"),
        _known("acknowledged_sequence"),
        _known("closed_us"),
        _known("received_us"),
        sa.PrimaryKeyConstraint("node", "daemon_id", name="daemons_key"),
    )
    op.create_table(
        "jobs",
        _number("job_number"),
        _words("job"),
        _known("first_received_us"),
        sa.UniqueConstraint("job", name="jobs_job"),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "processes",
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
        sa.Column("devices", sa.JSON(), nullable=False),
        _words("node"),
        _words("daemon_id"),
        _known("batch_sequence"),
        _known("first_received_us"),
        _known("last_received_us"),
        sa.UniqueConstraint("process_id", name="processes_process_id"),
        sqlite_autoincrement=True,
    )
    op.create_index("processes_job", "processes", ["job", "process_number"])
    op.create_index("processes_node", "processes", ["node", "process_number"])
    op.create_table(
        "devices",
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
        sa.Column("from_nvml", sa.Boolean(), nullable=False),
        _figure("free_bytes"),
        _figure("driver_bytes"),
        sa.Column("processes", sa.JSON(), nullable=False),
        sa.Column("bill", sa.JSON(), nullable=True),
        _maybe_words("problem"),
        sa.UniqueConstraint("uuid", name="devices_uuid"),
        sqlite_autoincrement=True,
    )
    op.create_index("devices_node", "devices", ["node", "device_number"])
    op.create_table(
        "allocators",
        _number("allocator_id"),
        _words("process_id"),
        _words("device_uuid"),
        sa.UniqueConstraint("process_id", "device_uuid", name="allocators_process_id_device_uuid"),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "samples",
        _known("allocator_id"),
        _known("sequence"),
        _known("time_us"),
        _known("received_us"),
        *map(
            _figure,
            [
                "allocated_bytes",
                "active_bytes",
                "requested_bytes",
                "reserved_bytes",
                "inactive_split_bytes",
                "allocated_peak_bytes",
                "active_peak_bytes",
                "requested_peak_bytes",
                "reserved_peak_bytes",
                "allocation_count",
                "active_count",
                "segment_count",
                "inactive_split_count",
                "allocations_total",
                "allocated_bytes_total",
                "num_alloc_retries",
                "num_ooms",
                "num_device_alloc",
                "num_device_free",
                "num_sync_all_streams",
                "private_pools_reserved_bytes",
                "device_total_bytes",
                "device_free_bytes",
                "process_used_bytes",
                "call_us",
            ],
        ),
        sa.PrimaryKeyConstraint("allocator_id", "sequence", name="samples_key"),
        sqlite_with_rowid=False,
    )
    op.create_index("samples_time", "samples", ["allocator_id", "time_us"])
    op.create_table(
        "block_maps",
        _known("allocator_id"),
        _known("sequence"),
        _known("time_us"),
        _known("received_us"),
        *map(
            _figure,
            [
                "call_us",
                "reserved_bytes",
                "allocated_bytes",
                "requested_bytes",
                "rounding_bytes",
                "awaiting_free_bytes",
                "stranded_bytes",
                "releasable_bytes",
                "private_bytes",
                "largest_free_block_bytes",
            ],
        ),
        sa.Column("groups", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("allocator_id", "sequence", name="block_maps_key"),
    )
    op.create_index("block_maps_time", "block_maps", ["allocator_id", "time_us"])
    op.create_table(
        "bills",
        _known("allocator_id"),
        _known("time_us"),
        _known("received_us"),
        *map(
            _figure,
            [
                "requested_bytes",
                "rounding_bytes",
                "awaiting_free_bytes",
                "stranded_bytes",
                "releasable_bytes",
                "private_bytes",
                "outside_bytes",
                "other_processes_bytes",
                "driver_bytes",
                "free_bytes",
            ],
        ),
        _words("inexact"),
        sa.PrimaryKeyConstraint("allocator_id", "time_us", name="bills_key"),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "events",
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
        sa.UniqueConstraint("process_id", "sequence", name="events_process_id_sequence"),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "forecasts",
        sa.Column("allocator_id", NUMBER, nullable=False, autoincrement=False),
        _known("time_us"),
        _known("made_us"),
        _words("state"),
        _maybe_words("cause"),
        _figure("headroom_bytes"),
        _figure("request_bytes"),
        sa.Column("margin_ratio", sa.Float(), nullable=True),
        sa.Column("seconds_to_oom", sa.Float(), nullable=True),
        _words("summary"),
        sa.PrimaryKeyConstraint("allocator_id", name="forecasts_key"),
    )
    op.create_table(
        "forecast_changes",
        _number("change_number"),
        _known("allocator_id"),
        _known("time_us"),
        _known("made_us"),
        _words("state"),
        _maybe_words("cause"),
        _figure("headroom_bytes"),
        _figure("request_bytes"),
        sa.Column("margin_ratio", sa.Float(), nullable=True),
        sa.Column("seconds_to_oom", sa.Float(), nullable=True),
        _words("summary"),
        sqlite_autoincrement=True,
    )
    op.create_index("forecast_changes_allocator", "forecast_changes", ["allocator_id", "change_number"])
    op.create_table(
        "alerts",
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
        sa.Column("labels", sa.JSON(), nullable=False),
        _words("summary"),
        _words("description"),
        sa.UniqueConstraint("alert_id", name="alerts_alert_id"),
        sqlite_autoincrement=True,
    )
    op.create_index("alerts_job", "alerts", ["job", "alert_number"])
    op.create_index("alerts_state", "alerts", ["state", "alert_number"])
