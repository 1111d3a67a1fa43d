"""Many runs rehearsed side by side, as a collector would see them, sample by sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from allocscope.alerts.forecast import Constants, Figures, Outlooks, of_samples
from allocscope.alerts.forecast.judgement import CAUSES, NO_CAUSE, STATES
from allocscope.alerts.rules import Severity, Subject, alerts_of
from allocscope.alerts.states import Alert, AlertState, advance
from allocscope.allocator.player import Seen
from allocscope.model import BlockMap, Event, Forecast, Sample
from tests.foresight.runs import Run


@dataclass(slots=True)
class Critical:
    """A critical alert: its moments are the run's."""

    cause: str
    at_us: int
    resolved_us: int | None = None


@dataclass(slots=True)
class _Watched:
    """A run as far as it has been seen."""

    row: int
    items: tuple[Seen, ...]
    figures: Figures
    place: int = 0
    taken: int = 0
    """Samples."""
    alerts: tuple[Alert, ...] = ()


def rehearse(runs: Sequence[Run], constants: Constants) -> list[list[Critical]]:
    """The critical alerts of each run."""
    outlooks = Outlooks(constants)
    watched = [_Watched(_row(outlooks, run), run.seen, of_samples(run.samples)) for run in runs]
    found: list[list[Critical]] = [[] for _ in runs]
    live = list(range(len(runs)))
    while live:
        live = [i for i in live if _up_to_sample(outlooks, watched[i])]
        if not live:
            break
        rows = np.array([watched[i].row for i in live])
        each = [(watched[i].figures, watched[i].taken) for i in live]
        figures = Figures(*(np.array([f[k][n] for f, n in each]) for k in range(len(Figures._fields))))
        for i in live:
            watched[i].place += 1
            watched[i].taken += 1
        outlooks.observe(rows, figures)
        foreseen = outlooks.forecast(rows, figures.time_us)
        for k, i in enumerate(live):
            if foreseen.level[k] or watched[i].alerts:
                cause = foreseen.cause[k]
                named = CAUSES[cause] if cause != NO_CAUSE else None
                _advance(watched[i], Forecast(int(figures.time_us[k]), STATES[foreseen.level[k]], named), found[i])
    return found


def _row(outlooks: Outlooks, run: Run) -> int:
    return outlooks.add(device_total_bytes=run.device_total_bytes, allowed_bytes=None, allocator_conf=run.conf)


def _up_to_sample(outlooks: Outlooks, watched: _Watched) -> bool:
    """Tell what comes before the next sample; whether there is one."""
    while watched.place < len(watched.items):
        item = watched.items[watched.place]
        if isinstance(item, Sample):
            return True
        watched.place += 1
        if isinstance(item, BlockMap):
            outlooks.observe_map(watched.row, item)
        elif isinstance(item, Event):
            outlooks.observe_event(watched.row, item)
    return False


def _advance(watched: _Watched, forecast: Forecast, found: list[Critical]) -> None:
    watched.alerts, changes = advance(watched.alerts, alerts_of(forecast, Subject()), forecast.time_us)
    for alert in changes:
        if alert.condition.rule.severity is Severity.CRITICAL:
            cause = alert.condition.rule.cause
            assert cause is not None
            if alert.state is AlertState.FIRING:
                found.append(Critical(cause.value, alert.fired_us or 0))
            else:
                next(
                    c for c in found if c.cause == cause.value and c.resolved_us is None
                ).resolved_us = alert.resolved_us
