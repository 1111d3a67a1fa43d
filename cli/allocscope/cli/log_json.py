"""Events, and what they came to, as JSON: sizes in bytes, moments in unix microseconds; what is not known is left out or null."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from allocscope.allocator.chronicle.choice import how_served
from allocscope.allocator.chronicle.events import Allocated, Event, Kind
from allocscope.allocator.chronicle.history import DeviceHistory
from allocscope.allocator.chronicle.judgement import judge
from allocscope.allocator.chronicle.standing import Level, class_bytes
from allocscope.allocator.chronicle.tally import StreamUse, Tally
from allocscope.allocator.snapshot import DEFAULT_POOL
from allocscope.cli.log_summary import Account


def event_as_json(event: Event) -> dict[str, Any]:
    """One event; `entry`: of the device's history, from 0, or of a log the line, from 1."""
    told: dict[str, Any] = dict(zip(event._fields, event, strict=True))
    pool = told.pop("pool")
    told |= {"kind": event.kind.value, "device": pool.device, "stream": pool.stream, "pool": pool.name}
    if pool.private not in (None, DEFAULT_POOL):
        told["private_pool"] = list(pool.private)
    if isinstance(event, Allocated):
        told["served_by"] = how_served(event)
    return {key: value for key, value in told.items() if value is not None}


def end_as_json(history: DeviceHistory) -> dict[str, Any]:
    """The last object of a device: whether what was told is to be believed."""
    return {"kind": "end", "device": history.device, **verification_as_json(history)}


def verification_as_json(history: DeviceHistory) -> dict[str, Any]:
    """How what the history came to agrees with the snapshot."""
    difference = history.difference()
    return {
        "entries": history.entries,
        "exact": history.estimate_from is None,
        "estimate_from_entry": history.estimate_from,
        "contradictions": history.contradictions,
        "different_blocks": 0 if difference is None else difference.blocks,
    }


def account_as_json(account: Account) -> dict[str, Any]:
    """What a device's events, or a log's, came to; null: not told."""
    tally, history, standing = account.tally, account.history, account.standing
    now, peak = (None, None) if standing is None else (standing.now(), standing.peak())
    recorded = history is not None
    return {
        "device": account.device,
        "lines": account.lines,
        "history": None if history is None else verification_as_json(history),
        "from_us": tally.from_us,
        "to_us": tally.to_us,
        "duration_s": tally.duration_s,
        "allocations": tally.allocations,
        "allocations_per_s": tally.a_second(tally.allocations),
        "frees": tally.frees,
        "frees_per_s": tally.a_second(tally.frees),
        "splits": _told(tally.splits, recorded=recorded),
        "splits_per_s": tally.a_second(tally.splits) if recorded else None,
        "merges": tally.merges,
        "merges_per_s": tally.a_second(tally.merges),
        "served_by": {"cached": tally.cached, "split": tally.split_cached, "driver": tally.driver}
        if recorded
        else None,
        "size_classes": _classes(tally, now, peak),
        "streams": [_stream(stream, use, recorded=recorded) for stream, use in tally.streams.items()],
        "waits": _waits(tally) if recorded else None,
        "segments": [{"size": size, **asdict(flow)} for size, flow in sorted(tally.segments.items())]
        if recorded
        else None,
        "pages": asdict(tally.pages) if recorded else None,
        "device_calls_per_s": tally.a_second(tally.flow.got + tally.flow.given_back) if recorded else None,
        **({kind.value: asdict(tally.of(kind)) if recorded else None for kind in _CAUSES}),
        "ooms": tally.ooms,
        "last_oom": None if tally.last_oom is None else event_as_json(tally.last_oom),
        "retries": tally.retries if not recorded else None,
        "used_bytes": now and now.used_bytes,
        "used_peak_bytes": peak and peak.used_bytes,
        "reserved_bytes": now and now.reserved_bytes,
        "reserved_bytes_at_peak": peak and peak.reserved_bytes,
        "findings": [
            {"about": finding.subject.value, "normal": finding.normal, "text": finding.text}
            for finding in judge(tally, peak)
        ],
    }


_CAUSES = (Kind.FLUSH, Kind.EMPTY_CACHE, Kind.GARBAGE_COLLECTION, Kind.MADE_ROOM, Kind.POOL_END)


def _told(count: int, *, recorded: bool) -> int | None:
    return count if recorded or count else None


def _stream(stream: int | None, use: StreamUse, *, recorded: bool) -> dict[str, Any]:
    return {"stream": stream} | asdict(use) | ({} if recorded else {"waits": None})


def _waits(tally: Tally) -> dict[str, Any]:
    over = tally.waits_over
    return {
        "count": tally.waits,
        "over": over,
        "mean_us": round(tally.waited_us / over) if over and tally.longest_wait_us is not None else None,
        "longest_us": tally.longest_wait_us,
        "peak_bytes": tally.waiting_peak_bytes,
    }


def _classes(tally: Tally, now: Level | None, peak: Level | None) -> list[dict[str, Any]]:
    columns: dict[str, Sequence[int] | None] = {
        "allocations": tally.allocations_by_class,
        "frees": tally.frees_by_class,
        "splits": None if now is None else tally.splits_by_class,
        "merges": tally.merges_by_class,
        "in_use": None if now is None else now.blocks,
        "in_use_at_peak": None if peak is None else peak.blocks,
    }
    return [
        {"up_to_bytes": class_bytes(index)}
        | {name: None if column is None else column[index] for name, column in columns.items()}
        for index in _occurring(columns.values())
    ]


def _occurring(columns: Iterable[Sequence[int] | None]) -> list[int]:
    known = [column for column in columns if column]
    return [index for index in range(len(known[0])) if any(column[index] for column in known)]
