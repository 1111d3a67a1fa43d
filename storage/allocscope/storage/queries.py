"""The questions as SQL: what goes in as values, what comes out as rows. None of it is bound to one database."""

from __future__ import annotations

from typing import Any, TypeAlias

from sqlalchemy import Select, Table, func, select

from allocscope.model import COLUMNS, Line
from allocscope.storage import schema
from allocscope.storage.errors import UnknownMetric

Query: TypeAlias = "Select[*tuple[Any, ...]]"

_allocators, _processes, _events = schema.allocators.c, schema.processes.c, schema.events.c


def processes() -> Query:
    """Processes, each with when it said that it stops."""
    stopped = (
        select(func.max(_events.time_us))
        .where(_events.process_id == _processes.process_id, _events.kind == "stopped")
        .scalar_subquery()
    )
    return select(schema.processes, stopped.label("stopped_us"))


def jobs() -> Query:
    """Jobs with what their processes add up to; the sums are of the jobs of a page, not of all."""
    of_it = select(func.count(), func.max(_processes.last_received_us)).where(_processes.job == schema.jobs.c.job)
    any_left = select(1).where(_processes.job == schema.jobs.c.job).exists()  # a process may have changed its mind
    count, last = (of_it.with_only_columns(column).scalar_subquery() for column in of_it.selected_columns)
    columns = (schema.jobs, count.label("process_count"), last.label("last_received_us"))
    return select(*columns).where(any_left)


def nodes_of_jobs(jobs: list[str]) -> Query:
    """(job, node), by name."""
    query = select(_processes.job, _processes.node).distinct().where(_processes.job.in_(jobs))
    return query.order_by(_processes.job, _processes.node)


def allocators() -> Query:
    """Allocators of described processes."""
    return select(schema.allocators).join(schema.processes, _processes.process_id == _allocators.process_id)


def forecasts(table: Table) -> Query:
    """Forecasts or their changes, each with its allocator's names."""
    return select(table, _allocators.process_id, _allocators.device_uuid).join(
        schema.allocators, _allocators.allocator_id == table.c.allocator_id
    )


def measured(
    table: Table, allocator_id: int, *, from_us: int | None, to_us: int | None, after_sequence: int, limit: int
) -> Query:
    """Samples or block maps of an allocator, by number."""
    columns = table.c
    query = select(table).where(columns.allocator_id == allocator_id)
    within = [columns.allocator_id == allocator_id]
    if from_us is not None:
        within.append(columns.time_us >= from_us)
    if to_us is not None:
        within.append(columns.time_us < to_us)
    if len(within) > 1:  # the index by time knows between which numbers to look; the table is in the order of numbers
        first, last = (select(end(columns.sequence)).where(*within).scalar_subquery() for end in (func.min, func.max))
        query = query.where(*within, columns.sequence.between(first, last))
    if after_sequence:
        query = query.where(columns.sequence > after_sequence)
    return query.order_by(columns.sequence).limit(limit)


def figures(metric: str | Line) -> tuple[Table, str, str]:
    """Where a metric is kept: the table, its column, and the column that numbers the rows."""
    if isinstance(metric, Line):
        return schema.bills, f"{metric.value}_bytes", "time_us"
    if metric not in COLUMNS:
        raise UnknownMetric(metric, COLUMNS)
    return schema.samples, metric, "sequence"


def series(metric: str | Line, allocator_id: int, *, from_us: int, to_us: int, step_us: int) -> Query:
    """Rows of (bucket, count, minimum, maximum, mean, last)."""
    table, column, numbered = figures(metric)
    columns, value = table.c, table.c[column]
    bucket = (columns.time_us // step_us).label("bucket")
    buckets = (
        select(
            bucket,
            func.count(value).label("count"),
            func.min(value).label("minimum"),
            func.max(value).label("maximum"),
            func.avg(value).label("mean"),
            func.max(columns[numbered]).label("last"),
        )
        .where(columns.allocator_id == allocator_id, columns.time_us >= from_us, columns.time_us < to_us)
        .where(value.is_not(None))
        .group_by(bucket)
        .subquery()
    )
    of_last = (columns.allocator_id == allocator_id) & (columns[numbered] == buckets.c.last)
    return (
        select(buckets.c.bucket * step_us, buckets.c.count, buckets.c.minimum, buckets.c.maximum, buckets.c.mean, value)
        .join(table, of_last)
        .order_by(buckets.c.bucket)
    )


def counts() -> Query:
    """One row: a count for each field of `Counts`."""
    tables = {
        "nodes": schema.nodes,
        "devices": schema.devices,
        "jobs": schema.jobs,
        "processes": schema.processes,
        "samples": schema.samples,
        "block_maps": schema.block_maps,
        "events": schema.events,
        "alerts": schema.alerts,
    }
    return select(*(select(func.count()).select_from(t).scalar_subquery().label(name) for name, t in tables.items()))
