"""Histories told, and where those come from that lie at hand."""

import gzip
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from allocscope.allocator.chronicle.events import Event
from allocscope.allocator.chronicle.history import DeviceHistory
from allocscope.allocator.settings import AllocatorSettings, parse_settings
from allocscope.allocator.snapshot import SnapshotBlock, SnapshotSegment, TraceEntry

MIB = 1 << 20
A = 0x7F0000000000
"""Where segments begin in histories that are made here."""
DEFAULT = AllocatorSettings()


def history(
    trace: Sequence[TraceEntry], segments: Iterable[SnapshotSegment] = (), conf: str = "", **more: Any
) -> DeviceHistory:
    return DeviceHistory(0, tuple(trace), tuple(segments), parse_settings(conf), **more)


def told(
    trace: Sequence[TraceEntry], segments: Iterable[SnapshotSegment] = (), conf: str = "", **more: Any
) -> list[Event]:
    return list(history(trace, segments, conf, **more).events())


def brief(events: Iterable[Event]) -> list[tuple[Any, ...]]:
    """Of each its kind, where it has one its address from A on, and its figures in MiB, in their order."""
    return [_brief(event) for event in events]


def _brief(event: Event) -> tuple[Any, ...]:
    fields: dict[str, Any] = dict(zip(event._fields, event, strict=True))
    values: list[Any] = []
    for name, value in fields.items():
        if name == "address":
            values.append((value - A) / MIB)
        elif name.endswith("_bytes") and value is not None:
            values.append(value / MIB)
        elif name not in ("entry", "time_us", "pool", "kind"):
            values.append(value)
    return (event.kind.value, *values)


def segment(
    address: int,
    blocks: Iterable[tuple[int, int, str]],
    *,
    stream: int = 0,
    small: bool = False,
    pool_id: tuple[int, int] = (0, 0),
    expandable: bool = False,
) -> SnapshotSegment:
    """Of blocks as size, requested size and state: live, waiting or free."""
    at, placed = address, []
    for size, requested, state in blocks:
        placed.append(SnapshotBlock(at, size, requested, _STATES[state]))
        at += size
    kind = "small" if small else "large"
    return SnapshotSegment(0, address, at - address, stream, kind, pool_id, expandable, tuple(placed))


_STATES = {"live": "active_allocated", "waiting": "active_pending_free", "free": "inactive"}


class TruthCase:
    """What the real allocator did with requests: its history, its blocks and its counters afterwards."""

    def __init__(self, path: Path) -> None:
        told: dict[str, Any] = json.loads(gzip.decompress(path.read_bytes()))
        expected = told["expect"]
        self.settings = parse_settings(told["conf"])
        self.stats: dict[str, int] = expected["stats"]
        self.streams = {request[3] for request in told["requests"] if request[0] == "a"}
        self.told = told
        self.room = min(
            int((told["memory_fraction"] or 1) * told["device_total"]), told["device_total"] - told["device_other"]
        )
        self.trace = tuple(
            TraceEntry(
                action, 0 if action == "oom" else where, size, stream, 0, (0, 0), where if action == "oom" else None
            )
            for action, where, size, stream in expected["trace"]
        )
        self.segments = tuple(
            SnapshotSegment(
                0,
                each["address"],
                each["total_size"],
                each["stream"],
                each["type"],
                (0, 0),
                each["expandable"],
                tuple(SnapshotBlock(*block) for block in each["blocks"]),
            )
            for each in expected["segments"]
        )

    def history(self, *, room: bool = True) -> DeviceHistory:
        known = (lambda _: self.room) if room else None
        return DeviceHistory(0, self.trace, self.segments, self.settings, room=known)
