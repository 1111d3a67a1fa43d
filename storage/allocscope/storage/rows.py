"""Between the words and what a table's columns hold. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import groupby
from json import JSONEncoder
from operator import itemgetter
from typing import Any

from allocscope.model import (
    COLUMNS,
    AllocatorRef,
    BillEntry,
    BlockGroup,
    BlockMap,
    Cause,
    Device,
    DeviceBill,
    DeviceProcess,
    DeviceReading,
    Event,
    EventKind,
    Forecast,
    Line,
    Owner,
    Pool,
    PrivatePool,
    Process,
    SampleChunk,
    SizeClass,
    State,
)
from allocscope.storage.records import (
    AlertRecord,
    EventRecord,
    ForecastRecord,
    ProcessRecord,
    ReadingRecord,
)
from allocscope.storage.schema import MAP_SUMS

LARGEST = 2**63 - 1
"""Databases hold signed 64-bit integers."""

Row = Mapping[Any, Any]
"""A row of a table by its columns' names."""


_json = JSONEncoder(separators=(",", ":"), ensure_ascii=False).encode


def _all(value: Any) -> dict[str, Any]:
    """A slotted dataclass's fields by name; quicker than `dataclasses.fields`."""
    return {name: getattr(value, name) for name in value.__slots__}


def _known(value: Any) -> dict[str, Any]:
    """Those that are known."""
    return {name: v for name in value.__slots__ if (v := getattr(value, name)) is not None}


def _given(value_type: Any, row: Row) -> dict[str, Any]:
    """What of a row makes such a value."""
    return {name: row[name] for name in value_type.__slots__}


# processes


def process_row(process: Process) -> dict[str, Any]:
    return {**_all(process), "devices": _json([_known(device) for device in process.devices])}


def process_of(row: Row) -> ProcessRecord:
    given = _given(Process, row)
    given["devices"] = tuple(Device(**device) for device in row["devices"])
    return ProcessRecord(
        Process(**given), row["node"], row["first_received_us"], row["last_received_us"], row["stopped_us"]
    )


# devices


def reading_row(reading: DeviceReading) -> dict[str, Any]:
    bill = reading.bill
    return {
        **_all(reading.device),
        "time_us": reading.time_us,
        "from_nvml": reading.from_nvml,
        "free_bytes": reading.free_bytes,
        "driver_bytes": reading.driver_bytes,
        "problem": reading.problem,
        "problem_kind": reading.problem_kind,
        "processes": _json([_process(process) for process in reading.processes]),
        "bill": None if bill is None else _json(_bill(bill)),
    }


def _process(process: DeviceProcess) -> dict[str, Any]:
    return {**_known(process), **({"owner": _known(process.owner)} if process.owner else {})}


def _process_of(told: Mapping[str, Any]) -> DeviceProcess:
    owner = told.get("owner")
    return DeviceProcess(**{**told, "owner": Owner(**owner) if owner else None})


def _bill(bill: DeviceBill) -> dict[str, Any]:
    entries = [[e.line.value, e.bytes, e.exact, e.process_id] for e in bill.entries]
    return {"total_bytes": bill.total_bytes, "entries": entries}


def reading_of(row: Row) -> ReadingRecord:
    bill = row["bill"]
    reading = DeviceReading(
        device=Device(**_given(Device, row)),
        time_us=row["time_us"],
        from_nvml=row["from_nvml"],
        free_bytes=row["free_bytes"],
        driver_bytes=row["driver_bytes"],
        problem=row["problem"],
        problem_kind=row["problem_kind"],
        processes=tuple(map(_process_of, row["processes"])),
        bill=None
        if bill is None
        else DeviceBill(bill["total_bytes"], tuple(BillEntry(Line(line), *rest) for line, *rest in bill["entries"])),
    )
    return ReadingRecord(row["node"], reading, row["received_us"])


@dataclass(slots=True)
class BillPart:
    """A device's own lines of a bill, or those of one of its processes."""

    process_id: str
    """"": the device's own."""
    lines: dict[str, int]
    """By line's value."""
    inexact: set[str]


def bill_parts(reading: DeviceReading) -> Iterable[BillPart]:
    """The bill, taken apart."""
    parts: dict[str, BillPart] = {}
    for entry in reading.bill.entries if reading.bill else ():
        process_id, line = entry.process_id or "", entry.line.value
        part = parts.get(process_id)
        if part is None:
            part = parts[process_id] = BillPart(process_id, {}, set())
        part.lines[line] = part.lines.get(line, 0) + entry.bytes
        if not entry.exact:
            part.inexact.add(line)
    return parts.values()


_LINES = tuple(line.value for line in Line)


def bill_row(allocator_id: int, time_us: int, received_us: int, part: BillPart) -> tuple[Any, ...]:
    inexact = ",".join(sorted(part.inexact)) if part.inexact else ""
    return (allocator_id, time_us, received_us, *map(part.lines.get, _LINES), inexact)


# samples


