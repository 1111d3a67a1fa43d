"""Captures for people, and as JSON: those that are kept, that were ordered, that were fetched."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from allocscope.cli.ask import Json, Row
from allocscope.cli.capture_owner import printable
from allocscope.cli.capture_tensors import Told, grown, growth_text, plain_growth, report_text
from allocscope.cli.capture_wait import whom
from allocscope.cli.figures import moment
from allocscope.model.figures import size


@dataclass(frozen=True, slots=True)
class Fetched:
    """What came of one capture."""

    about: Json | None
    """As the collector's API gives it; None: it was read from a file."""
    path: Path | None = None
    """Where it is now."""
    told: Told | None = None
    """What it says of tensors, if that was asked."""
    problem: str | None = None
    """Why not all that was asked for is there."""


def kept_rows(got: Json) -> Iterator[Row]:
    """Those that can be fetched."""
    yield "taken (UTC)", "job", "rank", "node", "gpu", "why", "history", "tensors", "size", "id"
    for about in got["items"]:
        yield (
            moment(about["time_us"]),
            printable(about["job"]),
            _number(about["rank"]),
            printable(about["node"]),
            _number(about["gpu"]),
            about["reason"],
            _number(about["history_entries"]),
            "yes" if about["tensors"] else "",
            size(about["snapshot_bytes"] or 0),
            about["capture_id"],
        )


def ordered_text(items: Sequence[Json]) -> str:
    """Those that were ordered, and that nobody waits for."""
    lines = [f"ordered: {whom(about)}, {about['capture_id']}" for about in items]
    return "\n".join([*lines, f"fetch it later: allocscope capture --id {items[0]['capture_id']}"])


def as_json(fetched: Sequence[Fetched], older: Told | None) -> dict[str, Any]:
    """What the API knows of each, with `file`, `problem`, `tensors_report` and `grown` where there are such."""
    return {"items": [_json(each, older) for each in fetched]}


def _json(each: Fetched, older: Told | None) -> dict[str, Any]:
    made: dict[str, Any] = {**(each.about or {}), "file": None if each.path is None else str(each.path)}
    if each.problem is not None:
        made["problem"] = each.problem
    if each.told is not None:
        made["tensors_report"] = each.told.report.to_plain()
        if older is not None:
            made["grown"] = [plain_growth(one) for one in grown(older, each.told)]
    return made


def as_text(fetched: Sequence[Fetched], older: Told | None) -> str:
    """What was got and where, and what it says."""
    return "\n\n".join(_text(each, older) for each in fetched)


def _text(each: Fetched, older: Told | None) -> str:
    parts = [_heading(each)]
    if each.told is not None:
        parts.append(report_text(each.told.report))
        if older is not None:
            parts.append(growth_text(older, each.told))
    elif each.path is not None and each.problem is None:
        parts[0] += f"\nlook into it: allocscope inspect {each.path}"
    return "\n\n".join(parts)


def _heading(each: Fetched) -> str:
    about, lines = each.about, []
    if about is None:
        lines.append(each.told.whose if each.told else "")
    elif each.path is None:
        lines.append(f"{whom(about)}: no snapshot")
    else:
        lines.append(f"{each.path}: {_contents(about)}")
        if about["problem"]:
            lines.append(f"  it lacks something: {printable(about['problem'])}")
    if each.problem is not None:
        lines.append(f"  {printable(each.problem, 2000)}")
    return "\n".join(lines)


def _contents(about: Json) -> str:
    entries = about["history_entries"]
    history = f"{entries:,} entries of history" if entries else "no history"
    taken = "" if about["time_us"] is None else f", taken {moment(about['time_us'])} UTC"
    return f"{whom(about)}{taken}, {size(about['snapshot_bytes'] or 0)}, {history}"


def _number(value: int | None) -> str:
    return "" if value is None else str(value)
