"""Brings a database's schema up to the newest revision. Alembic is slow to import, so only what needs it imports this."""

from __future__ import annotations

from pathlib import Path

from alembic import command
from alembic.config import Config
from sqlalchemy import Connection

MIGRATIONS = Path(__file__).parent / "migrations"


def alembic_config(connection: Connection | None = None) -> Config:
    """Where the revisions lie."""
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    config.attributes["connection"] = connection
    return config


def upgrade(connection: Connection, to: str = "head") -> None:
    """Upgrade within the connection's transaction: all of it, or nothing."""
    command.upgrade(alembic_config(connection), to)
