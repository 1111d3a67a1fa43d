"""What critical alerts were worth: deaths foreseen, false alarms, causes, lead."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median_high

from tests.foresight.lockstep import Critical
from tests.foresight.runs import Run

IN_TIME_US = 60_000_000
"""An alert counts as foresight where it began so long before the death …"""
STANDING_US = 30_000_000
"""… and was standing then, or resolved less than so long before."""
MOST_FIRINGS = 2


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run."""

    run: Run
    hit: bool = False
    false: bool = False
    right: bool = False
    """The cause."""
    lead_s: float | None = None
    firings: int = 0
    """How often the alert that fired most often did."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Many runs."""

    outcomes: tuple[Outcome, ...] = field(repr=False)

    @property
    def deaths(self) -> list[Outcome]:
        """Of those that could be foreseen."""
        return [o for o in self.outcomes if o.run.foreseeable]

    @property
    def healthy(self) -> list[Outcome]:
        return [o for o in self.outcomes if o.run.healthy]

    @property
    def hits(self) -> int:
        return sum(o.hit for o in self.deaths)

    @property
    def false(self) -> int:
        return sum(o.false for o in self.healthy)

    @property
    def right(self) -> int:
        return sum(o.right for o in self.deaths)

    @property
    def lead_s(self) -> float | None:
        """The middle one."""
        leads = [o.lead_s for o in self.deaths if o.hit and o.lead_s is not None]
        return median_high(leads) if leads else None

    def among(self, cause: str) -> tuple[int, int]:
        """Foreseen, of all, where that is the first cause."""
        of = [o for o in self.deaths if o.run.causes[:1] == (cause,)]
        return sum(o.hit for o in of), len(of)

    @property
    def missed(self) -> list[str]:
        return [o.run.name for o in self.deaths if not o.hit]

    @property
    def flapping(self) -> list[str]:
        return [o.run.name for o in self.outcomes if o.firings > MOST_FIRINGS]


def verdict(runs: Sequence[Run], criticals: Iterable[list[Critical]]) -> Verdict:
    """Judge."""
    return Verdict(tuple(_outcome(run, found) for run, found in zip(runs, criticals, strict=True)))


def _outcome(run: Run, criticals: list[Critical]) -> Outcome:
    causes = [c.cause for c in criticals]
    firings = max((causes.count(cause) for cause in causes), default=0)
    if run.oom_us is None:
        return Outcome(run, false=bool(criticals), firings=firings)
    oom_us = run.oom_us
    before = [c for c in criticals if c.at_us < oom_us]
    standing = [c for c in before if c.resolved_us is None or c.resolved_us >= oom_us - STANDING_US]
    lead_us = max((oom_us - c.at_us for c in standing), default=0)
    if lead_us < IN_TIME_US:
        return Outcome(run, firings=firings)
    last = max(standing, key=lambda c: c.at_us).cause
    right = last in run.causes and len({c.cause for c in standing}) <= 2
    return Outcome(run, hit=True, right=right, lead_s=lead_us / 1e6, firings=firings)
