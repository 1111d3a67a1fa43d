"""From conditions to alerts: inactive → pending → firing → resolved. Pure, told the time.

`step` is one alert's way; `advance` takes all alerts of one subject (an allocator, a node) a step further:

    alerts, changes = advance(alerts, conditions, now_us)

Whose clock `now_us` is, is the caller's choice (an allocator's alerts go by its samples' times, a node's silence by the
listener's), as long as it is one and the same for a subject. It may stand still, jump or go back: one step never counts for
more than half of a hold or keep-firing time, so a jump alone neither fires nor resolves, and time that goes back counts as
none. After a job's end its alerts must be advanced further, with no conditions and its time carried on, until none is left.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple

from allocscope.alerts.rules import RENAME_AFTER_S, Condition, Severity, Subject


class AlertState(Enum):
    """How far an alert has come."""

    INACTIVE = "inactive"
    PENDING = "pending"
    FIRING = "firing"
    RESOLVED = "resolved"


@dataclass(frozen=True, slots=True)
class Progress:
    """How far an alert has come, and since when."""

    state: AlertState = AlertState.INACTIVE
    since_us: int = 0
    """When it came into its state."""
    fired_us: int | None = None
    """When it began to fire."""
    counted_us: int = 0
    """Pending: how long it has held. Firing: how long it has not."""
    seen_us: int = 0
    """The latest step's time."""


def step(
    progress: Progress, *, holds: bool, now_us: int, hold_for_s: float, keep_firing_for_s: float = 0.0
) -> Progress:
    """One alert, one step further."""
    if progress.state is AlertState.FIRING:
        return _while_firing(progress, holds, now_us, round(keep_firing_for_s * 1e6))
    if not holds:
        return Progress()
    hold_for_us = round(hold_for_s * 1e6)
    if progress.state is not AlertState.PENDING:
        progress = Progress(AlertState.PENDING, since_us=now_us, seen_us=now_us)
    counted_us = progress.counted_us + _counts(progress, now_us, hold_for_us)
    if counted_us >= hold_for_us:
        return Progress(AlertState.FIRING, since_us=now_us, fired_us=now_us, seen_us=now_us)
    return replace(progress, counted_us=counted_us, seen_us=now_us)


def _while_firing(progress: Progress, holds: bool, now_us: int, keep_firing_for_us: int) -> Progress:
    if holds:
        return replace(progress, counted_us=0, seen_us=now_us)
    counted_us = progress.counted_us + _counts(progress, now_us, keep_firing_for_us)
    if counted_us < keep_firing_for_us:
        return replace(progress, counted_us=counted_us, seen_us=now_us)
    ended_us = max(now_us, progress.since_us)  # never before it began, though the clock went back
    return Progress(AlertState.RESOLVED, since_us=ended_us, fired_us=progress.fired_us, seen_us=now_us)


