"""Whose a capture is, as its file says it: for people, from values that anybody may have written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from allocscope.cli.figures import moment

_REASONS = {
    "oom": "at an OutOfMemoryError",
    "asked": "since somebody asked for it",
    "forecast": "since its forecast turned at risk",
}


def whose(capture: Mapping[str, Any]) -> str:
    """One line: `a capture of job train, rank 3 (pid 4711 on host), taken 2026-11-30 00:00:43 UTC at an OutOfMemoryError`."""
    process = capture.get("process")
    process = process if isinstance(process, Mapping) else {}
    said = f"a capture of job {_word(process.get('job'))}"
    if type(process.get("rank")) is int:
        said += f", rank {process['rank']}"
    said += f" (pid {_word(process.get('pid'))} on {_word(process.get('host'))})"
    time_us = capture.get("time_us")
    taken = f"taken {moment(time_us)} UTC" if type(time_us) is int else ""
    reason = _REASONS.get(str(capture.get("reason")), "")
    told = " ".join(part for part in (taken, reason) if part)
    problem = capture.get("problem")
    return ", ".join(part for part in (said, told) if part) + (f"; {printable(problem)}" if problem else "")


def printable(text: object, longest: int = 500) -> str:
    """What a terminal may be shown: names come from jobs, and may hold anything."""
    return "".join(letter if letter.isprintable() else "?" for letter in str(text)[:longest])


def _word(value: object) -> str:
    return "?" if value is None or value == "" else printable(value, 200)
