"""Advice; what devices are parts of, and which kind of problem they have.

Revision ID: 0003
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"

NUMBER = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def _words(name: str) -> sa.Column[str]:
    return sa.Column(name, sa.Text(), nullable=False)


def upgrade() -> None:
    with op.batch_alter_table("devices", recreate="always", table_kwargs={"sqlite_autoincrement": True}) as devices:
        devices.add_column(sa.Column("problem_kind", sa.Text(), nullable=True))
        devices.add_column(sa.Column("parent_uuid", sa.Text(), nullable=True))
    with op.batch_alter_table("alerts", recreate="always", table_kwargs={"sqlite_autoincrement": True}) as alerts:
        alerts.add_column(sa.Column("advice", sa.Text(), nullable=True))
    op.create_table(
        "advice",
        sa.Column("advice_number", NUMBER, primary_key=True, autoincrement=True, nullable=False),
        _words("capture_id"),
        _words("process_id"),
        _words("device_uuid"),
        _words("job"),
        sa.Column("rank", sa.BigInteger(), nullable=True),
        _words("node"),
        sa.Column("made_us", sa.BigInteger(), nullable=False),
        _words("kind"),
        sa.Column("advice", sa.JSON(), nullable=False),
        sa.UniqueConstraint("capture_id", "device_uuid", name="advice_capture_id_device_uuid"),
        sqlite_autoincrement=True,
    )
    op.create_index("advice_job", "advice", ["job", "advice_number"])
    op.create_table(
        "advice_claims",
        _words("capture_id"),
        _words("claimed_by"),
        sa.Column("until_us", sa.BigInteger(), nullable=False),
        sa.Column("tries", sa.BigInteger(), nullable=False),
        sa.Column("settled", sa.Boolean(), nullable=False),
        sa.PrimaryKeyConstraint("capture_id", name="advice_claims_key"),
    )
