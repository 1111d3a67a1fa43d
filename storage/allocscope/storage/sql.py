"""The Repository over SQLAlchemy Core: SQLite by now."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from sqlalchemy import Connection, Engine, delete, make_url, select
from sqlalchemy.dialects.sqlite import insert
from sqlalchemy.exc import ArgumentError
from sqlalchemy.sql.schema import Table

from allocscope.model import COLUMNS, AllocatorRef, BlockMap, EventKind, Forecast, Line, SampleChunk, State
from allocscope.storage import ingest, queries, schema
from allocscope.storage.advice import AdviceStore
from allocscope.storage.captures import CaptureStore
from allocscope.storage.cursors import cursor_at, key_at
from allocscope.storage.database import Database, page_of
from allocscope.storage.errors import BadUrl, NodeNameTaken
from allocscope.storage.records import (
    AlertRecord,
    Counts,
    EventRecord,
    ForecastRecord,
    JobRecord,
    NodeBatch,
    NodeRecord,
    Page,
    Point,
    ProcessRecord,
    Pruned,
    ReadingRecord,
    Stored,
)
from allocscope.storage.repository import Repository
from allocscope.storage.rows import (
    Row,
    alert_of,
    alert_row,
    event_of,
    forecast_of,
    forecast_row,
    map_of,
    process_of,
    reading_of,
    sample_chunks,
)
from allocscope.storage.sql_advice import SqlAdvice
from allocscope.storage.sql_captures import SqlCaptures
from allocscope.storage.sqlite import open_engine

PRUNED_AT_ONCE = 5_000
"""Rows of an allocator that one transaction of `prune` takes away: others who write wait no longer than that."""


def open_repository(url: str, *, busy_timeout_s: float = 10.0) -> Repository:
    """Open, create or upgrade the storage at `url`: `sqlite:///path`, with `?synchronous=full` where a power loss may cost nothing.

    `busy_timeout_s`: how long a call waits for another process's write before StorageBusy. Raises CannotOpen and its kinds.
    """
    try:
        parsed = make_url(url)
    except ArgumentError as error:
        raise BadUrl(url.rpartition("@")[2], "it is not a URL (write sqlite:///path)") from error
    if parsed.drivername != "sqlite":
        raise BadUrl(parsed.render_as_string(), f"there is no backend {parsed.drivername!r} (there is sqlite)")
    return SqlRepository(open_engine(parsed, busy_timeout_s=busy_timeout_s))


class SqlRepository:
    """A Repository on an engine whose schema is the newest. The promises are Repository's."""

    def __init__(self, engine: Engine) -> None:
        self._database = Database(engine)
        self._memory = ingest.Memory()
        self.captures: CaptureStore = SqlCaptures(self._database)
        self.advice: AdviceStore = SqlAdvice(self._database)

    # what daemons bring

    def store(self, batches: Sequence[NodeBatch]) -> Stored:
        with self._database.writing() as connection:
            stored, learnt = ingest.store(connection, batches, self._memory)
        self._memory.learn(learnt)
        return stored

    def acknowledged(self, node: str, daemon_id: str) -> int:
        column = schema.daemons.c
        query = select(column.acknowledged_sequence).where(column.node == node, column.daemon_id == daemon_id)
        with self._database.reading() as connection:
            return connection.execute(query).scalar_one_or_none() or 0

    def register_node(
        self,
        node: str,
        daemon_id: str,
        *,
        version: str,
        metrics_address: str | None,
        received_us: int,
        silent_before_us: int,
    ) -> None:
        holder = select(schema.nodes.c.daemon_id, schema.nodes.c.last_received_us).where(schema.nodes.c.node == node)
        row = {
            "daemon_id": daemon_id,
            "version": version,
            "metrics_address": metrics_address,
            "last_received_us": received_us,
        }
        statement = insert(schema.nodes).values(node=node, first_received_us=received_us, **row)
        with self._database.writing() as connection:
            held = connection.execute(holder).one_or_none()
            if held and held.daemon_id != daemon_id and held.last_received_us >= silent_before_us:
                raise NodeNameTaken(node, held.daemon_id, daemon_id, held.last_received_us)
            connection.execute(statement.on_conflict_do_update(index_elements=["node"], set_=row))

    # who is who

    def nodes(self, *, cursor: str | None = None, limit: int = 100) -> Page[NodeRecord]:
        query = select(schema.nodes).order_by(schema.nodes.c.node).limit(limit + 1)
        if cursor is not None:
            query = query.where(schema.nodes.c.node > key_at(cursor, "nodes", str))
        with self._database.reading() as connection:
            rows = connection.execute(query).mappings().all()
        more = cursor_at("nodes", rows[limit - 1]["node"]) if len(rows) > limit else None
        return Page(tuple(NodeRecord(**row) for row in rows[:limit]), more)

    def devices(self, *, node: str | None = None, cursor: str | None = None, limit: int = 100) -> Page[ReadingRecord]:
        query = select(schema.devices)
        if node is not None:
            query = query.where(schema.devices.c.node == node)
        return self._database.page(query, schema.devices.c.device_number, reading_of, cursor, limit, newest_first=False)

    def device(self, device_uuid: str) -> ReadingRecord | None:
        return self._database.one(select(schema.devices).where(schema.devices.c.uuid == device_uuid), reading_of)

    def jobs(self, *, cursor: str | None = None, limit: int = 100) -> Page[JobRecord]:
        with self._database.reading() as connection:
            page = page_of(connection, queries.jobs(), schema.jobs.c.job_number, dict, cursor, limit)
            return Page(_with_nodes(connection, page.items), page.next_cursor)

    def job(self, job: str) -> JobRecord | None:
        with self._database.reading() as connection:
            rows = connection.execute(queries.jobs().where(schema.jobs.c.job == job)).mappings().all()
            return next(iter(_with_nodes(connection, rows)), None)

    def processes(
        self, *, job: str | None = None, node: str | None = None, cursor: str | None = None, limit: int = 100
    ) -> Page[ProcessRecord]:
        query, columns = queries.processes(), schema.processes.c
        if job is not None:
            query = query.where(columns.job == job)
        if node is not None:
            query = query.where(columns.node == node)
        return self._database.page(query, columns.process_number, process_of, cursor, limit)

    def process(self, process_id: str) -> ProcessRecord | None:
        return self._database.one(queries.processes().where(schema.processes.c.process_id == process_id), process_of)

    def allocators(
        self,
        *,
        job: str | None = None,
        process_id: str | None = None,
        received_since_us: int | None = None,
        cursor: str | None = None,
        limit: int = 100,
    ) -> Page[AllocatorRef]:
        query, process = queries.allocators(), schema.processes.c
        if job is not None:
            query = query.where(process.job == job)
        if process_id is not None:
            query = query.where(process.process_id == process_id)
        if received_since_us is not None:
            query = query.where(process.last_received_us >= received_since_us)
        return self._database.page(query, schema.allocators.c.allocator_id, _ref_of, cursor, limit)

    # what was measured

    def samples(
        self,
        allocator: AllocatorRef,
        *,
        from_us: int | None = None,
        to_us: int | None = None,
        after_sequence: int = 0,
        limit: int = 10_000,
    ) -> tuple[SampleChunk, ...]:
        columns = schema.samples.c
        with self._database.reading() as connection:
            id_ = self._id(connection, allocator)
            if id_ is None:
                return ()
            query = queries.measured(
                schema.samples, id_, from_us=from_us, to_us=to_us, after_sequence=after_sequence, limit=limit
            )
            query = query.with_only_columns(columns.sequence, columns.time_us, *(columns[name] for name in COLUMNS))
            rows = connection.execute(query).all()
        return tuple(sample_chunks(allocator, rows))

    def series(
        self, allocator: AllocatorRef, metric: str | Line, *, from_us: int, to_us: int, step_us: int
    ) -> tuple[Point, ...]:
        queries.figures(metric)  # a name that there is not is told of an allocator that there is not, too
        with self._database.reading() as connection:
            id_ = self._id(connection, allocator)
            if id_ is None:
                return ()
            query = queries.series(metric, id_, from_us=from_us, to_us=to_us, step_us=step_us)
            return tuple(Point(*row) for row in connection.execute(query))

    def block_maps(
        self,
        allocator: AllocatorRef,
        *,
        from_us: int | None = None,
        to_us: int | None = None,
        after_sequence: int = 0,
        limit: int = 100,
    ) -> tuple[BlockMap, ...]:
        with self._database.reading() as connection:
            id_ = self._id(connection, allocator)
            if id_ is None:
                return ()
            query = queries.measured(
                schema.block_maps, id_, from_us=from_us, to_us=to_us, after_sequence=after_sequence, limit=limit
            )
            return tuple(map_of(row) for row in connection.execute(query).mappings())

    def latest_block_map(self, allocator: AllocatorRef) -> BlockMap | None:
        columns = schema.block_maps.c
        with self._database.reading() as connection:
            query = select(schema.block_maps).where(columns.allocator_id == self._id(connection, allocator))
            row = connection.execute(query.order_by(columns.sequence.desc()).limit(1)).mappings().one_or_none()
        return None if row is None else map_of(row)

    def events(
        self,
        *,
        job: str | None = None,
        process_id: str | None = None,
        kind: EventKind | None = None,
        cursor: str | None = None,
        limit: int = 100,
    ) -> Page[EventRecord]:
        query, columns = select(schema.events), schema.events.c
        if job is not None:
            query = query.join(schema.processes, schema.processes.c.process_id == columns.process_id)
            query = query.where(schema.processes.c.job == job)
        if process_id is not None:
            query = query.where(columns.process_id == process_id)
        if kind is not None:
            query = query.where(columns.kind == kind.value)
        return self._database.page(query, columns.event_number, event_of, cursor, limit)

    # what was judged

    def save_forecasts(self, forecasts: Sequence[tuple[AllocatorRef, Forecast]], *, made_us: int) -> None:
        if not forecasts:
            return
        with self._database.writing() as connection:
            ids = ingest.Ids(connection, self._memory)
            rows = [forecast_row(ids.of(ref), forecast, made_us) for ref, forecast in forecasts]
            _save_forecasts(connection, rows)
        self._memory.learn(ingest.Memory(ids.new))

    def forecasts(
        self,
        *,
        job: str | None = None,
        allocator: AllocatorRef | None = None,
        at_least: State = State.OK,
        cursor: str | None = None,
        limit: int = 100,
    ) -> Page[ForecastRecord]:
        query, named = queries.forecasts(schema.forecasts), schema.allocators.c
        if job is not None:
            query = query.join(schema.processes, schema.processes.c.process_id == named.process_id)
            query = query.where(schema.processes.c.job == job)
        if allocator is not None:
            query = query.where(named.process_id == allocator.process_id, named.device_uuid == allocator.device_uuid)
        if at_least is not State.OK:
            states = [state.value for state in State if state.level >= at_least.level]
            query = query.where(schema.forecasts.c.state.in_(states))
        return self._database.page(query, schema.forecasts.c.allocator_id, forecast_of, cursor, limit)

    def forecast_changes(
        self, allocator: AllocatorRef, *, cursor: str | None = None, limit: int = 100
    ) -> Page[ForecastRecord]:
        columns = schema.allocators.c
        query = queries.forecasts(schema.forecast_changes).where(
            columns.process_id == allocator.process_id, columns.device_uuid == allocator.device_uuid
        )
        return self._database.page(query, schema.forecast_changes.c.change_number, forecast_of, cursor, limit)

    def save_alerts(self, alerts: Sequence[AlertRecord]) -> None:
        if not alerts:
            return
        statement = insert(schema.alerts)
        new = {
            c.name: statement.excluded[c.name] for c in schema.alerts.c if c.name not in ("alert_number", "alert_id")
        }
        statement = statement.on_conflict_do_update(
            index_elements=["alert_id"],
            set_=new,
            where=statement.excluded.updated_us >= schema.alerts.c.updated_us,
        )
        with self._database.writing() as connection:
            connection.execute(statement, [alert_row(alert) for alert in alerts])

    def alerts(
        self,
        *,
        job: str | None = None,
        state: str | None = None,
        standing: bool | None = None,
        cursor: str | None = None,
        limit: int = 100,
    ) -> Page[AlertRecord]:
        query, columns = select(schema.alerts), schema.alerts.c
        if job is not None:
            query = query.where(columns.job == job)
        if state is not None:
            query = query.where(columns.state == state)
        if standing is not None:
            query = query.where(columns.state != "resolved" if standing else columns.state == "resolved")
        return self._database.page(query, columns.alert_number, alert_of, cursor, limit)

    # the storage itself

    def counts(self) -> Counts:
        with self._database.reading() as connection:
            return Counts(**connection.execute(queries.counts()).mappings().one())

    def prune(self, *, before_us: int) -> Pruned:
        with self._database.reading() as connection:
            ids = connection.execute(select(schema.allocators.c.allocator_id)).scalars().all()
        return Pruned(
            samples=sum(self._prune(schema.samples, "sequence", id_, before_us) for id_ in ids),
            block_maps=sum(self._prune(schema.block_maps, "sequence", id_, before_us) for id_ in ids),
            bills=sum(self._prune(schema.bills, "time_us", id_, before_us) for id_ in ids),
        )

    def _prune(self, table: Table, numbered: str, id_: int, before_us: int) -> int:
        columns, taken = table.c, 0
        old = select(columns[numbered]).where(columns.allocator_id == id_, columns.received_us < before_us)
        while True:
            with self._database.writing() as connection:
                some = connection.execute(old.order_by(columns[numbered]).limit(PRUNED_AT_ONCE)).scalars().all()
                if some:
                    mine = (columns.allocator_id == id_) & (columns.received_us < before_us)
                    until = columns[numbered] <= some[-1]
                    taken += connection.execute(delete(table).where(mine, until)).rowcount
            if len(some) < PRUNED_AT_ONCE:
                return taken

    def close(self) -> None:
        self._database.close()

    # what many of them do

    def _id(self, connection: Connection, allocator: AllocatorRef) -> int | None:
        return ingest.id_of(connection, allocator, self._memory)


