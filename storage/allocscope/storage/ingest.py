"""What `store` does within its transaction. Samples go by the thousand from columns to the driver, with no Python object of their own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from sqlalchemy import Connection, and_, or_, select, update
from sqlalchemy.dialects import sqlite
from sqlalchemy.dialects.sqlite import Insert, insert
from sqlalchemy.sql.schema import Table

from allocscope.model import AllocatorRef
from allocscope.storage import schema
from allocscope.storage.records import NodeBatch, Stored
from allocscope.storage.rows import (
    bill_lines,
    bill_row,
    event_row,
    map_row,
    process_row,
    reading_row,
    sample_rows,
)
from allocscope.storage.sqlite import raw_cursor

Ids = dict[AllocatorRef, int]


def store(
    connection: Connection, batches: Sequence[NodeBatch], known: Mapping[AllocatorRef, int]
) -> tuple[Stored, Ids]:
    """Keep them all; also gives the allocators' ids that were not known, good once the transaction is committed."""
    found = find_ids(connection, _named(batches), known)
    ids = {**known, **found} if found else known
    _store_processes(connection, batches)
    samples, given = _store_samples(connection, batches, ids)
    maps = [map_row(ids[ref], b.received_us, block_map) for b in batches for ref, block_map in b.block_maps]
    events = [event_row(event, b.received_us) for b in batches for event in b.events]
    new_maps = _insert_new(connection, schema.block_maps, maps)
    new_events = _insert_new(connection, schema.events, events)
    _store_readings(connection, batches, ids)
    _acknowledge(connection, batches)
    duplicates = given + len(maps) + len(events) - samples - new_maps - new_events
    return Stored(samples, new_maps, new_events, duplicates), found


# allocators


def _named(batches: Iterable[NodeBatch]) -> Iterator[AllocatorRef]:
    for batch in batches:
        yield from (chunk.allocator for chunk in batch.chunks)
        yield from (ref for ref, _ in batch.block_maps)
        for reading in batch.readings:
            entries = reading.bill.entries if reading.bill else ()
            yield from (AllocatorRef(e.process_id or "", reading.device.uuid) for e in entries)


def find_ids(connection: Connection, refs: Iterable[AllocatorRef], known: Mapping[AllocatorRef, int]) -> Ids:
    """The ids of those that are not known, given now where there was none."""
    missing = [ref for ref in dict.fromkeys(refs) if ref not in known]
    if not missing:
        return {}
    table = schema.allocators
    connection.execute(
        insert(table).on_conflict_do_nothing(),
        [{"process_id": ref.process_id, "device_uuid": ref.device_uuid} for ref in missing],
    )
    return {ref: id_ for ref in missing if (id_ := id_of(connection, ref)) is not None}


def id_of(connection: Connection, ref: AllocatorRef) -> int | None:
    """An allocator's id; None: nothing is kept of it."""
    columns = schema.allocators.c
    query = select(columns.allocator_id).where(
        columns.process_id == ref.process_id, columns.device_uuid == ref.device_uuid
    )
    return connection.execute(query).scalar_one_or_none()


# samples


def _compiled(statement: Insert) -> str:
    """The statement's text, with one mark for each of the table's columns in their order."""
    return str(statement.compile(dialect=sqlite.dialect(paramstyle="qmark")))


_INSERT_SAMPLE = _compiled(insert(schema.samples).on_conflict_do_nothing())
_INSERT_BILL = _compiled(insert(schema.bills).on_conflict_do_nothing())


def _store_samples(
    connection: Connection, batches: Iterable[NodeBatch], ids: Mapping[AllocatorRef, int]
) -> tuple[int, int]:
    """How many are new, and how many there were."""
    chunks = [(chunk, batch.received_us) for batch in batches for chunk in batch.chunks]
    if not chunks:
        return 0, 0
    rows = chain.from_iterable(sample_rows(ids[chunk.allocator], received, chunk) for chunk, received in chunks)
    new = _insert_raw(connection, _INSERT_SAMPLE, rows)
    return new, sum(len(chunk) for chunk, _ in chunks)


