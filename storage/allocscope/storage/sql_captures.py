"""Captures over SQLAlchemy Core. The promises are CaptureStore's.

A snapshot's pieces belong to an upload. While its number is in `capture_uploads` they are nobody's: somebody is adding to them, or they
are on their way out. One transaction makes them a capture's (`keep`), and one ends that (`_drop`); taking many pieces away goes on
for longer, and hurts nobody.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, delete, func, select, update
from sqlalchemy.dialects.sqlite import insert

from allocscope.model import CaptureReason
from allocscope.storage import ingest, schema
from allocscope.storage.captures import (
    OPEN,
    CaptureArrival,
    CaptureRecord,
    CaptureState,
    CaptureTotals,
    Dropped,
    Kept,
    OrderLimits,
)
from allocscope.storage.database import Database
from allocscope.storage.errors import OrderedLately, TooManyOrders, UploadLost
from allocscope.storage.records import Page
from allocscope.storage.rows import Row

DELETED_AT_ONCE = 8
"""Pieces that one transaction takes away: others who write wait no longer than that."""

_captures, _uploads, _pieces = schema.captures.c, schema.capture_uploads.c, schema.capture_pieces.c
_OPEN = [state.value for state in OPEN]
_FOR_GOOD = (CaptureState.KEPT.value, CaptureState.DROPPED.value)


class SqlCaptures:
    """A CaptureStore in a database."""

    def __init__(self, database: Database) -> None:
        self._database = database

    # orders

    def order(self, records: Sequence[CaptureRecord], limits: OrderLimits) -> None:
        if not records:
            return
        with self._database.writing() as connection:
            _check(connection, records, limits)
            statement = insert(schema.captures).on_conflict_do_nothing(index_elements=["capture_id"])
            connection.execute(statement, [_row(record) for record in records])

    def open_orders(self, *, limit: int = 1000) -> tuple[CaptureRecord, ...]:
        query = select(schema.captures).where(_captures.state.in_(_OPEN)).order_by(_captures.capture_number)
        with self._database.reading() as connection:
            return tuple(capture_record(row) for row in connection.execute(query.limit(limit)).mappings())

    def sent(self, capture_ids: Sequence[str], *, sent_us: int) -> None:
        if not capture_ids:
            return
        statement = update(schema.captures).values(state=CaptureState.SENT.value, sent_us=sent_us)
        with self._database.writing() as connection:
            connection.execute(statement.where(_captures.capture_id.in_(capture_ids), _captures.state.in_(_OPEN)))

    def fail(self, problems: Mapping[str, str]) -> int:
        failed = 0
        if problems:
            with self._database.writing() as connection:
                for capture_id, problem in problems.items():
                    statement = update(schema.captures).values(state=CaptureState.FAILED.value, problem=problem)
                    of_it = _captures.capture_id == capture_id, _captures.state.in_(_OPEN)
                    failed += connection.execute(statement.where(*of_it)).rowcount
        return failed

    # what nodes bring

    def begin(self, capture_id: str, *, received_us: int) -> int:
        statement = insert(schema.capture_uploads).values(capture_id=capture_id, touched_us=received_us)
        with self._database.writing() as connection:
            return int(connection.execute(statement.returning(_uploads.upload_number)).scalar_one())

    def add(self, upload: int, number: int, piece: bytes, *, received_us: int) -> None:
        touch = update(schema.capture_uploads).values(touched_us=received_us).where(_uploads.upload_number == upload)
        statement = insert(schema.capture_pieces).values(upload_number=upload, piece_number=number, content=piece)
        with self._database.writing() as connection:
            if connection.execute(touch).rowcount == 0:
                raise UploadLost(upload)
            connection.execute(statement)

    def discard(self, upload: int) -> None:
        with self._database.writing() as connection:
            _doom(connection, upload)
        self._sweep(upload)

    def keep(self, arrival: CaptureArrival, *, limit_bytes: int) -> Kept:
        with self._database.writing() as connection:
            if (is_new := _take_up(connection, arrival)) and arrival.upload is not None:
                room = limit_bytes - arrival.stored_bytes
                dropped = _drop(connection, _oldest_beyond(connection, room, arrival.capture.capture_id), _NO_ROOM)
            else:
                dropped = 0
        self._sweep_doomed(before_us=1)
        return Kept(is_new, Dropped(for_room=dropped))

    # questions

    def find(self, capture_id: str) -> CaptureRecord | None:
        return self._database.one(select(schema.captures).where(_captures.capture_id == capture_id), capture_record)

    def page(
        self,
        *,
        job: str | None = None,
        process_id: str | None = None,
        state: CaptureState | None = None,
        cursor: str | None = None,
        limit: int = 100,
    ) -> Page[CaptureRecord]:
        query = select(schema.captures)
        if job is not None:
            query = query.where(_captures.job == job)
        if process_id is not None:
            query = query.where(_captures.process_id == process_id)
        if state is not None:
            query = query.where(_captures.state == state.value)
        return self._database.page(query, _captures.capture_number, capture_record, cursor, limit)

    def piece(self, capture_id: str, number: int) -> bytes | None:
        of_it = select(_captures.upload_number).where(_captures.capture_id == capture_id).scalar_subquery()
        query = select(_pieces.content).where(_pieces.upload_number == of_it, _pieces.piece_number == number)
        with self._database.reading() as connection:
            return connection.execute(query).scalar_one_or_none()

    def totals(self) -> CaptureTotals:
        query = select(func.count(), func.coalesce(func.sum(_captures.stored_bytes), 0))
        with self._database.reading() as connection:
            captures, stored_bytes = connection.execute(query.where(_is_kept())).one()
        return CaptureTotals(captures, stored_bytes)

    # the storage itself

    def prune(self, *, before_us: int, limit_bytes: int, abandoned_before_us: int) -> Dropped:
        with self._database.writing() as connection:
            old = _drop(connection, _received_before(connection, before_us), _TOO_OLD)
            large = _drop(connection, _oldest_beyond(connection, limit_bytes), _NO_ROOM)
        self._sweep_doomed(before_us=max(abandoned_before_us, 1))
        return Dropped(for_age=old, for_room=large)

    def _sweep_doomed(self, *, before_us: int) -> None:
        query = select(_uploads.upload_number).where(_uploads.touched_us < before_us)
        with self._database.reading() as connection:
            doomed = connection.execute(query).scalars().all()
        for upload in doomed:
            self._sweep(upload)

    def _sweep(self, upload: int) -> None:
        """Take away the pieces of an upload that is nobody's; one that is kept has no row in `capture_uploads`."""
        some = select(_pieces.piece_number).where(_pieces.upload_number == upload).limit(DELETED_AT_ONCE)
        taken = DELETED_AT_ONCE
        while taken == DELETED_AT_ONCE:
            with self._database.writing() as connection:
                if not _is_nobodys(connection, upload):
                    return
                pieces = delete(schema.capture_pieces).where(_pieces.upload_number == upload)
                taken = connection.execute(pieces.where(_pieces.piece_number.in_(some))).rowcount
                if taken < DELETED_AT_ONCE:
                    connection.execute(delete(schema.capture_uploads).where(_uploads.upload_number == upload))


