"""What `store` does within its transaction. Samples go by the thousand from columns to the driver, with no Python object of their own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain, starmap
from typing import Any, NamedTuple

from sqlalchemy import Connection, Select, select
from sqlalchemy.dialects.sqlite import insert

from allocscope.model import AllocatorRef, DeviceReading, Process
from allocscope.storage import schema
from allocscope.storage.records import NodeBatch, Stored
from allocscope.storage.rows import (
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


AllocatorKey = tuple[str, str]
"""(process_id, device_uuid): quicker to look up than an AllocatorRef."""


@dataclass(slots=True)
class Memory:
    """What is known to be in the database, so that it need not be asked or told again. Only what was committed may go in."""

    ids: dict[AllocatorKey, int] = field(default_factory=dict)
    described: dict[str, Described] = field(default_factory=dict)

    def learn(self, other: Memory) -> None:
        """Add what another one knows."""
        if max(len(self.ids), len(self.described)) > REMEMBERED:
            self.ids.clear()
            self.described.clear()
        self.ids.update(other.ids)
        self.described.update(other.described)


def store(connection: Connection, batches: Sequence[NodeBatch], memory: Memory) -> tuple[Stored, Memory]:
    """Keep them all; also gives what may be remembered once the transaction is committed."""
    ids = Ids(connection, memory)
    described = _store_processes(connection, batches, memory)
    chunks = [(ids.of(c.allocator), b.received_us, c) for b in batches for c in b.chunks]
    maps = [map_row(ids.of(ref), b.received_us, block_map) for b in batches for ref, block_map in b.block_maps]
    events = [event_row(event, b.received_us) for b in batches for event in b.events]
    new_samples = _SAMPLES.run(connection, chain.from_iterable(starmap(sample_rows, chunks)))
    new_maps = _BLOCK_MAPS.run_named(connection, maps)
    new_events = _EVENTS.run_named(connection, events)
    _BILLS.run(connection, _bill_rows(batches, ids))
    _store_latest_readings(connection, batches)
    _acknowledge(connection, batches)
    given = sum(len(chunk) for _, _, chunk in chunks) + len(maps) + len(events)
    new = new_samples + new_maps + new_events
    return Stored(new_samples, new_maps, new_events, given - new), Memory(ids.new, described)


def _bill_rows(batches: Iterable[NodeBatch], ids: Ids) -> list[tuple[Any, ...]]:
    return [
        bill_row(ids.of_key((part.process_id, reading.device.uuid)), reading.time_us, batch.received_us, part)
        for batch in batches
        for reading in batch.readings
        for part in bill_parts(reading)
    ]


# allocators


class Ids:
    """The allocators' ids within a transaction, given where there is none yet."""

    def __init__(self, connection: Connection, memory: Memory) -> None:
        self._connection, self._known = connection, memory.ids
        self.new: dict[AllocatorKey, int] = {}
        """What the memory did not know."""

    def of(self, ref: AllocatorRef) -> int:
        """An allocator's id."""
        return self.of_key((ref.process_id, ref.device_uuid))

    def of_key(self, key: AllocatorKey) -> int:
        """An allocator's id."""
        id_ = self._known.get(key) or self.new.get(key)
        if id_ is None:
            _ALLOCATORS.run(self._connection, [key])
            id_ = self.new[key] = self._connection.execute(_ids_of(key)).scalar_one()
        return id_


_ALLOCATORS = keeping_first(schema.allocators)


def _ids_of(key: AllocatorKey) -> Select[int]:
    columns = schema.allocators.c
    query = select(columns.allocator_id)
    return query.where(columns.process_id == key[0], columns.device_uuid == key[1])


def id_of(connection: Connection, ref: AllocatorRef, memory: Memory) -> int | None:
    """An allocator's id; None: nothing is kept of it."""
    key = ref.process_id, ref.device_uuid
    return memory.ids.get(key) or connection.execute(_ids_of(key)).scalar_one_or_none()


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


_DESCRIBED_ELSEWHERE = keeping_first(schema.processes)


def describe(connection: Connection, process: Process, *, node: str, received_us: int) -> None:
    """Write a process that no batch described yet. The first batch that does is believed more: no daemon's numbering has a 0."""
    heading = {"node": node, "daemon_id": "", "batch_sequence": 0}
    times = {"first_received_us": received_us, "last_received_us": received_us}
    _JOBS.run(connection, [(process.job, received_us)])
    _DESCRIBED_ELSEWHERE.run_named(connection, [{**process_row(process), **heading, **times}])


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
