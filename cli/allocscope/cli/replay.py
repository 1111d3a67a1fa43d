"""`allocscope replay`: what PyTorch's allocator would do with requests that were written down."""

from __future__ import annotations

import argparse
import gzip
import json
import sys
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from allocscope.allocator.diagnosis.failure import size
from allocscope.allocator.errors import AllocatorError, ReplayError
from allocscope.allocator.recording import SUFFIX, read_recording
from allocscope.allocator.settings import parse_settings_to_try
from allocscope.allocator.simulator import Simulator
from allocscope.allocator.simulator.replay import Case, Failure, case_of, golden_of, replay_golden, serve, simulator_of
from allocscope.allocator.simulator.rules import is_version
from allocscope.allocator.simulator.what_if import Source, WhatIf, what_if
from allocscope.allocator.snapshot import TraceEntry, read_snapshot
from allocscope.cli.figures import read_size

HELP = "what PyTorch's allocator would do with requests that were written down"
LIMIT_BYTES = 1 << 30


def main(arguments: list[str]) -> int:
    """0: replayed, to the end or to an OutOfMemoryError; 2: the file cannot be used."""
    parser = _parser()
    asked = parser.parse_args(arguments)
    if sum(map(bool, (asked.file, asked.requests, asked.golden))) != 1:
        parser.error("name a FILE, or --requests, or --golden")
    if not asked.file and (asked.conf or asked.torch or asked.device_total or asked.device_other is not None):
        parser.error(
            "--conf, --device-total, --device-other and --torch are for a FILE; requests written down have their own"
        )
    try:
        if asked.golden:
            text = _golden(asked.golden, asked.json)
        elif asked.requests:
            text = _requests(asked.requests, asked.json)
        else:
            text = _file(asked)
    except AllocatorError as error:
        print(f"allocscope replay: {error}", file=sys.stderr)
        return 2
    print(text)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="allocscope replay", description=HELP)
    parser.add_argument("file", nargs="?", metavar="FILE", help="a snapshot with its history, or RUN.run.json")
    parser.add_argument("--requests", metavar="CASE.json.gz", help="one object: settings, a device, and requests")
    parser.add_argument("--golden", metavar="RUN.jsonl.gz", help="an object a line: a header, then a request each")
    parser.add_argument(
        "--conf",
        action="append",
        default=[],
        help="other settings to try on FILE's requests, as PYTORCH_CUDA_ALLOC_CONF takes them; may be given several times",
    )
    parser.add_argument(
        "--device-total", type=read_size, metavar="BYTES", help="of FILE's device; default: what FILE shows"
    )
    parser.add_argument(
        "--device-other", type=read_size, metavar="BYTES", help="of it, in use by others than the allocator"
    )
    parser.add_argument("--torch", metavar="VERSION", help="FILE's; default: what explains it best")
    parser.add_argument("--json", action="store_true", help="one JSON object; sizes in bytes")
    return parser


def _file(asked: argparse.Namespace) -> str:
    for conf in asked.conf:
        parse_settings_to_try(conf)
    if asked.torch and not is_version(asked.torch):
        raise ReplayError(asked.torch, "is not a version of PyTorch, such as 2.14.1")
    sources = _sources(asked)
    found = {
        index: what_if(source, asked.conf, version=asked.torch) for index, source in sources.items() if source.trace
    }
    if not found:
        raise ReplayError(asked.file, "has no history; record one with torch.cuda.memory._record_memory_history()")
    return json.dumps(what_ifs_as_json(found)) if asked.json else what_ifs_as_text(found)


def _sources(asked: argparse.Namespace) -> dict[int, Source]:
    """What FILE says of each device."""
    path, total, other = asked.file, asked.device_total, asked.device_other
    if path.endswith(SUFFIX):
        run = read_recording(path)
        return {
            run.device_index: Source(
                trace=run.trace,
                segments=run.segments,
                settings=run.settings,
                conf=run.conf,
                device_total_bytes=total or run.device_total_bytes,
                other_used=run.other_used_at if other is None else other,
            )
        }
    try:
        snapshot = read_snapshot(Path(path).read_bytes(), path)
    except OSError as error:
        raise ReplayError(path, f"cannot be read ({error.strerror or error})") from error
    return {
        index: Source(
            trace=trace,
            segments=tuple(segment for segment in snapshot.segments if segment.device == index),
            settings=snapshot.settings,
            conf=snapshot.conf,
            device_total_bytes=total,
            other_used=other or 0,
        )
        for index, trace in enumerate(snapshot.traces)
    }


