"""An engine as the SQL backends use it: transactions whose errors are in our words, rows as values, lists in pages."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from sqlalchemy import Column, Connection, Engine

from allocscope.storage import queries
from allocscope.storage.cursors import cursor_at, key_at
from allocscope.storage.errors import Unstorable
from allocscope.storage.records import Page
from allocscope.storage.sqlite import translated
from allocscope.storage.sqlite import writing as write_transaction

Item = TypeVar("Item")


class Database:
    """One engine, whose schema is the newest."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._writer = threading.Lock()
        """This process's writers wait here, where waking up costs nothing, and other processes' at the database."""

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """A transaction that only reads."""
        with translated(), self._engine.begin() as connection:
            yield connection

    @contextmanager
    def writing(self) -> Iterator[Connection]:
        """A transaction that writes; one at a time."""
        try:
            with self._writer, translated(), write_transaction(self._engine) as connection:
                yield connection
        except (ValueError, OverflowError) as error:  # ragged columns, text that is no text, a figure that is too large
            raise Unstorable(str(error)) from error

    def one(self, query: queries.Query, read: Callable[[Any], Item]) -> Item | None:
        """The one row of a query as a value; None: there is none."""
        with self.reading() as connection:
            row = connection.execute(query).mappings().one_or_none()
        return None if row is None else read(row)

    def page(
        self,
        query: queries.Query,
        number: Column[Any],
        read: Callable[[Any], Item],
        cursor: str | None,
        limit: int,
        *,
        newest_first: bool = True,
    ) -> Page[Item]:
        """A page of a list; see `page_of`."""
        with self.reading() as connection:
            return page_of(connection, query, number, read, cursor, limit, newest_first=newest_first)

    def close(self) -> None:
        """Give all connections back."""
        self._engine.dispose()


def page_of(
    connection: Connection,
    query: queries.Query,
    number: Column[Any],
    read: Callable[[Any], Item],
    cursor: str | None,
    limit: int,
    *,
    newest_first: bool = True,
) -> Page[Item]:
    """A page of a list in the order of a column of numbers, which the query selects."""
    listed = f"{number.table.name}"
    if cursor is not None:
        key = key_at(cursor, listed, int)
        query = query.where(number < key if newest_first else number > key)
    query = query.order_by(number.desc() if newest_first else number).limit(limit + 1)
    rows = connection.execute(query).mappings().all()
    more = cursor_at(listed, rows[limit - 1][number.name]) if len(rows) > limit else None
    return Page(tuple(read(row) for row in rows[:limit]), more)