def _counts(progress: Progress, now_us: int, needed_us: int) -> int:
    """What of the time since the latest step counts."""
    return min(max(now_us - progress.seen_us, 0), (needed_us + 1) // 2)


@dataclass(frozen=True, slots=True)
class Alert:
    """A condition and how far it has come."""

    condition: Condition
    """As it held last."""
    progress: Progress

    @property
    def state(self) -> AlertState:
        """How far it has come."""
        return self.progress.state

    @property
    def fired_us(self) -> int | None:
        """When it began to fire; None: it has not yet."""
        return self.progress.fired_us

    @property
    def resolved_us(self) -> int | None:
        """When it resolved; None: it has not yet."""
        return self.progress.since_us if self.state is AlertState.RESOLVED else None

    def of(self, subject: Subject) -> Alert:
        """The same of somebody of whom more is known by now."""
        return replace(self, condition=replace(self.condition, subject=subject))

    def advised(self, advice: str) -> Alert:
        """The same, with what would help."""
        return replace(self, condition=replace(self.condition, advice=advice))

    @property
    def labels(self) -> dict[str, str]:
        """Its identity for the world outside."""
        return self.condition.labels


class Advance(NamedTuple):
    """What a step comes to."""

    alerts: tuple[Alert, ...]
    """The pending and firing ones, for the next step."""
    changes: tuple[Alert, ...]
    """Those that began to fire or resolved in this step, each once."""


_Trouble = tuple[str, Severity, Subject]


def advance(alerts: Iterable[Alert], conditions: Iterable[Condition], now_us: int) -> Advance:
    """All alerts of a subject, one step further.

    While pending, an alert goes by the name that its trouble has at the moment. One that fires keeps its name, whatever the
    trouble is called meanwhile, until another name has held for RENAME_AFTER_S: then that fires, and the old one has its
    keep-firing time before it resolves, so that there is always one that fires.
    """
    holding: Mapping[_Trouble, Condition] = {condition.trouble: condition for condition in conditions}
    standing: dict[_Trouble, list[Alert]] = {trouble: [] for trouble in holding}
    for alert in alerts:
        standing.setdefault(alert.condition.trouble, []).append(alert)
    before, stepped = set[tuple[_Trouble, str]](), list[Alert]()
    for trouble, alerts_of_it in standing.items():
        before |= {_name(alert) for alert in alerts_of_it if alert.state is AlertState.FIRING}
        stepped += _advance_trouble(alerts_of_it, holding.get(trouble), now_us)
    changes = (a for a in stepped if (a.state is AlertState.FIRING) != (_name(a) in before))
    going_on = (a for a in stepped if a.state in (AlertState.PENDING, AlertState.FIRING))
    return Advance(tuple(going_on), tuple(changes))


def _name(alert: Alert) -> tuple[_Trouble, str]:
    return alert.condition.trouble, alert.condition.rule.name


def _advance_trouble(alerts: list[Alert], condition: Condition | None, now_us: int) -> list[Alert]:
    """All names of one trouble at one severity: those that fire, and at most one that is pending."""
    firing = [alert for alert in alerts if alert.state is AlertState.FIRING]
    pending = next((alert for alert in alerts if alert.state is AlertState.PENDING), None)
    if condition is None:
        return [_step(alert, None, now_us) for alert in firing]
    named = next((alert for alert in firing if alert.condition.rule == condition.rule), None)
    if named is not None:
        return [_step(alert, condition if alert is named else None, now_us) for alert in firing]
    if not firing:
        return [_step(pending, condition, now_us) if pending else _begin(condition, now_us)]
    if pending is None or pending.condition.rule != condition.rule:
        rival = _begin(condition, now_us, RENAME_AFTER_S)
    else:
        rival = _step(pending, condition, now_us, RENAME_AFTER_S)
    # Until the other name has held long enough, the latest that fires stands for both.
    latest = None if rival.state is AlertState.FIRING else max(firing, key=_fired_us)
    return [rival, *(_step(a, a.condition if a is latest else None, now_us) for a in firing)]


def _fired_us(alert: Alert) -> int:
    return alert.fired_us or 0


def _begin(condition: Condition, now_us: int, at_least_s: float = 0.0) -> Alert:
    return _step(Alert(condition, Progress()), condition, now_us, at_least_s)


def _step(alert: Alert, condition: Condition | None, now_us: int, at_least_s: float = 0.0) -> Alert:
    rule = (condition or alert.condition).rule
    progress = step(
        alert.progress,
        holds=condition is not None,
        now_us=now_us,
        hold_for_s=max(rule.hold_for_s, at_least_s),
        keep_firing_for_s=rule.keep_firing_for_s,
    )
    return Alert(condition or alert.condition, progress)


def inhibited(alert: Alert, alerts: Iterable[Alert]) -> bool:
    """Whether a graver alert of the same trouble fires, so that this one is not worth telling of."""
    family, severity, subject = alert.condition.trouble
    return any(
        other.state is AlertState.FIRING
        and other.condition.trouble[0] == family
        and other.condition.subject == subject
        and other.condition.rule.severity.level > severity.level
        for other in alerts
    )
