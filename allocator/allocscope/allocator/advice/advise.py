"""From a history to advice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from allocscope.allocator.advice import words
from allocscope.allocator.advice.attempt import Attempt, Replay, one_by_one
from allocscope.allocator.advice.candidates import candidates, more_candidates
from allocscope.allocator.advice.case import Case, case_of
from allocscope.allocator.advice.changes import CHANGES
from allocscope.allocator.advice.choice import (
    flushes_much,
    is_near_limit,
    is_worth_it,
    will_outgrow,
)
from allocscope.allocator.advice.circumstances import Circumstances
from allocscope.allocator.advice.hazards import hazards_in_force, hazards_of_advice
from allocscope.allocator.advice.trials import Trials
from allocscope.allocator.conf import conf_in_force
from allocscope.allocator.settings import parse_settings
from allocscope.allocator.simulator.exactness import Exactness
from allocscope.allocator.simulator.history import History, Outcome
from allocscope.allocator.simulator.rules import is_verified
from allocscope.allocator.simulator.script import Script
from allocscope.allocator.simulator.what_if import Source
from allocscope.model import Advice, AdviceKind, Trial

UNKNOWN_CIRCUMSTANCES = Circumstances()


def advise(
    source: Source,
    *,
    circumstances: Circumstances = UNKNOWN_CIRCUMSTANCES,
    version: str | None = None,
    at_risk: bool = False,
    history: History | None = None,
    replays: Callable[[Script], Replay] = one_by_one,
    time_left: Callable[[], bool] | None = None,
) -> Advice:
    """What would help the allocator whose history this is; sizes are bytes.

    `at_risk`: something else (a forecast) says that it will run out, though nothing failed in the history. `history` is what
    `read_history` made of it, where that is known already. `replays` makes attempts on its requests, in whatever processes;
    `time_left` is asked between them, and once it says no, no more are made, and the advice says what was not tried.

    PyTorch 2.11 to 2.14, others by the nearest rules. ValueError: `version` is none. Bad histories do not raise: they are told.
    """
    if not source.trace:
        return Advice(AdviceKind.UNKNOWN, "There is no history to replay: record one.", torch_version=version or "")
    case = case_of(source, circumstances, version, at_risk, history)
    if not case.history.asked:
        return Advice(AdviceKind.UNKNOWN, "The history holds no requests.", torch_version=case.history.version)
    return _Judgement(case, Trials(case, replays(case.script), time_left or (lambda: True))).advice()


@dataclass(slots=True)
class _Judgement:
    """What is tried, and what comes of it."""

    case: Case
    trials: Trials

    def advice(self) -> Advice:
        """Try, and judge."""
        case = self.case
        own = Attempt(case.conf)
        self.trials.make([own])
        if own not in self.trials.made:
            return self._told(AdviceKind.UNKNOWN, "There was no time for a single replay.")
        recorded = self.trials.made[own]
        if (recorded.failed_at is not None) != case.died:
            really = "failed" if case.died else "did not"
            return self._told(
                AdviceKind.UNKNOWN,
                f"The replay {'does not fail' if case.died else 'fails'} where the job {really}, so it cannot tell what would help.",
            )
        return self._of_death(own) if case.died else self._of_life(own)

    # a run that died

    def _of_death(self, own: Attempt) -> Advice:
        case = self.case
        settings, changes = self._settings(), self._changes()
        self.trials.make([*settings, *changes])
        self.trials.measure([own])
        kind, best = AdviceKind.SETTING, self.trials.best(settings)
        if best is None and not case.demand.exceeds:
            further = self._further_settings()
            self.trials.make(further)
            best = self.trials.best(further)
        if best is None:
            kind, best = AdviceKind.PROGRAM, self.trials.best(changes)
        if best is None:
            return self._of_no_help(died=True)
        return self._told(kind, words.helped(best, self.trials.made[own], case.conf, case.room_bytes), best)

    # a run in which nothing failed

    def _of_life(self, own: Attempt) -> Advice:
        case = self.case
        self.trials.measure([own])
        settings = self._settings()
        self.trials.make(settings)
        recorded = self.trials.made[own]
        near = is_near_limit(recorded, case.room_bytes)
        settled = case.is_settled and not recorded.num_alloc_retries
        grows = will_outgrow(recorded, case.demand.growth_bytes, case.room_bytes)
        if not (case.at_risk or flushes_much(recorded) or grows or (near and not settled)):
            return self._told(AdviceKind.NO_CHANGE, words.unchanged(recorded, case.room_bytes, settled=near))
        kind, best = AdviceKind.SETTING, self.trials.best(settings)
        if (case.at_risk or grows) and not (best is not None and is_worth_it(best, recorded, case.room_bytes)):
            changes = self._changes()
            self.trials.make(changes)
            kind, best = AdviceKind.PROGRAM, self.trials.best(changes)
        if best is not None and is_worth_it(best, recorded, case.room_bytes):
            return self._told(kind, words.improved(best, recorded, case.conf, case.room_bytes), best)
        if case.at_risk:
            return self._of_no_help(died=False)
        return self._told(AdviceKind.NO_CHANGE, words.unchanged(recorded, case.room_bytes, looked=True))

    def _of_no_help(self, *, died: bool) -> Advice:
        """Where nothing helps, or there was no time to find out."""
        if self.trials.is_cut and not self.case.demand.exceeds:
            return self._told(AdviceKind.UNKNOWN, "There was no time to find out what would help.")
        blocked = [trial.conf for trial in self.trials.made.values() if trial.blocked and trial.failed_at is None]
        return self._told(AdviceKind.NOTHING, words.helpless(self.case.demand, died=died, blocked=blocked))

    def _settings(self) -> list[Attempt]:
        case = self.case
        told = case.source.told_in_force
        return list(map(Attempt, candidates(case.history.asked, told, case.release, has_limit=case.has_limit)))

    def _further_settings(self) -> list[Attempt]:
        return list(map(Attempt, more_candidates(self.case.source.told_in_force, self.case.release)))

    def _changes(self) -> list[Attempt]:
        return [Attempt(self.case.conf, change) for change in CHANGES]

    # telling

    def _told(self, kind: AdviceKind, summary: str, best: Trial | None = None) -> Advice:
        case = self.case
        trials = tuple(self.trials.made.values())
        recorded = trials[0] if trials else None
        exactness = None if self.trials.own is None else self._exactness(self.trials.own)
        is_exact = exactness is not None and exactness.exact
        if kind not in (AdviceKind.UNKNOWN, AdviceKind.NOTHING):
            summary = " ".join(filter(None, (summary, self._outlook(best or recorded))))
        if not is_exact and kind is not AdviceKind.UNKNOWN:
            summary += " This is an estimate."
        return Advice(
            kind=kind,
            summary=summary,
            conf=best.conf if best is not None and best.conf != case.conf else None,
            change=best.change if best is not None else None,
            gains=tuple(words.gains_of(best, recorded, case.room_bytes)) if best and recorded else (),
            costs=tuple(words.costs_of(best, recorded, case.room_bytes)) if best and recorded else (),
            hazards=tuple(dict.fromkeys(self._hazards(best))),
            is_exact=is_exact,
            exactness="" if exactness is None else exactness.words(),
            torch_version=case.history.version,
            requests=len(case.history.asked),
            trials=trials,
        )

    def _exactness(self, own: Outcome) -> Exactness:
        case = self.case
        rules_known = case.torch_version is None or is_verified(case.torch_version)
        return Exactness(case.history, case.recorded, own, rules_known=rules_known)

    def _outlook(self, trial: Trial | None) -> str | None:
        room = self.case.room_bytes
        left = None if trial is None or trial.needed_bytes is None or room is None else room - trial.needed_bytes
        return words.outlook(self.case.demand, left)

    def _hazards(self, best: Trial | None) -> Iterator[str]:
        case = self.case
        yield from hazards_in_force(
            case.source.conf, case.source.settings, case.circumstances, case.release, has_limit=case.has_limit
        )
        first = {trial.blocked: trial for trial in reversed(self.trials.made.values()) if trial.blocked}
        for why, trial in reversed(first.items()):
            yield f"{words.name_of(trial)} is not advised: {why}"
        if best is not None and best.conf != case.conf:
            told = conf_in_force(best.conf, parse_settings(best.conf))
            yield from hazards_of_advice(told, case.circumstances, case.release)
        if case.died and best is not None:
            yield (
                f"the recording ends with the failure, after {case.history.failed_at:,} requests: what the job would have asked for "
                "next is not known, so it may still run out then"
            )
        if self.trials.untried:
            yield f"there was no time to try {', '.join(map(words.name_of, self.trials.untried))}"
        elif self.trials.is_cut:
            yield "there was no time to measure the room that all of them need"
