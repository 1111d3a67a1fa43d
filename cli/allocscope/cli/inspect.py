"""`allocscope inspect`: the bill and the holes of a PyTorch snapshot."""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from allocscope.allocator.diagnosis import DeviceDiagnosis, Diagnosis, Failure, Finding, Hole, Moment, diagnose
from allocscope.allocator.diagnosis.holes import largest_holes, site_of, sites
from allocscope.allocator.errors import AllocatorError
from allocscope.allocator.headroom import Headroom
from allocscope.allocator.snapshot import Snapshot, read_snapshot
from allocscope.cli.figures import read_size
from allocscope.cli.inspect_text import NARROWEST, Look, as_text
from allocscope.cli.prose import prose_width
from allocscope.cli.snapshot_file import snapshot_data
from allocscope.model import BlockGroup, Line, PrivatePool

HELP = "the bill and the holes of a PyTorch snapshot, and why it ran out"
HOLES = 10
SITES = 20


def main(arguments: list[str]) -> int:
    """0: inspected; 2: the file cannot be read as a snapshot."""
    asked = _parser().parse_args(arguments)
    collects = gc.isenabled()
    gc.disable()  # a large snapshot is many values and no cycles
    try:
        snapshot = read_snapshot(snapshot_data(Path(asked.file)), asked.file, tolerant=True)
        diagnosis = diagnose(snapshot, device_free_bytes=asked.device_free)
        print(json.dumps(as_json(diagnosis, snapshot)) if asked.json else _text(diagnosis, snapshot, asked))
    except AllocatorError as error:
        print(f"allocscope inspect: {error}", file=sys.stderr)
        return 2
    finally:
        if collects:
            gc.enable()
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="allocscope inspect",
        description=f"{HELP}. A snapshot is what torch.cuda.memory._dump_snapshot() writes, or memory_snapshot() "
        "gives, pickled or as JSON, also gzipped; PyTorch 1.13 to 2.14. Nothing in it is run.",
        epilog="example: allocscope inspect snapshot.pickle --device-free 2GiB",
        allow_abbrev=False,
    )
    parser.add_argument("file", metavar="FILE", help="the snapshot; whole, or packed by gzip")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument(
        "--device-free",
        type=read_size,
        metavar="BYTES",
        help="free on the device, for the headroom (default: not known)",
    )
    parser.add_argument("--now", action="store_true", help="show the snapshot as it is, not its last OutOfMemoryError")
    return parser


def _text(diagnosis: Diagnosis, snapshot: Snapshot, asked: argparse.Namespace) -> str:
    return as_text(diagnosis, snapshot, _look(), file=asked.file, now=asked.now)


def _look() -> Look:
    """What standard output can show."""
    terminal = sys.stdout is not None and sys.stdout.isatty()
    encoding = (getattr(sys.stdout, "encoding", None) or "ascii").lower().replace("-", "")
    return Look(
        width=max(shutil.get_terminal_size((100, 24)).columns, NARROWEST),
        colour=terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb",
        ascii_only=not encoding.startswith("utf"),
        prose_width=prose_width(),
    )


def as_json(diagnosis: Diagnosis, snapshot: Snapshot) -> dict[str, Any]:
    """As INTERFACES.md has it, and more; what is not known is null."""
    host = snapshot.host_segments
    return {
        "devices": {str(device.device): _device(device) for device in diagnosis.devices},
        "settings": _plain(snapshot.told_settings),
        "capture": _capture(snapshot.capture),
        "host": {"segments": len(host), "total_bytes": sum(host)} if host else None,
        "findings": [_finding(finding) for finding in diagnosis.findings],
    }


def _capture(told: Mapping[str, Any] | None) -> Any:
    """Whose it is, where it is a capture; `allocscope capture --read` tells of its tensors."""
    if told is None:
        return None
    return {str(key)[:200]: _plain(value) for key, value in told.items() if key != "tensors"}


