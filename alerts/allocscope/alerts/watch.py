"""One allocator watched: its outlook, the rules and the alert states, joined. Pure, told the time by what it is told of.

Whoever watches an allocator, the collector as it runs or a rehearsal over a recording, does it with this, so that both say
the same of the same samples.
"""

from __future__ import annotations

from dataclasses import replace

from allocscope.alerts.forecast import Foreseen, Outlook
from allocscope.alerts.rules import THRASHING_ROUNDS, Condition, RetryRounds, Subject, alerts_of, oom_alert
from allocscope.alerts.states import Alert, AlertState, Progress, advance
from allocscope.model import BlockMap, DeviceReading, Event, EventKind, Forecast, Sample

JUDGE_EVERY_US = 1_000_000
"""Judged with the first sample of each second of the allocator's time, however often it is sampled."""


class Watch:
    """One allocator. Each thing told answers with the alerts that began to fire or resolved by it."""

    __slots__ = ("_advice", "_judged", "_moment", "_rounds", "_wordless", "alerts", "forecast", "outlook", "subject")

    def __init__(self, subject: Subject, outlook: Outlook) -> None:
        self.subject = subject
        self.alerts: tuple[Alert, ...] = ()
        """Pending and firing. May be set, where a watch is taken up again."""
        self.forecast: Forecast | None = None
        """The latest."""
        self.outlook = outlook
        self._advice: str | None = None
        self._rounds = RetryRounds()
        self._judged = -1
        self._moment: tuple[Foreseen, int] | None = None
        """What was foreseen last in silence, and in which row of it, where no words of it were made yet."""
        self._wordless: tuple[Condition, ...] = ()
        """What held then."""

    def sample(self, sample: Sample) -> tuple[Alert, ...]:
        """A sample; one that was told before changes nothing."""
        if not self.fold(sample) or not self.is_due(sample):
            return ()
        return self.judge(self.outlook.forecast(sample.time_us))

    def fold(self, sample: Sample) -> bool:
        """A sample that is only remembered: for when many are waiting. Whether it was new."""
        if not self.outlook.observe(sample):
            return False
        self.observed(sample)
        return True

    # the same in two steps, where samples of many allocators are foreseen from at once

    def observed(self, sample: Sample) -> None:
        """A new sample that the outlook was told."""
        self._rounds = self._rounds.observe(sample)

    def is_due(self, sample: Sample) -> bool:
        """Whether it is to be judged: the first of its second."""
        return sample.time_us // JUDGE_EVERY_US != self._judged

    def judge(self, forecast: Forecast) -> tuple[Alert, ...]:
        """What follows from what the outlook foresees."""
        self._judged = forecast.time_us // JUDGE_EVERY_US
        self.forecast = forecast
        return self._advance(forecast.time_us)

    # the same in silence: words are made only where an alert begins to fire, and of what stands in the end

    def judge_in_silence(self, foreseen: Foreseen, row: int) -> tuple[Alert, ...]:
        """As `judge`, of a row; nothing else may be told before `settle`, but `observed`."""
        forecast, before = foreseen.outcome(row), self.forecast
        if before is None or (before.state, before.cause) != (forecast.state, forecast.cause):
            self.settle()
            self._wordless = alerts_of(forecast, self.subject)
        self._moment, self.forecast = (foreseen, row), forecast
        self._judged = forecast.time_us // JUDGE_EVERY_US
        if self.is_steady:
            return ()
        changes = self._advance(forecast.time_us)
        if not any(alert.state is AlertState.FIRING for alert in changes):
            return changes
        standing = self.alerts
        self.settle()
        worded = dict(zip(map(id, standing), self.alerts, strict=True))
        return tuple(worded.get(id(alert), alert) for alert in changes)

    @property
    def is_steady(self) -> bool:
        """Whether a judgement in silence like the latest would change nothing but words and times: what holds fires, and nothing else."""
        if len(self._rounds.times_us) >= THRASHING_ROUNDS:
            return False
        fires = {id(alert.condition) for alert in self.alerts if alert.state is AlertState.FIRING}
        return len(self.alerts) == len(fires) and fires == set(map(id, self._wordless))

    def settle(self) -> None:
        """Gives what was judged in silence last its words, and what held then its time."""
        if self._moment is None:
            return
        foreseen, row = self._moment
        self._moment, self.forecast = None, foreseen.forecast(row)
        worded = dict(zip(map(id, self._wordless), alerts_of(self.forecast, self.subject), strict=True))
        self.alerts = tuple(
            _held(alert, condition, self.forecast.time_us) if (condition := worded.get(id(alert.condition))) else alert
            for alert in self.alerts
        )

    def block_map(self, block_map: BlockMap) -> tuple[Alert, ...]:
        """A block map; judged with the next sample."""
        self.outlook.observe_map(block_map)
        return ()

    def device(self, reading: DeviceReading) -> tuple[Alert, ...]:
        """The device as its node sees it; judged with the next sample."""
        self.outlook.observe_device(reading)
        return ()

    def event(self, event: Event) -> tuple[Alert, ...]:
        """An event; an OOM is an alert at once."""
        self.outlook.observe_event(event)
        if event.kind is not EventKind.OOM:
            return ()
        return self._advance(event.time_us, oom_alert(event, self.subject))

    def overtaken(self, event: Event, ago_us: int) -> tuple[Alert, ...]:
        """An OOM of before the latest sample: an alert as of its own moment, unless one stands that tells of it or a later one."""
        condition = oom_alert(event, self.subject)
        if any(alert.condition.rule is condition.rule for alert in self.alerts):
            return ()
        at_us = event.time_us
        progress = Progress(
            AlertState.FIRING, since_us=at_us, fired_us=at_us, counted_us=ago_us, seen_us=at_us + ago_us
        )
        alert = Alert(condition, progress)
        self.alerts = (*self.alerts, alert)
        return (alert,)

    def forget(self, alert: Alert) -> None:
        """One that is over, though by what this watch was told it is not."""
        rule = alert.condition.rule
        self.alerts = tuple(one for one in self.alerts if one.condition.rule != rule)

    def advise(self, advice: str) -> None:
        """What would help it: from here on its alerts say so."""
        self._advice = advice
        self.alerts = tuple(alert.advised(advice) for alert in self.alerts)

    def rename(self, subject: Subject, now_us: int) -> tuple[Alert, ...]:
        """More is known of who it is, as its rank: its alerts go on. Of another job: what fires resolves."""
        same_job = subject.job == self.subject.job
        over = () if same_job else self.end(now_us)
        self.subject = subject
        if same_job:
            self.alerts = tuple(alert.of(subject) for alert in self.alerts)
        return over

    def end(self, now_us: int) -> tuple[Alert, ...]:
        """The process is gone: what is pending is forgotten, what fires resolves; what tells of the past is left to be advanced."""
        fired = [alert for alert in self.alerts if alert.state is AlertState.FIRING]
        self.alerts, self.forecast = tuple(alert for alert in fired if alert.condition.rule.outlives_its_job), None
        return tuple(_resolved(alert, now_us) for alert in fired if not alert.condition.rule.outlives_its_job)

    def _advance(self, now_us: int, *conditions: Condition) -> tuple[Alert, ...]:
        foreseen = self._wordless if self._moment else alerts_of(self.forecast, self.subject) if self.forecast else ()
        holding = (*foreseen, *self._rounds.alerts(now_us, self.subject), *conditions)
        if self._advice is not None:
            holding = tuple(replace(condition, advice=self._advice) for condition in holding)
        self.alerts, changes = advance(self.alerts, holding, now_us)
        return changes


def _held(alert: Alert, condition: Condition, now_us: int) -> Alert:
    """It held at that moment, in these words."""
    progress = alert.progress
    if alert.state is AlertState.FIRING:
        progress = replace(progress, counted_us=0, seen_us=now_us)
    return Alert(condition, progress)


def _resolved(alert: Alert, now_us: int) -> Alert:
    fired_us = alert.fired_us or now_us
    progress = Progress(AlertState.RESOLVED, since_us=max(now_us, fired_us), fired_us=fired_us, seen_us=now_us)
    return Alert(alert.condition, progress)