# orders


def _check(connection: Connection, records: Sequence[CaptureRecord], limits: OrderLimits) -> None:
    reason = records[0].reason
    query = select(_captures.process_id, _captures.job, func.count())
    query = query.where(_captures.state.in_(_OPEN), _captures.reason == reason.value)
    of_process, of_job = Counter[str](), Counter[str]()
    for process_id, job, count in connection.execute(query.group_by(_captures.process_id, _captures.job)):
        of_process[process_id] += count
        of_job[job] += count
    for record in records:
        of_process[record.process_id] += 1
        of_job[record.job] += 1
        _allow(f"process {record.process_id}", of_process[record.process_id], limits.of_process)
        _allow(f"job {record.job!r}", of_job[record.job], limits.of_job)
        _check_lately(connection, record, limits.not_since_us)
    _allow("the fleet", of_job.total(), limits.of_fleet)


def _allow(whose: str, found: int, most: int) -> None:
    if found > most:
        raise TooManyOrders(whose, found, most)


def _check_lately(connection: Connection, record: CaptureRecord, since_us: int | None) -> None:
    if since_us is None:
        return
    same = (
        _captures.process_id == record.process_id,
        _captures.device_uuid.is_not_distinct_from(record.device_uuid),
        _captures.reason == record.reason.value,
        _captures.ordered_us >= since_us,
    )
    found = connection.execute(select(_captures.capture_id).where(*same).limit(1)).scalar_one_or_none()
    if found is not None:
        raise OrderedLately(found)


# arrivals