def _ref_of(row: Row) -> AllocatorRef:
    return AllocatorRef(row["process_id"], row["device_uuid"])


def _with_nodes(connection: Connection, rows: Iterable[Row]) -> tuple[JobRecord, ...]:
    found = list(rows)
    nodes: dict[str, list[str]] = {row["job"]: [] for row in found}
    for job, node in connection.execute(queries.nodes_of_jobs(list(nodes))):
        nodes[job].append(node)
    return tuple(
        JobRecord(
            job=row["job"],
            process_count=row["process_count"],
            nodes=tuple(nodes[row["job"]]),
            first_received_us=row["first_received_us"],
            last_received_us=row["last_received_us"],
        )
        for row in found
    )


def _save_forecasts(connection: Connection, rows: Sequence[dict[str, Any]]) -> None:
    columns = schema.forecasts.c
    ids = {row["allocator_id"] for row in rows}
    query = select(columns.allocator_id, columns.state, columns.cause).where(columns.allocator_id.in_(ids))
    latest: dict[int, tuple[str, str | None]] = {id_: (state, cause) for id_, state, cause in connection.execute(query)}
    changes = []
    for row in rows:
        judged = row["state"], row["cause"]
        if latest.get(row["allocator_id"]) != judged:
            changes.append(row)
            latest[row["allocator_id"]] = judged
    statement = insert(schema.forecasts)
    new = {c.name: statement.excluded[c.name] for c in columns if c.name != "allocator_id"}
    connection.execute(statement.on_conflict_do_update(index_elements=["allocator_id"], set_=new), list(rows))
    if changes:
        connection.execute(insert(schema.forecast_changes), changes)
