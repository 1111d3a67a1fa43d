"""What the API says, as JSON: figures that are not known are null, never 0. Values in, values out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from allocscope.model import BillEntry, DeviceBill, DeviceReading, Forecast, Line, Process, State
from allocscope.storage.records import (
    AlertRecord,
    EventRecord,
    ForecastRecord,
    JobRecord,
    NodeRecord,
    Point,
    ProcessRecord,
    ReadingRecord,
)

Json = dict[str, Any]


def node(record: NodeRecord, *, connected: bool, clock_offset_us: int | None) -> Json:
    """A node, and what this collector knows of its stream."""
    return {
        "node": record.node,
        "daemon_id": record.daemon_id,
        "version": record.version,
        "metrics_address": record.metrics_address,
        "connected": connected,
        "clock_offset_s": None if clock_offset_us is None else round(clock_offset_us / 1e6, 3),
        "first_received_us": record.first_received_us,
        "last_received_us": record.last_received_us,
    }


def device(record: ReadingRecord, owners: Mapping[str, Process]) -> Json:
    """A device with its bill and who uses it."""
    reading = record.reading
    return {
        **_where(record),
        "parent_uuid": reading.device.parent_uuid,
        "total_bytes": reading.device.total_bytes,
        "free_bytes": reading.free_bytes,
        "driver_bytes": reading.driver_bytes,
        "time_us": reading.time_us,
        "received_us": record.received_us,
        "from_nvml": reading.from_nvml,
        "problem": reading.problem,
        "problem_kind": reading.problem_kind,
        "bill": bill(reading.bill, owners),
        "processes": _users(reading, owners),
    }


def _users(reading: DeviceReading, owners: Mapping[str, Process]) -> list[Json]:
    """Who uses a device; those without a process_id have no probe."""
    return [
        {
            "pid": process.pid,
            "name": process.name,
            "used_bytes": process.used_bytes,
            **_owner(process.process_id, owners),
            "owner": asdict(process.owner) if process.owner else None,
        }
        for process in reading.processes
    ]


def _where(record: ReadingRecord) -> Json:
    device_ = record.device
    return {"node": record.node, "gpu": device_.index, "uuid": device_.uuid, "model": device_.model}


def bill(whole: DeviceBill | None, owners: Mapping[str, Process]) -> Json | None:
    """The lines of a device, in the order of DESIGN.md; they add up to its total."""
    if whole is None:
        return None
    order = list(Line)
    entries = sorted(whole.entries, key=lambda entry: (order.index(entry.line), entry.process_id or ""))
    return {"total_bytes": whole.total_bytes, "lines": [_entry(entry, owners) for entry in entries]}


def _entry(entry: BillEntry, owners: Mapping[str, Process]) -> Json:
    return {"line": entry.line.value, "bytes": entry.bytes, "exact": entry.exact, **_owner(entry.process_id, owners)}


def _owner(process_id: str | None, owners: Mapping[str, Process]) -> Json:
    process = owners.get(process_id or "")
    return {
        "process_id": process_id,
        "job": process.job if process else None,
        "rank": process.rank if process else None,
    }


def device_bill(record: ReadingRecord, owners: Mapping[str, Process]) -> Json:
    """A device's bill and who uses it, apart from what else is known of it."""
    return {
        **_where(record),
        "time_us": record.reading.time_us,
        "bill": bill(record.reading.bill, owners),
        "processes": _users(record.reading, owners),
    }


def forecast(foreseen: Forecast | None) -> Json | None:
    """What is foreseen of an allocator."""
    if foreseen is None:
        return None
    return {
        "time_us": foreseen.time_us,
        "state": foreseen.state.value,
        "cause": foreseen.cause.value if foreseen.cause else None,
        "headroom_bytes": foreseen.headroom_bytes,
        "request_bytes": foreseen.request_bytes,
        "margin_ratio": foreseen.margin_ratio,
        "seconds_to_oom": foreseen.seconds_to_oom,
        "summary": foreseen.summary,
    }


def allocator(
    uuid: str, owner: ProcessRecord, foreseen: Forecast | None, reading: ReadingRecord | None, *, live: bool
) -> Json:
    """One allocator of a job, with the bill of its device."""
    process = owner.process
    whole = reading.reading.bill if reading and live else None
    return {
        "process_id": process.process_id,
        "rank": process.rank,
        "pid": process.pid,
        "node": owner.node,
        "gpu": reading.device.index if reading else None,
        "uuid": uuid,
        "live": live,
        "forecast": forecast(foreseen),
        "bill": None
        if whole is None
        else {"total_bytes": whole.total_bytes, "lines": _seen_from(whole, process.process_id)},
    }


