"""What the forecast and the alerts would have said over a recorded run. Pure.

A rehearsal sees what a probe would have sent, moment by moment, and nothing of what comes after; how the run ended it looks up
when it is over.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from allocscope.alerts.forecast import Outlook
from allocscope.alerts.rules import Severity, Subject
from allocscope.alerts.states import Alert, AlertState
from allocscope.alerts.watch import Watch
from allocscope.allocator.player import Player
from allocscope.allocator.recording import Recording
from allocscope.model import BlockMap, Cause, Event, EventKind, Sample

SEED = 20
"""Of the block maps' jitter."""


@dataclass(frozen=True, slots=True)
class RehearsedAlert:
    """An alert that would have fired; times are the recording's."""

    name: str
    severity: Severity
    cause: Cause | None
    at_us: int
    resolved_us: int | None
    """None: it stood to the end."""
    summary: str
    """As it began."""


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """What would have been said."""

    samples: int
    oom_us: int | None
    """When the run died; None: it did not."""
    alerts: tuple[RehearsedAlert, ...]
    """In the order in which they began."""


def rehearse(recording: Recording, *, seed: int = SEED) -> Rehearsal:
    """Watch a recorded run as if it ran now."""
    player = Player(recording, seed)
    outlook = Outlook(
        device_total_bytes=recording.device_total_bytes,
        allowed_bytes=None,
        allocator_conf=recording.conf,
    )
    watch = Watch(Subject(job=recording.name, gpu=recording.device_index), outlook)
    alerts: dict[tuple[str, Severity], RehearsedAlert] = {}
    done: list[RehearsedAlert] = []
    samples, oom_us = 0, None
    for seen in player:
        if isinstance(seen, Sample):
            samples += 1
            changes = watch.sample(seen)
        elif isinstance(seen, BlockMap):
            changes = watch.block_map(seen)
        else:
            changes = watch.event(seen)
            oom_us = _died_us(seen, player) or oom_us
        for alert in changes:
            rule = alert.condition.rule
            if alert.state is AlertState.FIRING:
                alerts[rule.name, rule.severity] = _begun(alert)
            else:
                done.append(replace(alerts.pop((rule.name, rule.severity)), resolved_us=alert.resolved_us))
    done += alerts.values()
    return Rehearsal(samples, oom_us, tuple(sorted(done, key=lambda a: (a.at_us, -a.severity.level))))


def _died_us(event: Event, player: Player) -> int | None:
    return event.time_us if event.kind is EventKind.OOM and player.died else None


def _begun(alert: Alert) -> RehearsedAlert:
    rule, summary = alert.condition.rule, alert.condition.summary
    return RehearsedAlert(rule.name, rule.severity, rule.cause, alert.fired_us or 0, None, summary)
