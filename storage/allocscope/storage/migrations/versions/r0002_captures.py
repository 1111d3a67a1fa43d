"""Captures.

Revision ID: 0002
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"

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
        "captures",
        _number("capture_number"),
        _words("capture_id"),
        _words("process_id"),
        _words("job"),
        _figure("rank"),
        _words("node"),
        _maybe_words("device_uuid"),
        _words("reason"),
        _words("state"),
        sa.Column("tensors", sa.Boolean(), nullable=False),
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
        sa.UniqueConstraint("capture_id", name="captures_capture_id"),
        sqlite_autoincrement=True,
    )
    op.create_index("captures_job", "captures", ["job", "capture_number"])
    op.create_index("captures_process", "captures", ["process_id", "capture_number"])
    op.create_index("captures_state", "captures", ["state", "capture_number"])
    op.create_table(
        "capture_uploads",
        _number("upload_number"),
        _words("capture_id"),
        _known("touched_us"),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "capture_pieces",
        _known("upload_number"),
        _known("piece_number"),
        sa.Column("content", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("upload_number", "piece_number", name="capture_pieces_key"),
    )