def sample_rows(allocator_id: int, received_us: int, chunk: SampleChunk) -> Iterator[tuple[int | None, ...]]:
    """A chunk's columns as rows of `samples`; ValueError where the columns are not of one length, or not ours."""
    columns, count = chunk.columns, len(chunk.sequence)
    unknown = columns.keys() - COLUMN_NAMES
    if unknown:
        raise ValueError(f"samples have no column {', '.join(sorted(unknown))}")
    blank = (None,) * count
    return zip(
        (allocator_id,) * count,
        chunk.sequence,
        chunk.time_us,
        (received_us,) * count,
        *[columns.get(name, blank) for name in COLUMNS],
        strict=True,
    )


COLUMN_NAMES = frozenset(COLUMNS)


def sample_chunks(allocator: AllocatorRef, rows: Sequence[Sequence[Any]]) -> Iterator[SampleChunk]:
    """From rows of (sequence, time_us, *COLUMNS): one chunk for each run that knows the same figures."""
    if not rows:
        return
    for known, run in _runs(rows):
        sequence, time_us, *columns = zip(*run, strict=True)
        yield SampleChunk(
            allocator,
            sequence,
            time_us,
            {name: column for name, column, is_known in zip(COLUMNS, columns, known, strict=True) if is_known},
        )


def _runs(rows: Sequence[Sequence[Any]]) -> Iterator[tuple[tuple[bool, ...], Iterable[Sequence[Any]]]]:
    first = _which_known(rows[0])
    columns = list(zip(*rows, strict=True))[2:]
    if all(
        None not in column if known else set(column) == {None} for known, column in zip(first, columns, strict=True)
    ):
        yield first, rows  # by far the usual case
    else:
        yield from ((known, list(run)) for known, run in groupby(rows, key=_which_known))


def _which_known(row: Sequence[Any]) -> tuple[bool, ...]:
    return tuple(figure is not None for figure in row[2:])


# block maps


def map_row(allocator_id: int, received_us: int, block_map: BlockMap) -> dict[str, Any]:
    groups = block_map.groups
    largest = (g.largest_free_block_bytes for g in groups if g.largest_free_block_bytes is not None)
    return {
        "allocator_id": allocator_id,
        "sequence": block_map.sequence,
        "time_us": block_map.time_us,
        "received_us": received_us,
        "call_us": block_map.call_us,
        **{name: _sum(getattr(g, name) for g in groups) for name in MAP_SUMS},
        "largest_free_block_bytes": max(largest, default=None),
        "groups": _json([_group(g) for g in groups]),
    }


def _sum(figures: Iterable[int | None]) -> int | None:
    """None if one of them is not known, or if together they are more than can be kept."""
    total = 0
    for figure in figures:
        if figure is None:
            return None
        total += figure
    return total if total <= LARGEST else None


_CLASSES = ("free_stranded", "free_releasable", "live")
_CLASS_FIELDS = tuple(f.name for f in fields(SizeClass))
_class_figures = itemgetter(*_CLASS_FIELDS)


def _group(group: BlockGroup) -> dict[str, Any]:
    row = _known(group)
    row["pool"] = group.pool.value
    if group.private_pool is not None:
        row["private_pool"] = [group.private_pool.first, group.private_pool.second]
    for name in _CLASSES:
        row[name] = [{n: getattr(c, n) for n in _CLASS_FIELDS} for c in row[name]]
    return row


def map_of(row: Row) -> BlockMap:
    return BlockMap(row["sequence"], row["time_us"], tuple(_group_of(g) for g in row["groups"]), row["call_us"])


def _group_of(row: Row) -> BlockGroup:
    given = {"requested_bytes": None, "rounding_bytes": None, **row}
    given["pool"] = Pool(row["pool"])
    private = row.get("private_pool")
    given["private_pool"] = None if private is None else PrivatePool(*private)
    for name in _CLASSES:
        given[name] = tuple(SizeClass(*_class_figures(c)) for c in row[name])
    return BlockGroup(**given)


# events


def event_row(event: Event, received_us: int) -> dict[str, Any]:
    return {**_all(event), "kind": event.kind.value, "received_us": received_us}


def event_of(row: Row) -> EventRecord:
    given = _given(Event, row)
    return EventRecord(Event(**{**given, "kind": EventKind(row["kind"])}), row["received_us"])


# what was judged


def forecast_row(allocator_id: int, forecast: Forecast, made_us: int) -> dict[str, Any]:
    cause = forecast.cause.value if forecast.cause else None
    return {
        **_all(forecast),
        "allocator_id": allocator_id,
        "made_us": made_us,
        "state": forecast.state.value,
        "cause": cause,
    }


def forecast_of(row: Row) -> ForecastRecord:
    given = _given(Forecast, row)
    given["state"], given["cause"] = State(row["state"]), _cause(row["cause"])
    return ForecastRecord(AllocatorRef(row["process_id"], row["device_uuid"]), Forecast(**given), row["made_us"])


def alert_row(alert: AlertRecord) -> dict[str, Any]:
    return {**_all(alert), "cause": alert.cause.value if alert.cause else None, "labels": dict(alert.labels)}


def alert_of(row: Row) -> AlertRecord:
    given = _given(AlertRecord, row)
    return AlertRecord(**{**given, "cause": _cause(row["cause"])})


def _cause(value: str | None) -> Cause | None:
    return None if value is None else Cause(value)
