"""What `store` does within its transaction. Samples go by the thousand from columns to the driver, with no Python object of their own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

from sqlalchemy import Connection, select
from sqlalchemy.dialects.sqlite import insert

from allocscope.model import AllocatorRef, DeviceReading, Process
from allocscope.storage import schema
from allocscope.storage.records import NodeBatch, Stored
from allocscope.storage.rows import (
    BillPart,
    bill_parts,
    bill_row,
    event_row,
    map_row,
    process_row,
    reading_row,
    sample_rows,
)
from allocscope.storage.statements import RowInsert, keeping_first, keeping_latest, many

_SAMPLES, _BLOCK_MAPS, _EVENTS, _BILLS, _JOBS = map(
    keeping_first, (schema.samples, schema.block_maps, schema.events, schema.bills, schema.jobs)
)
_PROCESSES, _DEVICES = keeping_latest(schema.processes, "process_id"), keeping_latest(schema.devices, "uuid")

REMEMBERED = 100_000
"""Allocators and processes of which a `Memory` keeps what it knows."""


class Described(NamedTuple):
    """How a process was described, and by whom."""

    process: Process
    node: str
    daemon_id: str


@dataclass(slots=True)
class Memory:
    """What is known to be in the database, so that it need not be asked or told again. Only what was committed may go in."""

    ids: dict[AllocatorRef, int] = field(default_factory=dict)
    described: dict[str, Described] = field(default_factory=dict)

    def learn(self, other: Memory) -> None:
        """Add what another one knows."""
        for known, new in ((self.ids, other.ids), (self.described, other.described)):
            if len(known) > REMEMBERED:
                known.clear()
            known.update(new)  # type: ignore[arg-type]


def store(connection: Connection, batches: Sequence[NodeBatch], memory: Memory) -> tuple[Stored, Memory]:
    """Keep them all; also gives what may be remembered once the transaction is committed."""
    bills = [(part, b.received_us) for b in batches for reading in b.readings for part in bill_parts(reading)]
    ids = find_ids(connection, _named(batches, bills), memory)
    described = _store_processes(connection, batches, memory)
    samples = _SAMPLES.run(connection, _sample_rows(batches, ids))
    block_maps = _BLOCK_MAPS.run_named(
        connection, (map_row(ids[ref], b.received_us, block_map) for b in batches for ref, block_map in b.block_maps)
    )
    events = _EVENTS.run_named(connection, (event_row(event, b.received_us) for b in batches for event in b.events))
    _BILLS.run(connection, (bill_row(ids[part.allocator], received_us, part) for part, received_us in bills))
    _store_latest_readings(connection, batches)
    _acknowledge(connection, batches)
    given = sum(sum(map(len, b.chunks)) + len(b.block_maps) + len(b.events) for b in batches)
    return Stored(samples, block_maps, events, given - samples - block_maps - events), Memory(ids, described)


def _sample_rows(batches: Iterable[NodeBatch], ids: dict[AllocatorRef, int]) -> Iterator[tuple[int | None, ...]]:
    return chain.from_iterable(
        sample_rows(ids[chunk.allocator], batch.received_us, chunk) for batch in batches for chunk in batch.chunks
    )


# allocators


def _named(batches: Iterable[NodeBatch], bills: Iterable[tuple[BillPart, int]]) -> Iterator[AllocatorRef]:
    for batch in batches:
        yield from (chunk.allocator for chunk in batch.chunks)
        yield from (ref for ref, _ in batch.block_maps)
    yield from (part.allocator for part, _ in bills)


def find_ids(connection: Connection, refs: Iterable[AllocatorRef], memory: Memory) -> dict[AllocatorRef, int]:
    """The ids of all of these, given now where there was none."""
    ids: dict[AllocatorRef, int] = {}
    missing: list[AllocatorRef] = []
    for ref in set(refs):
        known = memory.ids.get(ref)
        if known is None:
            missing.append(ref)
        else:
            ids[ref] = known
    if missing:
        _ALLOCATORS.run(connection, ((ref.process_id, ref.device_uuid) for ref in sorted(missing)))
        ids.update((ref, id_) for ref in missing if (id_ := id_of(connection, ref)) is not None)
    return ids


_ALLOCATORS: RowInsert = keeping_first(schema.allocators)


def id_of(connection: Connection, ref: AllocatorRef) -> int | None:
    """An allocator's id; None: nothing is kept of it."""
    columns = schema.allocators.c
    query = select(columns.allocator_id).where(
        columns.process_id == ref.process_id, columns.device_uuid == ref.device_uuid
    )
    return connection.execute(query).scalar_one_or_none()


# processes

_HEARD_AGAIN = """
UPDATE processes SET batch_sequence = ?, last_received_us = ?
WHERE process_id = ? AND daemon_id = ? AND batch_sequence <= ?
"""


def _store_processes(connection: Connection, batches: Iterable[NodeBatch], memory: Memory) -> dict[str, Described]:
    """Write what is new of them, and of the others only that they were heard."""
    latest = {process.process_id: (process, batch) for batch in batches for process in batch.processes}
    told, heard, described = [], [], {}
    for process_id, (process, batch) in latest.items():
        described[process_id] = now = Described(process, batch.node, batch.daemon_id)
        if memory.described.get(process_id) == now:
            heard.append((batch.sequence, batch.received_us, process_id, batch.daemon_id, batch.sequence))
        else:
            told.append(
                {
                    **process_row(process),
                    **_heading(batch),
                    "first_received_us": batch.received_us,
                    "last_received_us": batch.received_us,
                }
            )
    if told:
        _JOBS.run(connection, ((row["job"], row["first_received_us"]) for row in told))
        _PROCESSES.run_named(connection, told)
    if heard:
        many(connection, _HEARD_AGAIN, heard)
    return described


def _heading(batch: NodeBatch) -> dict[str, object]:
    return {"node": batch.node, "daemon_id": batch.daemon_id, "batch_sequence": batch.sequence}


# devices


def _store_latest_readings(connection: Connection, batches: Iterable[NodeBatch]) -> None:
    latest: dict[str, tuple[DeviceReading, NodeBatch]] = {
        reading.device.uuid: (reading, batch) for batch in batches for reading in batch.readings
    }
    rows = ({**reading_row(reading), **_heading(b), "received_us": b.received_us} for reading, b in latest.values())
    _DEVICES.run_named(connection, rows)


# acknowledgements


def _acknowledging() -> RowInsert:
    statement = insert(schema.daemons)
    new, old = statement.excluded, schema.daemons.c
    return RowInsert(
        statement.on_conflict_do_update(
            index_elements=["node", "daemon_id"],
            set_={name: new[name] for name in ("acknowledged_sequence", "closed_us", "received_us")},
            where=new.acknowledged_sequence > old.acknowledged_sequence,
        )
    )


_DAEMONS = _acknowledging()
_NODE_HEARD = "UPDATE nodes SET last_received_us = ? WHERE node = ? AND daemon_id = ? AND last_received_us < ?"


def _acknowledge(connection: Connection, batches: Iterable[NodeBatch]) -> None:
    newest: dict[tuple[str, str], NodeBatch] = {}
    for batch in batches:
        other = newest.get((batch.node, batch.daemon_id))
        if other is None or batch.sequence >= other.sequence:
            newest[batch.node, batch.daemon_id] = batch
    rows = newest.values()
    _DAEMONS.run(connection, ((b.node, b.daemon_id, b.sequence, b.closed_us, b.received_us) for b in rows))
    many(connection, _NODE_HEARD, ((b.received_us, b.node, b.daemon_id, b.received_us) for b in rows))
