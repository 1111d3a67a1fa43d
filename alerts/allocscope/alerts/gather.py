"""Alerts of a job's allocators, gathered into alerts of the job. Pure, told the time.

An incident of a job of 64 ranks is one alert that names the rank that goes first, not 64. Each allocator's alerts walk through
their states by themselves (`allocscope.alerts.watch`); a job's alert fires from the first of them until the last has resolved.
Its identity is the job, so that it stays one and the same whichever rank leads; where to look first is told beside it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from allocscope.alerts.rules import OTHERS, Condition, Severity, Subject
from allocscope.alerts.states import Alert, AlertState
from allocscope.alerts.watch import Watch
from allocscope.model import Forecast

RETELL_AFTER_US = 60_000_000
"""The figures of an alert that stands are told anew so often …"""
RETELL_SOON_US = 5_000_000
"""… and so soon that another rank leads, or that they are more or fewer. Ranks of one job are alike, and may lead by turns."""

_NOT_KNOWN = float("inf")


def urgency(forecast: Forecast | None) -> tuple[float, float, float]:
    """Sorts allocators, the one that goes first first: by state, then by the time left where a trend tells, then by the margin.

    The rules shipped for Prometheus sort by the same (`allocscope:forecast_urgency`).
    """
    if forecast is None:
        return 0.0, _NOT_KNOWN, _NOT_KNOWN
    left_s, margin = forecast.seconds_to_oom, forecast.margin_ratio
    return -forecast.state.level, _NOT_KNOWN if left_s is None else left_s, _NOT_KNOWN if margin is None else margin


@dataclass(slots=True)
class _Gathered:
    """A job's alert, and those of its allocators that it is made of, by whom they are about, in the order of their beginnings."""

    told: Alert
    told_us: int
    members: dict[Subject, Alert]
    count: Counter[Subject]
    """Of allocators in one place: a job that was killed and begun anew has two of them there for a while."""

    def joins(self, alert: Alert) -> None:
        """One more; what outlives its job is one and the same in a place."""
        subject = alert.condition.subject
        self.members[subject] = alert
        if not (self.count[subject] and alert.condition.rule.outlives_its_job):
            self.count[subject] += 1

    def leaves(self, subject: Subject) -> bool:
        """One less; whether it was the last of all."""
        if subject not in self.members:
            return False
        self.count[subject] -= 1
        if not self.count[subject]:
            del self.count[subject], self.members[subject]
        return not self.members

    def advise(self, subject: Subject, advice: str) -> None:
        """What would help the one in that place."""
        if subject in self.members:
            self.members[subject] = self.members[subject].advised(advice)

    def rename(self, subject: Subject, known: Subject) -> None:
        """One of that place, in its order."""
        if subject not in self.members:
            return
        member = self.members[subject].of(known)
        self.count[known] += 1
        self.count[subject] -= 1
        if self.count[subject]:
            self.members[known] = member
            return
        del self.count[subject]
        self.members = {
            known if one == subject else one: member if one == subject else other for one, other in self.members.items()
        }


