"""What the demo shows to be true: for each job when it died, when Allocscope said so, and what the usual rule did. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

USUAL_USED_RATIO = 0.95
USUAL_HOLD_US = 300_000_000
"""The usual rule: more than 95 % of the device used for five minutes."""


@dataclass(frozen=True, slots=True)
class Critical:
    """One critical alert of a job, in seconds of recorded time."""

    cause: str
    at_s: float
    resolved_s: float | None


@dataclass(frozen=True, slots=True)
class Verdict:
    """One job's end."""

    job: str
    node: str
    outcome: str
    """"oom" or "completed"."""
    foreseeable: bool
    causes: frozenset[str]
    """Any of these names what went wrong; empty: nothing did."""
    died_at_s: float | None
    alert_at_s: float | None
    """When the critical alert began that stood when it died; of a job that lived, when its first one began."""
    cause: str | None
    usual_rule_at_s: float | None

    @property
    def lead_s(self) -> float | None:
        """How long before its death the alert came."""
        if self.died_at_s is None or self.alert_at_s is None:
            return None
        return round(self.died_at_s - self.alert_at_s, 1)

    @property
    def right(self) -> bool:
        """Whether a foreseeable death was foreseen, for what it was, and a job that lived left in peace."""
        if self.died_at_s is None:
            return self.alert_at_s is None
        if self.alert_at_s is None:
            return not self.foreseeable
        return self.cause in self.causes


def standing_at(criticals: Iterable[Critical], died_at_s: float | None) -> Critical | None:
    """The critical alert that stood when the job died; of a job that lived, its first one."""
    if died_at_s is None:
        return min(criticals, key=lambda c: c.at_s, default=None)
    standing = [c for c in criticals if c.at_s < died_at_s and (c.resolved_s is None or c.resolved_s >= died_at_s)]
    return min(standing, key=lambda c: c.at_s, default=None)


def usual_rule_at(used: Iterable[tuple[int, int]], total_bytes: int) -> int | None:
    """When the usual rule first fires, given (unix microseconds, used bytes) in order of time; None: never."""
    since: int | None = None
    for time_us, used_bytes in used:
        if used_bytes <= USUAL_USED_RATIO * total_bytes:
            since = None
        elif since is None:
            since = time_us
        elif time_us - since >= USUAL_HOLD_US:
            return time_us
    return None


def is_increasing(numbers: Iterable[int]) -> bool:
    """Whether each number is larger than the one before."""
    return all(a < b for a, b in pairwise(numbers))