def _device(device: DeviceDiagnosis) -> dict[str, Any]:
    return _moment(device.now) | {
        "headroom": {
            "device_free_bytes": device.device_free_bytes,
            **_headroom(device.headroom),
            "pools": [_headroom(each) for each in device.headrooms],
        },
        "pools": [_group(group) for group in device.now.groups],
        "sites": [
            {"where": site.where, "bytes": site.bytes, "count": site.count}
            for site in sites(device.now.segments, SITES)
        ],
        "oom": [_failure(failure) for failure in device.failures],
    }


def _moment(moment: Moment) -> dict[str, Any]:
    return {
        "bill": _bill(moment),
        "allocated_bytes": moment.allocated_bytes,
        "segments": len(moment.segments),
        "blocks": moment.block_count,
        "largest_free_block_bytes": moment.largest_free_block_bytes,
        "holes": [_hole(hole) for hole in largest_holes(moment.segments, HOLES)],
    }


def _bill(moment: Moment) -> dict[str, int | None]:
    lines = (Line.REQUESTED, Line.ROUNDING, Line.AWAITING_FREE, Line.STRANDED, Line.RELEASABLE, Line.PRIVATE)
    return {line.value: moment.known_bytes_of(line) for line in lines} | {"reserved": moment.reserved_bytes}


def _group(group: BlockGroup) -> dict[str, Any]:
    return {
        "pool": group.pool.value,
        "stream": group.stream,
        "private_pool": _pool(group.private_pool),
        "expandable": group.expandable,
        "segments": group.segment_count,
        "bill": {
            "requested": group.requested_bytes,
            "rounding": group.rounding_bytes,
            "awaiting_free": group.awaiting_free_bytes,
            "stranded": group.stranded_bytes,
            "releasable": group.releasable_bytes,
            "private": group.private_bytes,
            "reserved": group.reserved_bytes,
        },
        "allocated_bytes": group.allocated_bytes,
        "largest_free_block_bytes": group.largest_free_block_bytes or 0,
    }


def _headroom(headroom: Headroom) -> dict[str, Any]:
    return {
        "pool": headroom.pool.value,
        "stream": headroom.stream,
        "private_pool": _pool(headroom.private_pool),
        "request_bytes": headroom.request_bytes,
        "way": headroom.way.value,
    }


def _pool(private_pool: PrivatePool | None) -> list[int] | None:
    return None if private_pool is None else [private_pool.first, private_pool.second]


def _hole(hole: Hole) -> dict[str, Any]:
    return {
        "address": hole.address,
        "bytes": hole.size,
        "segment": hole.segment.address,
        "segment_bytes": hole.segment.total_size,
        "pool": hole.segment.segment_type,
        "stream": hole.segment.stream,
        "pinned_by": [
            {"address": pin.address, "bytes": pin.size, "state": pin.state, "where": site_of(pin.stack)}
            for pin in hole.pins[:HOLES]
        ],
        "pinned_by_count": len(hole.pins),
        "pinned_by_bytes": hole.pinned_by_bytes,
    }


def _failure(failure: Failure) -> dict[str, Any]:
    entry = failure.entry
    then = _moment(failure.moment) if failure.moment else {"bill": None}
    return {
        "entry": failure.entry_index,
        "at_us": entry.time_us or None,
        "requested_bytes": None if failure.entry_index is None else entry.size,
        "segment_bytes": failure.segment_bytes,
        "stream": None if failure.entry_index is None else entry.stream,
        "device_free_bytes": entry.device_free,
        "where": site_of(entry.stack),
        "verdict": failure.verdict.value,
        "why": "; ".join(failure.why),
    } | then


def _finding(finding: Finding) -> dict[str, Any]:
    return {"kind": finding.kind, "device": finding.device, "segment": finding.address, "text": finding.text}


def _plain(value: Any, depth: int = 0) -> Any:
    """What JSON can hold of settings as a snapshot tells them."""
    if isinstance(value, dict) and depth < 3:
        return {str(key)[:200]: _plain(item, depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)) and depth < 3:
        return [_plain(item, depth + 1) for item in value]
    if value is None or isinstance(value, (bool, str)) or (isinstance(value, int) and value.bit_length() <= 64):
        return value
    return value if isinstance(value, float) and value - value == 0 else str(type(value).__name__)
