"""Advice over SQLAlchemy Core. The promises are AdviceStore's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, Select, delete, func, or_, select, update
from sqlalchemy.dialects.sqlite import insert

from allocscope.model.advice_plain import advice_of_plain, advice_to_plain
from allocscope.storage import schema
from allocscope.storage.advice import AdviceClaim, AdviceRecord
from allocscope.storage.captures import CaptureRecord, CaptureState
from allocscope.storage.database import Database
from allocscope.storage.records import Page
from allocscope.storage.rows import Row
from allocscope.storage.sql_captures import capture_record

_advice, _claims, _captures = schema.advice.c, schema.advice_claims.c, schema.captures.c
LOOKED_THROUGH = 1000
"""Captures that wait, the newest: of more the older ones have to."""


class SqlAdvice:
    """An AdviceStore in a database."""

    def __init__(self, database: Database) -> None:
        self._database = database

    # claims

    def claim(self, by: str, *, now_us: int, until_us: int, received_since_us: int) -> AdviceClaim | None:
        query = _waiting(now_us, received_since_us)
        with self._database.reading() as connection:
            if connection.execute(query.limit(1)).first() is None:
                return None  # as nearly always: nobody who writes has to wait for the question
        with self._database.writing() as connection:
            row = _next(connection, query)
            if row is None:
                return None
            statement = insert(schema.advice_claims)
            claimed = {"claimed_by": by, "until_us": until_us, "tries": row["tries"] + 1, "settled": False}
            statement = statement.values(capture_id=row["capture_id"], **claimed)
            connection.execute(statement.on_conflict_do_update(index_elements=["capture_id"], set_=claimed))
        return AdviceClaim(capture_record(row), row["tries"] + 1)

    def renew(self, capture_id: str, by: str, *, until_us: int) -> bool:
        with self._database.writing() as connection:
            return connection.execute(_update_own(capture_id, by).values(until_us=until_us)).rowcount > 0

    def release(self, capture_id: str, by: str) -> None:
        given_back = _update_own(capture_id, by).values(until_us=0, tries=_claims.tries - 1)
        with self._database.writing() as connection:
            connection.execute(given_back)

    def settle(self, capture_id: str, by: str, records: Sequence[AdviceRecord]) -> bool:
        with self._database.writing() as connection:
            if connection.execute(_update_own(capture_id, by).values(settled=True)).rowcount == 0:
                return False
            if records:
                statement = insert(schema.advice).on_conflict_do_nothing(index_elements=["capture_id", "device_uuid"])
                connection.execute(statement, [_row(record) for record in records])
        return True

    # questions

    def waiting(self, *, now_us: int, received_since_us: int) -> int:
        query = select(func.count()).select_from(_waiting(now_us, received_since_us).subquery())
        with self._database.reading() as connection:
            return int(connection.execute(query).scalar_one())

    def unsettled(self, job: str, *, received_since_us: int, limit: int = 100) -> tuple[CaptureRecord, ...]:
        query = _unsettled(received_since_us).where(_captures.job == job).limit(limit)
        with self._database.reading() as connection:
            return tuple(map(capture_record, connection.execute(query).mappings()))

    def page(
        self,
        *,
        job: str | None = None,
        rank: int | None = None,
        device_uuid: str | None = None,
        process_id: str | None = None,
        capture_id: str | None = None,
        cursor: str | None = None,
        limit: int = 100,
    ) -> Page[AdviceRecord]:
        query = select(schema.advice)
        wanted = (
            (_advice.job, job),
            (_advice.rank, rank),
            (_advice.device_uuid, device_uuid),
            (_advice.process_id, process_id),
            (_advice.capture_id, capture_id),
        )
        for column, value in wanted:
            if value is not None:
                query = query.where(column == value)
        return self._database.page(query, _advice.advice_number, _record, cursor, limit)

    # the storage itself

    def prune(self, *, before_us: int) -> int:
        kept = select(_captures.capture_id).where(_captures.state == CaptureState.KEPT.value)
        with self._database.writing() as connection:
            connection.execute(delete(schema.advice_claims).where(_claims.capture_id.not_in(kept)))
            return connection.execute(delete(schema.advice).where(_advice.made_us < before_us)).rowcount


def _waiting(now_us: int, received_since_us: int) -> Select[Any]:
    """Captures to work on, the newest first."""
    nobodys = or_(_claims.capture_id.is_(None), _claims.until_us <= now_us)
    return _unsettled(received_since_us).where(nobodys).limit(LOOKED_THROUGH)


def _unsettled(received_since_us: int) -> Select[Any]:
    query = select(schema.captures, func.coalesce(_claims.tries, 0).label("tries"))
    query = query.outerjoin(schema.advice_claims, _claims.capture_id == _captures.capture_id)
    query = query.where(
        _captures.state == CaptureState.KEPT.value,
        _captures.history_entries > 0,
        _captures.received_us >= received_since_us,
        or_(_claims.capture_id.is_(None), _claims.settled.is_(False)),
    )
    return query.order_by(_captures.received_us.desc(), _captures.capture_number.desc())


def _next(connection: Connection, query: Select[Any]) -> Row | None:
    """Of each job the newest: what it does now. Of those the one that waited longest, so that no job holds up the others."""
    newest: dict[str, Row] = {}
    for row in connection.execute(query).mappings():
        newest.setdefault(row["job"], row)
    return min(newest.values(), key=lambda row: (row["received_us"], row["capture_number"]), default=None)


def _update_own(capture_id: str, by: str) -> Any:
    return update(schema.advice_claims).where(
        _claims.capture_id == capture_id, _claims.claimed_by == by, _claims.settled.is_(False)
    )


def _row(record: AdviceRecord) -> dict[str, Any]:
    row = {name: getattr(record, name) for name in AdviceRecord.__slots__}
    return {**row, "kind": record.advice.kind.value, "advice": advice_to_plain(record.advice)}


def _record(row: Row) -> AdviceRecord:
    given = {name: row[name] for name in AdviceRecord.__slots__}
    return AdviceRecord(**{**given, "advice": advice_of_plain(row["advice"])})
