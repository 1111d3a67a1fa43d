"""Between alerts that are followed and what is kept of them."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace

from allocscope.alerts.rules import RULES, Condition, Incident, Rule, Severity, Subject
from allocscope.alerts.states import Alert, AlertState, Progress
from allocscope.collector.fleet import Change
from allocscope.storage.records import AlertRecord


def alert_record(change: Change, *, updated_us: int) -> AlertRecord:
    """What is kept. Its id follows from what it is about and when it began, so that saving twice changes nothing."""
    alert, condition = change.alert, change.alert.condition
    at_us = alert.fired_us or alert.progress.since_us
    ended = f" Resolved: {change.reason}." if change.reason and alert.resolved_us is not None else ""
    return AlertRecord(
        alert_id=_alert_id(alert, at_us),
        name=condition.rule.name,
        severity=condition.rule.severity.value,
        state=alert.state.value,
        at_us=at_us,
        updated_us=updated_us,
        cause=condition.rule.cause,
        job=condition.subject.job,
        resolved_us=alert.resolved_us,
        labels={**condition.place, **alert.labels},
        summary=condition.summary,
        description=condition.description + ended,
        advice=condition.advice,
    )


def _alert_id(alert: Alert, at_us: int) -> str:
    identity = json.dumps([alert.labels, at_us], sort_keys=True)
    return hashlib.sha256(identity.encode()).hexdigest()[:32]


_RULES = {(rule.name, rule.severity.value): rule for rule in RULES}
_NUMBERS = ("rank", "gpu", "pid")


def standing_alert(record: AlertRecord) -> Alert | None:
    """An alert that was kept while it fired, to go on with; None: of a rule that this version does not have."""
    rule = _RULES.get((record.name, record.severity))
    if rule is None:
        return None
    progress = Progress(AlertState.FIRING, since_us=record.at_us, fired_us=record.at_us, seen_us=record.at_us)
    return Alert(_condition(rule, record), progress)


def told_of(record: AlertRecord, alert: Alert) -> Alert:
    """The end of an alert that was kept, as it was told."""
    ended_us = record.resolved_us or record.at_us
    return replace(alert, progress=replace(alert.progress, state=AlertState.RESOLVED, since_us=ended_us))


def resolved(record: AlertRecord, *, at_us: int, reason: str) -> Change:
    """The end of an alert that was kept, and that nobody follows any more."""
    rule = _RULES.get((record.name, record.severity)) or Rule(
        record.name, Severity(record.severity), Incident.MEMORY, 0.0, 0.0, "", "", record.cause
    )
    at_us = max(at_us, record.at_us)
    progress = Progress(AlertState.RESOLVED, since_us=at_us, fired_us=record.at_us, seen_us=at_us)
    return Change(Alert(_condition(rule, record), progress), reason)


def _condition(rule: Rule, record: AlertRecord) -> Condition:
    labels = record.labels
    numbers = {name: int(labels[name]) for name in _NUMBERS if labels.get(name, "").isdecimal()}
    first = Subject(node=labels.get("node"), job=labels.get("job"), uuid=labels.get("uuid"), **numbers)
    about = Subject(node=first.node) if rule.incident is Incident.UNWATCHED else Subject(job=first.job)
    return Condition(rule, about, record.summary, record.description, first=first, advice=record.advice)