class Gathering:
    """The alerts of all jobs that fire."""

    def __init__(self) -> None:
        self._gathered: dict[tuple[str, Severity, str | None], _Gathered] = {}

    def standing(self) -> list[Alert]:
        """As they were told last."""
        return [gathered.told for gathered in list(self._gathered.values())]

    def members(self, name: str) -> list[Subject]:
        """Whom the alerts of this name that fire are about."""
        return [subject for (one, _, _), g in self._gathered.items() if one == name for subject in g.members]

    def take(self, alert: Alert, now_us: int) -> Alert | None:
        """An allocator's alert began to fire, or resolved; the job's, where that does so by it."""
        key, subject = _key(alert), alert.condition.subject
        gathered = self._gathered.get(key)
        if alert.state is AlertState.FIRING:
            if gathered is None:
                return self.restore(_of_job(alert, 1), alert, now_us)
            gathered.joins(alert)
            return None
        if gathered is None or not gathered.leaves(subject):
            return None
        del self._gathered[key]
        return _ended(gathered.told, alert)

    def restore(self, told: Alert, member: Alert, now_us: int) -> Alert:
        """A job's alert begins, or goes on after a restart, with one of its allocators'."""
        subject = member.condition.subject
        self._gathered[_key(told)] = _Gathered(told, now_us, {subject: member}, Counter([subject]))
        return told

    def goes_on(self, told: Alert) -> bool:
        """Whether a job's alert that was told before a restart still fires: then it is that one, and none that began anew."""
        gathered = self._gathered.get(_key(told))
        if gathered is None:
            return False
        gathered.told = told
        return True

    def forget(self, told: Alert) -> None:
        """It is over, and that was told before a restart."""
        self._gathered.pop(_key(told), None)

    def rename(self, subject: Subject, known: Subject) -> None:
        """More is known of one of a job's: its alert goes on."""
        for gathered in self._gathered.values():
            gathered.rename(subject, known)

    def advise(self, subject: Subject, advice: str, *, over: bool = False) -> None:
        """What would help one of a job's; told with the next `retell`. `over`: its process has ended, so that only what tells of the past
        is about it.
        """
        for gathered in self._gathered.values():
            if gathered.told.condition.rule.outlives_its_job or not over:
                gathered.advise(subject, advice)

    def retell(self, watches: Mapping[Subject, Watch], now_us: int) -> list[Alert]:
        """Those whose words have changed: another rank leads, they are more or fewer, or the figures are old."""
        changed = []
        for gathered in self._gathered.values():
            newer = _newer(gathered, watches)
            after_us = RETELL_SOON_US if _differs(newer, gathered.told.condition) else RETELL_AFTER_US
            if newer == gathered.told.condition or now_us - gathered.told_us < after_us:
                continue
            gathered.told, gathered.told_us = replace(gathered.told, condition=newer), now_us
            changed.append(gathered.told)
        return changed


def _key(alert: Alert) -> tuple[str, Severity, str | None]:
    rule = alert.condition.rule
    return rule.name, rule.severity, alert.condition.subject.job


def _of_job(member: Alert, ranks: int, advice: str | None = None) -> Alert:
    """The job's alert, in the words of the rank that leads."""
    condition = member.condition
    others = OTHERS.format(others=ranks - 1) if ranks > 1 else ""
    gathered = Condition(
        condition.rule,
        Subject(job=condition.subject.job),
        condition.summary + others,
        condition.description,
        first=condition.subject,
        ranks=ranks,
        advice=advice or condition.advice,
    )
    return Alert(gathered, member.progress)


def _newer(gathered: _Gathered, watches: Mapping[Subject, Watch]) -> Condition:
    """In the words of who leads now."""

    def first(subject: Subject) -> tuple[float, float, float]:
        watch = watches.get(subject)
        return urgency(watch.forecast if watch else None)

    in_order = sorted(gathered.members, key=first)  # of equals the one that began first
    leads = in_order[0]
    known = gathered.members[leads]
    watch = watches.get(leads)
    newest = next((a for a in watch.alerts if _key(a) == _key(known)), known) if watch else known
    return _of_job(newest, len(gathered.members), _advice(gathered, in_order)).condition


OF_ANOTHER = "(of {who}, as none is known of the one that goes first) {advice}"
"""Said of advice for a job's rank that is not the one that its alert is about."""


def _advice(gathered: _Gathered, in_order: Sequence[Subject]) -> str | None:
    """Of the one that goes first; where there is none, of the first that has any."""
    for subject in in_order:
        advice = gathered.members[subject].condition.advice
        if advice is not None:
            return advice if subject == in_order[0] else OF_ANOTHER.format(who=subject, advice=advice)
    return None


def _differs(one: Condition, other: Condition) -> bool:
    return (one.first, one.ranks, one.advice) != (other.first, other.ranks, other.advice)


def _ended(told: Alert, last: Alert) -> Alert:
    """It ends with its last; never before it began, though their clocks differ."""
    began_us = told.fired_us or 0
    progress = replace(last.progress, since_us=max(last.progress.since_us, began_us), fired_us=told.fired_us)
    return Alert(told.condition, progress)
