"""One allocator watched: its outlook, the rules and the alert states, joined. Pure, told the time by what it is told of.

Whoever watches an allocator, the collector as it runs or a rehearsal over a recording, does it with this, so that both say
the same of the same samples.
"""

from __future__ import annotations

from allocscope.alerts.forecast import Outlook
from allocscope.alerts.rules import Condition, RetryRounds, Subject, alerts_of, oom_alert
from allocscope.alerts.states import Alert, AlertState, Progress, advance
from allocscope.model import BlockMap, DeviceReading, Event, EventKind, Forecast, Sample

JUDGE_EVERY_US = 1_000_000
"""Judged with the first sample of each second of the allocator's time, however often it is sampled."""


class Watch:
    """One allocator. Each thing told answers with the alerts that began to fire or resolved by it."""

    __slots__ = ("_judged", "_outlook", "_rounds", "alerts", "forecast", "subject")

    def __init__(self, subject: Subject, outlook: Outlook) -> None:
        self.subject = subject
        self.alerts: tuple[Alert, ...] = ()
        """Pending and firing. May be set, where a watch is taken up again."""
        self.forecast: Forecast | None = None
        """The latest."""
        self._outlook = outlook
        self._rounds = RetryRounds()
        self._judged = -1

    def sample(self, sample: Sample) -> tuple[Alert, ...]:
        """A sample; one that was told before changes nothing."""
        if not self.fold(sample):
            return ()
        second = sample.time_us // JUDGE_EVERY_US
        if second == self._judged:
            return ()
        self._judged = second
        self.forecast = self._outlook.forecast(sample.time_us)
        return self._advance(sample.time_us)

    def fold(self, sample: Sample) -> bool:
        """A sample that is only remembered: for when many are waiting. Whether it was new."""
        if not self._outlook.observe(sample):
            return False
        self._rounds = self._rounds.observe(sample)
        return True

    def block_map(self, block_map: BlockMap) -> tuple[Alert, ...]:
        """A block map; judged with the next sample."""
        self._outlook.observe_map(block_map)
        return ()

    def device(self, reading: DeviceReading) -> tuple[Alert, ...]:
        """The device as its node sees it; judged with the next sample."""
        self._outlook.observe_device(reading)
        return ()

    def event(self, event: Event) -> tuple[Alert, ...]:
        """An event; an OOM is an alert at once."""
        self._outlook.observe_event(event)
        if event.kind is not EventKind.OOM:
            return ()
        return self._advance(event.time_us, oom_alert(event, self.subject))

    def end(self, now_us: int) -> tuple[Alert, ...]:
        """The process is gone: what is pending is forgotten, what fires resolves."""
        fired = [alert for alert in self.alerts if alert.state is AlertState.FIRING]
        self.alerts, self.forecast = (), None
        return tuple(_resolved(alert, now_us) for alert in fired)

    def _advance(self, now_us: int, *conditions: Condition) -> tuple[Alert, ...]:
        foreseen = alerts_of(self.forecast, self.subject) if self.forecast else ()
        holding = (*foreseen, *self._rounds.alerts(now_us, self.subject), *conditions)
        self.alerts, changes = advance(self.alerts, holding, now_us)
        return changes


def _resolved(alert: Alert, now_us: int) -> Alert:
    fired_us = alert.fired_us or now_us
    progress = Progress(AlertState.RESOLVED, since_us=max(now_us, fired_us), fired_us=fired_us, seen_us=now_us)
    return Alert(alert.condition, progress)