def _seen_from(whole: DeviceBill, process_id: str) -> list[Json]:
    """The lines of a device for one process of it: what others with a probe hold are other processes to it."""
    sums: dict[Line, tuple[int, bool]] = {}
    for entry in whole.entries:
        foreign = entry.process_id not in (None, process_id)
        line = Line.OTHER_PROCESSES if foreign else entry.line
        bytes_, exact = sums.get(line, (0, True))
        sums[line] = (bytes_ + entry.bytes, exact and entry.exact)
    return [{"line": line.value, "bytes": sums[line][0], "exact": sums[line][1]} for line in Line if line in sums]


def job(record: JobRecord, allocators: Iterable[Json]) -> Json:
    """A job with the allocator that is worst off."""
    known = list(allocators)
    live = [one for one in known if one["live"]]
    worst = max(live or known, key=_gravity, default=None)
    foreseen = worst["forecast"] if worst and live else None
    return {
        "job_id": record.job,
        "job": record.job,
        "live": bool(live),
        "state": foreseen["state"] if foreseen else None,
        "cause": foreseen["cause"] if foreseen else None,
        "nodes": list(record.nodes),
        "process_count": record.process_count,
        "allocators_live": len(live),
        "allocators_by_state": {state.value: _count(live, state) for state in State},
        "worst": worst,
        "first_received_us": record.first_received_us,
        "last_received_us": record.last_received_us,
    }


def _gravity(one: Json) -> tuple[int, float]:
    foreseen = one["forecast"]
    if foreseen is None:
        return -1, 0.0
    margin = foreseen["margin_ratio"]
    return State(foreseen["state"]).level, -margin if margin is not None else float("-inf")


def _count(allocators: Iterable[Json], state: State) -> int:
    return sum(1 for one in allocators if one["forecast"] and one["forecast"]["state"] == state.value)


def process(record: ProcessRecord, *, live: bool) -> Json:
    """One process of a job."""
    it = record.process
    return {
        "process_id": it.process_id,
        "rank": it.rank,
        "world_size": it.world_size,
        "local_rank": it.local_rank,
        "pid": it.pid,
        "host": it.host,
        "node": record.node,
        "live": live,
        "started_us": it.started_us,
        "stopped_us": record.stopped_us,
        "torch_version": it.torch_version,
        "allocator_conf": it.allocator_conf,
        "program": it.program,
        "first_received_us": record.first_received_us,
        "last_received_us": record.last_received_us,
    }


def event(record: EventRecord) -> Json:
    """What happened."""
    it = record.event
    return {
        "process_id": it.process_id,
        "uuid": it.device_uuid,
        "kind": it.kind.value,
        "time_us": it.time_us,
        "received_us": record.received_us,
        "requested_bytes": it.requested_bytes,
        "device_total_bytes": it.device_total_bytes,
        "device_free_bytes": it.device_free_bytes,
        "dropped_count": it.dropped_count,
        "message": it.message,
    }


def risk(record: ForecastRecord, owner: ProcessRecord, reading: DeviceReading | None) -> Json:
    """An allocator that is not well."""
    return {
        "job_id": owner.process.job,
        "job": owner.process.job,
        "rank": owner.process.rank,
        "process_id": record.allocator.process_id,
        "node": owner.node,
        "gpu": reading.device.index if reading else None,
        "uuid": record.allocator.device_uuid,
        "made_us": record.made_us,
        "forecast": forecast(record.forecast),
    }


def alert(record: AlertRecord) -> Json:
    """An alert from its beginning to its end."""
    return {
        "alert_id": record.alert_id,
        "name": record.name,
        "severity": record.severity,
        "state": record.state,
        "cause": record.cause.value if record.cause else None,
        "job": record.job,
        "at_us": record.at_us,
        "resolved_us": record.resolved_us,
        "updated_us": record.updated_us,
        "labels": dict(record.labels),
        "summary": record.summary,
        "description": record.description,
        "advice": record.advice,
    }


def point(it: Point) -> Json:
    """One bucket of a series."""
    return {
        "time_us": it.time_us,
        "count": it.count,
        "minimum": it.minimum,
        "maximum": it.maximum,
        "mean": it.mean,
        "last": it.last,
    }
