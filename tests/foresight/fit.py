"""The forecast's constants, found from recorded runs, and how well what is found so does on families that it was not found from.

One constant after the other is tried at a few values around the one it has; a value is taken where it is worth more than the
present one by at least one run, so that what the runs do not tell stays as it was thought out. Then the same without each family in
turn: what those constants say of the family left out is what unknown jobs may expect.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields, replace

from allocscope.alerts.forecast import Constants
from tests.foresight.lockstep import rehearse
from tests.foresight.runs import Run
from tests.foresight.verdict import Outcome, Verdict, verdict

FACTORS = (0.5, 0.75, 1.33, 2.0)
FALSE_ALARM, WRONG_CAUSE, LEAD_S = 1.5, 0.25, 600.0
"""What a run is worth: 1 for a death foreseen and up to 0.25 for its lead, less this for a false alarm, a wrong cause."""
ENOUGH = 0.9
"""A change must be worth about a run."""
FITTED = (
    "warmup_s", "critical_horizon_s", "critical_holes_horizon_s", "critical_slack",
    "narrowing_steps", "calm", "move", "records", "few_swings_records",
    "recent_windows", "unevenness", "lifts", "leak_share", "stranded_windows", "room_move", "room_losses", "room_recent_s",
)  # fmt: skip
"""Those that critical alerts hang on. The others are of warnings, or say what a word means."""


class Trials:
    """Every set of constants that was tried, and how each run came out by it."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self.runs = runs
        self._outcomes: dict[Constants, tuple[Outcome, ...]] = {}

    def outcomes(self, constants: Constants) -> tuple[Outcome, ...]:
        """Of each run."""
        if constants not in self._outcomes:
            self._outcomes[constants] = verdict(self.runs, rehearse(self.runs, constants)).outcomes
        return self._outcomes[constants]

    def worth(self, constants: Constants, without: str = "") -> float:
        """Of the families but one."""
        return sum(_worth(outcome) for outcome in self.outcomes(constants) if outcome.run.family != without)

    def fit(self, without: str = "") -> Constants:
        """The best that is found, one constant after the other."""
        best = Constants()
        for name in FITTED:
            tried = _around(best, name)
            found = max(tried, key=lambda constants: self.worth(constants, without))
            if self.worth(found, without) >= self.worth(best, without) + ENOUGH:
                best = found
        return best


def _worth(outcome: Outcome) -> float:
    if outcome.run.healthy:
        return -FALSE_ALARM * outcome.false
    if not outcome.run.foreseeable or not outcome.hit:
        return 0.0
    return 1.0 + 0.25 * min((outcome.lead_s or 0.0) / LEAD_S, 1.0) - WRONG_CAUSE * (not outcome.right)


def _around(constants: Constants, name: str) -> Iterator[Constants]:
    value = getattr(constants, name)
    for factor in FACTORS:
        other = type(value)(round(value * factor, 6))
        if other != value and other > 0:
            yield replace(constants, **{name: other})


def report(runs: Sequence[Run]) -> int:
    """Print the constants found, and the verdict on each family by the constants found without it."""
    trials = Trials(runs)
    print("found from all families:", *_changes(trials.fit()), sep="\n  ", flush=True)
    left_out: list[Outcome] = []
    for family in sorted({run.family for run in runs}):
        constants = trials.fit(without=family)
        left_out += (o for o in trials.outcomes(constants) if o.run.family == family)
        print(f"without {family}:", ", ".join(_changes(constants)), flush=True)
    found = Verdict(tuple(left_out))
    hits, of = found.among("fragmentation")
    print(
        f"each family by what was found without it: {found.hits} of {len(found.deaths)} deaths foreseen ({hits} of {of} by"
        f" fragmentation), {found.false} false alarms in {len(found.healthy)} healthy runs, cause right {found.right} times,"
        f" median lead {found.lead_s or 0:.0f} s; not foreseen: {', '.join(found.missed) or 'none'}"
    )
    return 0


def _changes(constants: Constants) -> Iterable[str]:
    before = Constants()
    changed = [f.name for f in fields(Constants) if getattr(constants, f.name) != getattr(before, f.name)]
    return [f"{name} {getattr(before, name)} → {getattr(constants, name)}" for name in changed] or ["as they are"]
