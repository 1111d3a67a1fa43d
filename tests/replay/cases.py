"""Cases of a folder: what PyTorch's allocator did with a profile's requests under some settings, as a history that it recorded."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from allocscope.allocator.settings import parse_settings
from allocscope.allocator.simulator.what_if import Source
from allocscope.allocator.snapshot import DEFAULT_POOL, SnapshotBlock, SnapshotSegment, TraceEntry


@dataclass(frozen=True, slots=True)
class Case:
    """One profile under one of its settings."""

    name: str
    profile: str
    source: Source
    stats: dict[str, int]
    """memory_stats() in the end."""
    streams: int
    empty_caches: int
    """How often the program called empty_cache; what that gives nothing back leaves no trace."""


def read_cases(folder: Path) -> dict[str, list[Case]]:
    """By profile."""
    found = defaultdict(list)
    for path in sorted(folder.glob("*-*.json.gz")):
        case = case_of(json.loads(gzip.decompress(path.read_bytes())), path.name.removesuffix(".json.gz"))
        found[case.profile].append(case)
    return dict(found)


def case_of(told: dict[str, Any], name: str) -> Case:
    """From its JSON."""
    expect, fraction = told["expect"], told["memory_fraction"]
    return Case(
        name=name,
        profile=name.rpartition("-")[0],
        source=Source(
            trace=tuple(_entry(at, *entry) for at, entry in enumerate(expect["trace"])),
            segments=tuple(map(_segment, expect["segments"])),
            settings=parse_settings(told["conf"]),
            conf=told["conf"],
            device_total_bytes=told["device_total"],
            other_used=told["device_other"],
            memory_fraction=fraction,
        ),
        stats=expect["stats"],
        streams=len({entry[3] for entry in expect["trace"]}),
        empty_caches=sum(request[0] == "e" for request in told["requests"]),
    )


def _entry(at: int, action: str, where: int, size: int, stream: int) -> TraceEntry:
    if action == "oom":
        return TraceEntry(action, 0, size, stream, at, DEFAULT_POOL, where)
    return TraceEntry(action, where, size, stream, at, DEFAULT_POOL, None)


def _segment(told: dict[str, Any]) -> SnapshotSegment:
    blocks = (SnapshotBlock(address, size, requested, state) for address, size, requested, state in told["blocks"])
    return SnapshotSegment(
        device=0,
        address=told["address"],
        total_size=told["total_size"],
        stream=told["stream"],
        segment_type=told["type"],
        pool_id=DEFAULT_POOL,
        is_expandable=told["expandable"],
        blocks=tuple(blocks),
    )
