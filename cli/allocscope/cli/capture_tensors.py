"""Who held the live tensors, by a capture's file, and what grew between two of them."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from allocscope.allocator.errors import AllocatorError
from allocscope.allocator.snapshot import read_snapshot
from allocscope.cli.capture_files import FileProblem
from allocscope.cli.capture_owner import printable, whose
from allocscope.cli.snapshot_file import snapshot_data
from allocscope.model.figures import duration, size
from allocscope.model.tensors import Growth, TensorKind, TensorReport, growth

GROUPS, ROWS, GROWN = 15, 10, 20
"""Of each table; --json has all."""


@dataclass(frozen=True, slots=True)
class Told:
    """What a file says."""

    whose: str
    process_id: str | None
    report: TensorReport


def read_tensors(path: Path) -> Told:
    """FileProblem: it cannot be read, or tells of no tensors. Nothing in it is run."""
    collects = gc.isenabled()
    gc.disable()  # a large snapshot is many values and no cycles
    try:
        snapshot = read_snapshot(snapshot_data(path), str(path), tolerant=True)
        capture = snapshot.capture
        if capture is None:
            raise FileProblem(f"{path} is no capture of Allocscope, and so tells nothing of tensors")
        if "tensors" not in capture:
            raise FileProblem(f"{path} tells nothing of tensors: order one with --tensors")
        process = capture.get("process")
        process_id = process.get("process_id") if isinstance(process, dict) else None
        report = TensorReport.from_plain(capture["tensors"])
        return Told(whose(capture), process_id if isinstance(process_id, str) else None, report)
    except AllocatorError as error:
        raise FileProblem(str(error)) from error
    except ValueError as error:
        raise FileProblem(f"{path}: {printable(error)}") from error
    finally:
        if collects:
            gc.enable()


def report_text(report: TensorReport) -> str:
    """Totals by kind, what no Python object holds, and the largest storages with who holds them."""
    if report.absence is not None:
        return f"tensors were not looked at: {printable(report.absence)}"
    tables = _totals(report), _groups(report), _rows(report)
    return "\n\n".join([_completeness(report), *(text for rows in tables if (text := _table(rows)))])


def _completeness(report: TensorReport) -> str:
    took = f"looked at within {duration(report.took_us / 1e6)}"
    if report.complete and not report.left_out:
        return f"live tensors, {took}"
    return f"live tensors, {took}, not all: {printable('; '.join(report.left_out) or 'the time was over')}"


def _totals(report: TensorReport) -> Iterator[Sequence[str]]:
    yield "device", "kind", "storages", "size"
    for total in report.totals:
        if total.kind is not TensorKind.NOT_HELD:
            storages = "" if total.storage_count is None else f"{total.storage_count:,}"
            yield str(total.device_index), _words(total.kind), storages, size(total.bytes)
    for device in report.devices:
        where = str(device.device_index)
        if device.not_held_bytes is not None:
            yield where, "held by no Python object", "", size(device.not_held_bytes)
        if device.requested_bytes is not None:
            yield where, "requested of the allocator", "", size(device.requested_bytes)


def _groups(report: TensorReport) -> Iterator[Sequence[str]]:
    """Storages that are held alike and look alike."""
    if not report.groups:
        return
    yield "size", "storages", "kind", "shape", "held alike by"
    for group in report.groups[:GROUPS]:
        holder = group.holder or "nobody by name"
        yield (
            size(group.bytes),
            f"{group.storage_count:,}",
            _words(group.kind),
            printable(group.view.text) if group.view else "",
            printable(f"{holder} ({group.place})" if group.place else holder),
        )
    if left := report.groups[GROUPS:]:
        yield size(sum(group.bytes for group in left)), "", "", "", f"{len(left):,} more"


def _rows(report: TensorReport) -> Iterator[Sequence[str]]:
    """The largest storages, one by one."""
    if not report.rows:
        return
    yield "size", "device", "kind", "tensors", "shapes", "held by"
    for row in report.rows[:ROWS]:
        yield (
            size(row.bytes),
            str(row.device_index),
            _words(row.kind),
            str(row.tensor_count),
            _some([view.text for view in row.views], row.more_views),
            _some([holder.text for holder in row.holders], row.more_holders) or "nobody by name",
        )
    left = report.rows[ROWS:]
    if more := len(left) + report.more_rows:
        yield size(sum(row.bytes for row in left) + report.more_rows_bytes), "", "", "", "", f"{more:,} more"


def _some(texts: Sequence[str], more: int) -> str:
    shown = [printable(text, 200) for text in texts[:3]]
    more += len(texts) - len(shown)
    return ", ".join([*shown, *([f"and {more} more"] if more else [])])


def grown(older: Told, newer: Told) -> tuple[Growth, ...]:
    """What grew, most bytes first."""
    return growth(older.report, newer.report)


def plain_growth(one: Growth) -> dict[str, Any]:
    """For JSON."""
    return {
        "kind": one.kind.value,
        "holder": one.holder,
        "place": one.place,
        "view": one.view.text if one.view else None,
        "storage_count": one.storage_count,
        "bytes": one.bytes,
    }


def growth_text(older: Told, newer: Told) -> str:
    """The same for people."""
    found = grown(older, newer)
    heading = f"what grew in {duration((newer.report.time_us - older.report.time_us) / 1e6)}"
    if older.process_id != newer.process_id:
        heading += " (of another process: the earlier file is of another rank, or of before a restart)"
    lines = [f"  {_growth(one)}" for one in found[:GROWN]] or ["  nothing"]
    more = [f"  and {len(found) - GROWN:,} more"] if len(found) > GROWN else []
    return "\n".join([heading, *lines, *more])


def _growth(one: Growth) -> str:
    return printable(one.text + (f", in {one.place}" if one.place else ""))


def _words(kind: TensorKind) -> str:
    return kind.value.replace("_", " ")


def _table(rows: Iterator[Sequence[str]]) -> str:
    found = list(rows)
    if not found:
        return ""
    widths = [max(map(len, column)) for column in zip(*found, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in found)
