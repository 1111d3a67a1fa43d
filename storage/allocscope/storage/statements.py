"""Statements that the driver itself runs for many rows: SQLAlchemy writes their text once, and is not asked again for each row."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any

from sqlalchemy import Connection, Table, or_
from sqlalchemy.dialects import sqlite
from sqlalchemy.dialects.sqlite import Insert, insert


class RowInsert:
    """Inserts whole rows of a table, without the number that the database gives."""

    def __init__(self, statement: Insert) -> None:
        given = [c.name for c in statement.table.c if c.autoincrement is not True]
        compiled = statement.compile(dialect=sqlite.dialect(paramstyle="qmark"), column_keys=given)
        self.text = str(compiled)
        self.columns: tuple[str, ...] = tuple(given)
        self._figures = itemgetter(*given)

    def run(self, connection: Connection, rows: Iterable[Sequence[Any]]) -> int:
        """Rows as tuples in the order of `columns`; gives how many were inserted or changed."""
        return many(connection, self.text, rows)

    def run_named(self, connection: Connection, rows: Iterable[Mapping[str, Any]]) -> int:
        """Rows by their columns' names."""
        return self.run(connection, map(self._figures, rows))


def many(connection: Connection, text: str, rows: Iterable[Sequence[Any]]) -> int:
    """The driver's executemany within the connection's transaction; gives how many rows it changed."""
    cursor: Any = connection.connection.cursor()
    try:
        cursor.executemany(text, rows)
        return max(int(cursor.rowcount), 0)  # -1 where there were no rows
    finally:
        cursor.close()


def keeping_first(table: Table) -> RowInsert:
    """Insert; what is there already stays."""
    return RowInsert(insert(table).on_conflict_do_nothing())


def keeping_latest(table: Table, key: str) -> RowInsert:
    """Insert, or replace what is not from a later batch of the same daemon; numbers and first times stay."""
    statement = insert(table)
    new, old = statement.excluded, table.c
    kept = {key, "first_received_us", *(c.name for c in table.primary_key)}
    return RowInsert(
        statement.on_conflict_do_update(
            index_elements=[key],
            set_={c.name: new[c.name] for c in table.c if c.name not in kept},
            where=or_(new.daemon_id != old.daemon_id, new.batch_sequence >= old.batch_sequence),
        )
    )