def _insert_raw(connection: Connection, statement: str, rows: Iterable[tuple[Any, ...]]) -> int:
    cursor = raw_cursor(connection)
    try:
        cursor.executemany(statement, rows)
        return max(int(cursor.rowcount), 0)  # -1 where there were no rows
    finally:
        cursor.close()


def _insert_new(connection: Connection, table: Table, rows: list[dict[str, Any]]) -> int:
    """How many of them were new."""
    if not rows:
        return 0
    statement = insert(table).on_conflict_do_nothing().execution_options(preserve_rowcount=True)
    return int(connection.execute(statement, rows).rowcount)


# who is who


def _store_processes(connection: Connection, batches: Iterable[NodeBatch]) -> None:
    rows = {
        process.process_id: {
            **process_row(process),
            "node": batch.node,
            "daemon_id": batch.daemon_id,
            "batch_sequence": batch.sequence,
            "first_received_us": batch.received_us,
            "last_received_us": batch.received_us,
        }
        for batch in batches
        for process in batch.processes
    }
    if not rows:
        return
    jobs = {row["job"]: {"job": row["job"], "first_received_us": row["first_received_us"]} for row in rows.values()}
    connection.execute(insert(schema.jobs).on_conflict_do_nothing(), list(jobs.values()))
    connection.execute(_replacing(schema.processes, "process_id"), list(rows.values()))


def _replacing(table: Table, key: str) -> Insert:
    """Insert, or replace what is not from a later batch of the same daemon; numbers and first times stay."""
    statement = insert(table)
    new, old = statement.excluded, table.c
    kept = {key, "first_received_us", *(c.name for c in table.primary_key)}
    return statement.on_conflict_do_update(
        index_elements=[key],
        set_={c.name: new[c.name] for c in table.c if c.name not in kept},
        where=or_(new.daemon_id != old.daemon_id, new.batch_sequence >= old.batch_sequence),
    )


def _store_readings(connection: Connection, batches: Iterable[NodeBatch], ids: Mapping[AllocatorRef, int]) -> None:
    latest: list[dict[str, Any]] = []
    bills: list[tuple[Any, ...]] = []
    for batch in batches:
        heading = {
            "node": batch.node,
            "daemon_id": batch.daemon_id,
            "batch_sequence": batch.sequence,
            "received_us": batch.received_us,
        }
        for reading in batch.readings:
            latest.append({**reading_row(reading), **heading})
            for process_id, (lines, inexact) in bill_lines(reading).items():
                id_ = ids[AllocatorRef(process_id, reading.device.uuid)]
                bills.append(bill_row(id_, reading.time_us, batch.received_us, lines, inexact))
    if latest:
        connection.execute(_replacing(schema.devices, "uuid"), latest)
        _insert_raw(connection, _INSERT_BILL, bills)


def _acknowledge(connection: Connection, batches: Iterable[NodeBatch]) -> None:
    newest: dict[tuple[str, str], NodeBatch] = {}
    for batch in batches:
        key = batch.node, batch.daemon_id
        if key not in newest or batch.sequence >= newest[key].sequence:
            newest[key] = batch
    for batch in newest.values():
        _acknowledge_one(connection, batch)


def _acknowledge_one(connection: Connection, batch: NodeBatch) -> None:
    statement = insert(schema.daemons).values(
        node=batch.node,
        daemon_id=batch.daemon_id,
        acknowledged_sequence=batch.sequence,
        closed_us=batch.closed_us,
        received_us=batch.received_us,
    )
    new, old = statement.excluded, schema.daemons.c
    higher = ("acknowledged_sequence", "closed_us", "received_us")
    connection.execute(
        statement.on_conflict_do_update(
            index_elements=["node", "daemon_id"],
            set_={name: new[name] for name in higher},
            where=new.acknowledged_sequence > old.acknowledged_sequence,
        )
    )
    node = schema.nodes.c
    connection.execute(
        update(schema.nodes)
        .where(and_(node.node == batch.node, node.daemon_id == batch.daemon_id))
        .where(node.last_received_us < batch.received_us)
        .values(last_received_us=batch.received_us)
    )
