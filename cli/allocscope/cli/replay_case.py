"""`allocscope replay --requests` and `--golden`: requests that were written down with all that they need."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from allocscope.allocator.errors import ReplayError
from allocscope.allocator.simulator import Simulator
from allocscope.allocator.simulator.replay import Case, Failure, case_of, golden_of, replay_golden, serve, simulator_of
from allocscope.allocator.snapshot import GZIP_MAGIC, TraceEntry
from allocscope.model.figures import size

LIMIT_BYTES = 1 << 30


def requests_text(path: str, *, as_json: bool) -> str:
    """One object: settings, a device, and requests. ReplayError, SettingsError."""
    case = case_of(_parsed(_unpacked(path), path), path)
    simulator = simulator_of(case)
    failure = serve(simulator, case.requests, path)
    return json.dumps(case_as_json(case, simulator, failure)) if as_json else case_as_text(case, simulator, failure)


def case_as_json(case: Case, simulator: Simulator, failure: Failure | None) -> dict[str, object]:
    """How it ended, and how it came to that."""
    return {
        "conf": case.conf,
        "trace": [_entry(entry) for entry in simulator.trace],
        "stats": simulator.stats(),
        "segments": [_segment(segment) for segment in simulator.segments()],
        "oom": failure and {"at": failure.at, "requested_bytes": failure.requested_bytes, "message": failure.message},
    }


def case_as_text(case: Case, simulator: Simulator, failure: Failure | None) -> str:
    """The figures that matter, a line each."""
    stats = simulator.stats()
    end = f"OutOfMemoryError at request {failure.at}: {failure.message}" if failure else "every request was served"
    peak, least = stats["reserved_bytes.all.peak"], stats["allocated_bytes.all.peak"]
    got, returned = stats["num_device_alloc"], stats["num_device_free"]
    return (
        f"{len(case.requests)} requests, torch {case.version}, settings {case.conf or 'default'}: {end}\n"
        f"reserved at most {size(peak)}, allocated at most {size(least)}\n"
        f"{stats['num_alloc_retries']} retries; {got} segments or page ranges got from the driver, {returned} given back"
    )


def _entry(entry: TraceEntry) -> list[object]:
    where = entry.device_free if entry.action == "oom" else entry.address
    return [entry.action, where, entry.size, entry.stream]


def _segment(segment: Mapping[str, Any]) -> dict[str, object]:
    return {
        "address": segment["address"],
        "total_size": segment["total_size"],
        "stream": segment["stream"],
        "type": segment["segment_type"],
        "expandable": segment["is_expandable"],
        "blocks": [[b["address"], b["size"], b["requested_size"], b["state"]] for b in segment["blocks"]],
    }


def golden_text(path: str, *, as_json: bool) -> str:
    """An object a line. ReplayError, SettingsError."""
    lines = [_parsed(line, path) for line in _unpacked(path).splitlines()]
    rows = replay_golden(golden_of(lines, path), path)
    if as_json:
        return json.dumps({"rows": [{"addr": row.address, "stats": row.stats} for row in rows]})
    return f"{len(rows)} requests replayed (--json tells each)"


def _unpacked(path: str) -> bytes:
    try:
        with Path(path).open("rb") as raw:
            packed = raw.peek(len(GZIP_MAGIC)).startswith(GZIP_MAGIC)
            data = (gzip.GzipFile(fileobj=raw) if packed else raw).read(LIMIT_BYTES + 1)
    except EOFError as error:
        raise ReplayError(path, "cut off: its gzip ends in the middle; copy it again") from error
    except (OSError, zlib.error) as error:
        raise ReplayError(path, f"cannot be read ({getattr(error, 'strerror', None) or error})") from error
    if len(data) > LIMIT_BYTES:
        raise ReplayError(path, f"unpacks to more than {LIMIT_BYTES} bytes")
    return data


def _parsed(text: bytes, path: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ReplayError(path, f"is not JSON, packed by gzip or not ({error})") from error