def what_ifs_as_json(found: Mapping[int, WhatIf]) -> dict[str, object]:
    """By device: how well the history is understood, and what came of its requests under each of the settings."""
    return {
        "devices": {
            str(index): {
                "torch": each.history.version,
                "device_total_bytes": each.device_total_bytes,
                "total_is_shown": each.total_is_shown,
                "recorded_peak_bytes": each.recorded_peak_bytes,
                "requests": len(each.history.asked),
                "entries": each.history.entries,
                "explained": each.history.explained,
                "exact": each.history.exact,
                "recorded_oom_at": each.history.failed_at,
                "replays": [{"conf": conf, **asdict(outcome)} for conf, outcome in each.outcomes],
            }
            for index, each in found.items()
        }
    }


def what_ifs_as_text(found: Mapping[int, WhatIf]) -> str:
    """A line for each of the settings."""
    return "\n".join(line for index, each in found.items() for line in _what_if_lines(index, each))


def _what_if_lines(index: int, each: WhatIf) -> Iterator[str]:
    history, total = each.history, each.device_total_bytes
    device = "of unknown size, so nothing can fail (--device-total)" if total is None else f"of {size(total)}"
    if each.total_is_shown:
        device = f"{device} for this allocator, as its last OutOfMemoryError shows"
    yield f"device {index}, {device}: {len(history.asked)} requests, by the rules of torch {history.version}"
    yield (
        "every entry of the history is explained to the byte"
        if history.exact
        else f"the history is explained up to entry {history.explained} of {history.entries}: what follows is an estimate"
    )
    if (peak := each.outcomes[0][1].reserved_peak_bytes) != each.recorded_peak_bytes:
        why = "what others held of the device changed, too" if each.total_is_shown else "the history does not show all"
        yield f"but {size(each.recorded_peak_bytes)} was reserved at most then, and {size(peak)} is here: {why}; take it for an estimate"
    for at, (conf, outcome) in enumerate(each.outcomes):
        name = f"{conf or 'default'}{' (as recorded)' if at == 0 else ''}"
        end = (
            "every request served" if outcome.failed_at is None else f"OutOfMemoryError at request {outcome.failed_at}"
        )
        yield (
            f"  {name}: {end}; reserved at most {size(outcome.reserved_peak_bytes)}, allocated at most "
            f"{size(outcome.allocated_peak_bytes)}; {_many(outcome.num_alloc_retries, 'retry', 'retries')}, "
            f"{_many(outcome.num_device_alloc, 'driver call', 'driver calls')} to get memory"
        )
    if history.failed_at is not None and any(outcome.failed_at is None for _, outcome in each.outcomes[1:]):
        yield (
            f"the recorded job ran out at request {history.failed_at}: what it would have asked for later is not known, "
            "so that one served to the end may still run out then"
        )


def _many(count: int, one: str, more: str) -> str:
    return f"{count} {one if count == 1 else more}"


def _requests(path: str, as_json: bool) -> str:
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
        f"reserved at most {peak / 2**20:,.1f} MiB, allocated at most {least / 2**20:,.1f} MiB\n"
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


def _golden(path: str, as_json: bool) -> str:
    lines = [_parsed(line, path) for line in _unpacked(path).splitlines()]
    rows = replay_golden(golden_of(lines, path), path)
    if as_json:
        return json.dumps({"rows": [{"addr": row.address, "stats": row.stats} for row in rows]})
    return f"{len(rows)} requests replayed (--json tells each)"


def _unpacked(path: str) -> bytes:
    try:
        with gzip.open(Path(path)) as file:
            data = file.read(LIMIT_BYTES + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise ReplayError(path, f"cannot be read as gzip ({getattr(error, 'strerror', None) or error})") from error
    if len(data) > LIMIT_BYTES:
        raise ReplayError(path, f"unpacks to more than {LIMIT_BYTES} bytes")
    return data


def _parsed(text: bytes, path: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ReplayError(path, f"is not JSON ({error})") from error
