"""What tests of alerts tell of: one rank of one job, in short."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from allocscope.alerts.rules import Severity, Subject, alerts_of
from allocscope.alerts.states import Alert, AlertState, Progress
from allocscope.model import Cause, Forecast, State

S = 1_000_000
"""A second."""
SUBJECT = Subject(node="n7", job="llama", rank=3, gpu=2, uuid="GPU-3f")
CRITICAL, WARNING, INFO = Severity.CRITICAL, Severity.WARNING, Severity.INFO

_T = TypeVar("_T")


def forecast(state: State, cause: Cause | None = Cause.FRAGMENTATION) -> Forecast:
    """What is foreseen, with figures."""
    return Forecast(
        time_us=0,
        state=state,
        cause=cause,
        headroom_bytes=256 << 20,
        request_bytes=512 << 20,
        seconds_to_oom=400.0,
        summary="a request of 512 MiB would find 256 MiB",
    )


def alert(
    severity: Severity = CRITICAL,
    cause: Cause = Cause.FRAGMENTATION,
    *,
    rank: int = 3,
    resolved: bool = False,
    fired_for_s: int = 0,
    keep_firing_for_s: float | None = None,
) -> Alert:
    """One that fires, or has resolved."""
    subject = Subject(node="n7", job="llama", rank=rank, gpu=2, uuid="GPU-3f")
    condition = next(c for c in alerts_of(forecast(State.CRITICAL, cause), subject) if c.rule.severity is severity)
    if keep_firing_for_s is not None:
        condition = replace(condition, rule=replace(condition.rule, keep_firing_for_s=keep_firing_for_s))
    state = AlertState.RESOLVED if resolved else AlertState.FIRING
    return Alert(condition, Progress(state, since_us=1 + fired_for_s * S, fired_us=1))


def until(look: Callable[[], _T | None], *, within_s: float = 10.0) -> _T:
    """What `look` finds, as soon as it finds something."""
    deadline_s, pause = time.monotonic() + within_s, threading.Event()
    while True:
        found = look()
        if found:
            return found
        assert time.monotonic() < deadline_s, f"not within {within_s} s; the last look found {found!r}"
        pause.wait(0.02)
