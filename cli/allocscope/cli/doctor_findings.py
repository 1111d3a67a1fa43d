"""What `allocscope doctor` finds: one thing that works or does not, in words, and what to do about it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from allocscope.cli.capture_owner import printable

LONGEST_TEXT = 1000


class State(Enum):
    """How it is."""

    WELL = "well"
    NOTE = "note"
    """It works, and there is something to know."""
    WRONG = "wrong"
    """Something does not work."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    about: str
    """One word: nvml, daemon, jobs, …"""
    state: State
    text: str
    remedy: str | None = None
    """What to do about it."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Its figures, for programs."""


class Unfinished(Exception):  # noqa: N818 (it says what happened)
    """A look that did not come back in its time."""


def look_at_once(looks: Mapping[str, Callable[[], object]], within_s: float) -> dict[str, object]:
    """What each look found, all of them at the same time; where one raised, the exception, and Unfinished where it did not come back.

    Nobody waits for a look that hangs, as on a file system that is away: it is left to its thread.
    """
    found: dict[str, object] = {}

    def look(name: str, do: Callable[[], object]) -> None:
        try:
            found[name] = do()
        except Exception as error:  # noqa: BLE001 (what is wrong with one look must not hide the others)
            found[name] = error

    threads = {name: threading.Thread(target=look, args=(name, do), daemon=True) for name, do in looks.items()}
    for thread in threads.values():
        thread.start()
    until_s = time.monotonic() + within_s
    for thread in threads.values():
        thread.join(max(until_s - time.monotonic(), 0))
    return {name: found.get(name, Unfinished(f"no answer within {within_s:g} s")) for name in looks}


def judged(about: str, seen: object, judge: Callable[[Any], Iterable[Finding]]) -> list[Finding]:
    """What is to be said of what a look found; where it failed, that it did."""
    if isinstance(seen, Unfinished):
        return [
            Finding(about, State.WRONG, f"looking at it hangs: {seen}", "see whether its disk or its driver answers")
        ]
    if isinstance(seen, Exception):
        return [Finding(about, State.WRONG, f"it cannot be looked at: {type(seen).__name__}: {seen}")]
    try:
        return list(judge(seen))
    except (
        KeyError,
        TypeError,
        ValueError,
        AttributeError,
    ) as error:  # a daemon of another version may say other things
        text = f"what it says is not understood: {type(error).__name__}: {error}"
        return [Finding(about, State.WRONG, text, "are both of one version?")]


def as_json(findings: Sequence[Finding]) -> dict[str, Any]:
    """For programs."""
    return {
        "well": is_well(findings),
        "findings": [
            {"about": it.about, "state": it.state.value, "text": it.text, "do": it.remedy, **it.facts}
            for it in findings
        ],
    }


def as_text(findings: Sequence[Finding]) -> str:
    """For people: what is wrong stands out by its word. Names of processes and pods, and what else others say, do nothing to a terminal."""
    widest = max((len(it.about) for it in findings), default=0)
    lines = []
    for it in findings:
        lines.append(f"{it.state.value:<5}  {it.about:<{widest}}  {printable(it.text, LONGEST_TEXT)}")
        if it.remedy:
            lines.append(f"{'':<5}  {'':<{widest}}  do: {printable(it.remedy, LONGEST_TEXT)}")
    wrong = sum(it.state is State.WRONG for it in findings)
    return "\n".join([*lines, "", "all works" if not wrong else f"{wrong} of {len(findings)} do not work"])


def is_well(findings: Iterable[Finding]) -> bool:
    """Whether nothing is wrong."""
    return all(it.state is not State.WRONG for it in findings)