def _take_up(connection: Connection, arrival: CaptureArrival) -> bool:
    """Make an upload's pieces a capture's; False: the capture has been kept before."""
    upload = arrival.upload
    query = select(_captures.state).where(_captures.capture_id == arrival.capture.capture_id)
    if connection.execute(query).scalar_one_or_none() in _FOR_GOOD:
        if upload is not None:
            _doom(connection, upload)
        return False
    if upload is not None:
        _check_pieces(connection, arrival, upload)
        connection.execute(delete(schema.capture_uploads).where(_uploads.upload_number == upload))
    ingest.describe(connection, arrival.process, node=arrival.node, received_us=arrival.received_us)
    row = _arrived(arrival)
    statement = insert(schema.captures).values(**row)
    new = {name: value for name, value in row.items() if name != "capture_id"}
    connection.execute(statement.on_conflict_do_update(index_elements=["capture_id"], set_=new))
    return True


def _check_pieces(connection: Connection, arrival: CaptureArrival, upload: int) -> None:
    query = select(func.count(), func.coalesce(func.sum(func.length(_pieces.content)), 0))
    found = connection.execute(query.where(_pieces.upload_number == upload)).one()
    if tuple(found) != (arrival.piece_count, arrival.stored_bytes) or not _is_nobodys(connection, upload):
        raise UploadLost(upload)


def _is_nobodys(connection: Connection, upload: int) -> bool:
    query = select(_uploads.upload_number).where(_uploads.upload_number == upload)
    return connection.execute(query).scalar_one_or_none() is not None


def _doom(connection: Connection, upload: int) -> None:
    connection.execute(update(schema.capture_uploads).values(touched_us=0).where(_uploads.upload_number == upload))


def _arrived(arrival: CaptureArrival) -> dict[str, Any]:
    capture, process, has_snapshot = arrival.capture, arrival.process, arrival.upload is not None
    return {
        "capture_id": capture.capture_id,
        "process_id": process.process_id,
        "job": process.job,
        "rank": process.rank,
        "node": arrival.node,
        "device_uuid": capture.device_uuid,
        "reason": capture.reason.value,
        "state": (CaptureState.KEPT if has_snapshot else CaptureState.FAILED).value,
        "tensors": capture.tensors,
        "time_us": capture.time_us,
        "received_us": arrival.received_us,
        "snapshot_bytes": capture.snapshot_bytes if has_snapshot else None,
        "history_entries": capture.history_entries,
        "stored_bytes": arrival.stored_bytes if has_snapshot else None,
        "upload_number": arrival.upload,
        "problem": capture.problem,
    }


# bounds

_TOO_OLD = "its snapshot was dropped for its age"
_NO_ROOM = "its snapshot was dropped to make room for newer ones"


def _is_kept() -> Any:
    return _captures.state == CaptureState.KEPT.value


def _received_before(connection: Connection, before_us: int) -> list[Row]:
    query = select(schema.captures).where(_is_kept(), _captures.received_us < before_us)
    return list(connection.execute(query).mappings())


def _oldest_beyond(connection: Connection, limit_bytes: int, spared_id: str = "") -> list[Row]:
    """Snapshots to drop so that the others come to no more than that."""
    query = select(schema.captures).where(_is_kept(), _captures.capture_id != spared_id)
    rows = list(connection.execute(query.order_by(_captures.received_us, _captures.capture_number)).mappings())
    total_bytes = sum(row["stored_bytes"] for row in rows)
    dropped: list[Row] = []
    for row in rows:
        if total_bytes <= limit_bytes:
            break
        total_bytes -= row["stored_bytes"]
        dropped.append(row)
    return dropped


def _drop(connection: Connection, rows: Sequence[Row], problem: str) -> int:
    for row in rows:
        gone = {"capture_id": row["capture_id"], "upload_number": row["upload_number"], "touched_us": 0}
        connection.execute(insert(schema.capture_uploads).values(**gone))
        new = {"state": CaptureState.DROPPED.value, "upload_number": None, "stored_bytes": None, "problem": problem}
        connection.execute(
            update(schema.captures).values(**new).where(_captures.capture_number == row["capture_number"])
        )
    return len(rows)


# rows


def _row(record: CaptureRecord) -> dict[str, Any]:
    row = {name: getattr(record, name) for name in CaptureRecord.__slots__}
    return {**row, "reason": record.reason.value, "state": record.state.value}


def capture_record(row: Row) -> CaptureRecord:
    """A row of captures."""
    given = {name: row[name] for name in CaptureRecord.__slots__}
    return CaptureRecord(**{**given, "reason": CaptureReason(row["reason"]), "state": CaptureState(row["state"])})
