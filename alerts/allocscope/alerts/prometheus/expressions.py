"""When each rule holds, in PromQL over our metrics.

All expressions keep the labels that we expose, so what is scraped must keep them too (`honor_labels: true`). A collector and a
daemon may expose one allocator both, and several collectors one that moved between them: hence `max by` everywhere.
"""

from __future__ import annotations

from allocscope.alerts.rules import (
    DROPPING_DATA,
    NODE_FORGOTTEN_AFTER_S,
    NODE_SILENT,
    NODE_SILENT_AFTER_S,
    OOM,
    THRASHING,
    THRASHING_ROUNDS,
    THRASHING_WINDOW_S,
    Rule,
    Severity,
)
from allocscope.model import Cause, State, metrics

ALLOCATOR = ", ".join(metrics.JOB_LABELS)

FORECAST_STATE = "allocscope:forecast_state:by_cause"
"""Of each allocator that is not well its state, with the cause as a label."""
FORECAST_URGENCY = "allocscope:forecast_urgency"
"""Sorts allocators, the least goes first: as `allocscope.alerts.gather.urgency` does."""
FORECAST_FIRST = "allocscope:forecast_first"
"""Of each job, cause and severity the allocator that goes first."""
FLUSHES = "allocscope:flushes:last5m"
"""At how many moments of the last five minutes an allocator gave its cache back and tried again."""
RAN_OUT = "allocscope:ooms:last10m"
"""Allocators that ran out of memory in the last ten minutes; the value tells no more."""
DROPPED = "allocscope:dropped:last5m"
"""What each process lost in the last five minutes."""

LEVELS = {Severity.INFO: State.WATCH, Severity.WARNING: State.AT_RISK, Severity.CRITICAL: State.CRITICAL}
"""From which state on a severity's alert holds."""

_REMEMBERED = "6h"
"""So long a process may not be scraped, and what it lost meanwhile is still told of."""
_NOT_LOST = "captures?|judgements|notifications"
"""What is counted as dropped but belongs to no series: these are told of elsewhere."""


def duration(seconds: float) -> str:
    """As Prometheus writes it: 10s, 2m, 1h."""
    for unit_s, unit in ((3600, "h"), (60, "m")):
        if seconds >= unit_s and seconds % unit_s == 0:
            return f"{seconds / unit_s:.0f}{unit}"
    return f"{seconds:g}s"


def forecast_state() -> str:
    """A forecast that names no cause counts as capacity: a cause not given must not silence the alert."""
    state = f"max by ({ALLOCATOR}) ({metrics.FORECAST_STATE.name})"
    cause = metrics.FORECAST_CAUSE.name
    return (
        "(\n"
        f"  {state}\n"
        f"    * on ({ALLOCATOR}) group_right ()\n"
        f"  max by ({ALLOCATOR}, cause) ({cause})\n"
        "  or\n"
        "  label_replace(\n"
        f"    {state} unless on ({ALLOCATOR}) {cause},\n"
        f'    "cause", "{Cause.CAPACITY.value}", "", ""\n'
        "  )\n"
        ") > 0"
    )


def forecast_urgency() -> str:
    """By state, then by the time left where a trend tells (below 1e9 s), then by the margin (a ratio, rarely below -1)."""
    state = f"max by ({ALLOCATOR}) ({metrics.FORECAST_STATE.name})"
    return (
        "(\n"
        f"  min by ({ALLOCATOR}) ({metrics.FORECAST_SECONDS_TO_OOM.name})\n"
        f"  or 1e10 + 1e9 * min by ({ALLOCATOR}) ({metrics.FORECAST_MARGIN_RATIO.name})\n"
        f"  or 3e10 + 0 * {state}\n"
        f") - 1e12 * {state}"
    )


def forecast_first(severity: Severity) -> str:
    """The value is its urgency."""
    return (
        "bottomk by (job, cause) (1,\n"
        f"  0 * ({FORECAST_STATE} >= {LEVELS[severity].level})\n"
        f"    + on ({ALLOCATOR}) group_left ()\n"
        f"  {FORECAST_URGENCY}\n"
        ")"
    )


def dropped() -> str:
    """How much more it is than it was; all of it where its process started anew, or where it began.

    A counter's series begins with its first loss, which `increase` would not see. That it began is told from a target that is
    only now scraped, with losses of long ago, by the build_info that is in each of a target's scrapes.
    """
    counter = f'{metrics.DROPPED_TOTAL.name}{{what!~"{_NOT_LOST}"}}'
    window = duration(DROPPING_DATA.keep_firing_for_s)
    now = f"last_over_time({counter}[{window}])"
    before = f"last_over_time({counter}[{_REMEMBERED}] offset {window})"
    scrapes = f"sum by (instance) (count_over_time({metrics.BUILD_INFO.name}[{window}]))"
    return (
        f"{now} - {before} > 0\n"
        f"or {now} < {before}\n"
        f"or {now} - min_over_time({counter}[{window}]) > 0\n"
        f"or ({now} unless {before})\n"
        f"  and count_over_time({counter}[{window}]) < on (instance) group_left () {scrapes}"
    )


def flushes() -> str:
    """At how many scrapes the counter had grown. One that goes backwards was reset: no flush."""
    counter = f"{metrics.ALLOC_RETRIES_TOTAL.name}[{duration(THRASHING_WINDOW_S)}]"
    return f"max by ({ALLOCATOR}) (changes({counter}) - resets({counter})) > 0"


def ran_out() -> str:
    """By what the collector heard, which outlasts the job; or by the counters, where no collector is scraped or it was away."""
    window = duration(OOM.keep_firing_for_s)
    heard = f"max_over_time({metrics.LAST_OOM_TIMESTAMP_SECONDS.name}[{window}])"
    counted = f"increase({metrics.OOMS_TOTAL.name}[{window}])"
    return (
        f"max by ({ALLOCATOR}) ({heard}) > time() - {OOM.keep_firing_for_s:.0f}\n"
        "or\n"
        f"max by ({ALLOCATOR}) ({counted}) > 0"
    )


def allocators(rule: Rule, selector: str = "") -> str:
    """Of a rule about jobs, those for whom it holds. `selector`: only those with these labels."""
    if rule.cause is not None:
        cause = f'cause="{rule.cause.value}"'
        selected = f"{cause},{selector}" if selector else cause
        return f"{FORECAST_STATE}{{{selected}}} >= {LEVELS[rule.severity].level}"
    selected = f"{{{selector}}}" if selector else ""
    return f"{FLUSHES}{selected} >= {THRASHING_ROUNDS}" if rule == THRASHING else f"{RAN_OUT}{selected}"


def _silent() -> str:
    seen = f"max by (node) ({metrics.NODE_LAST_SEEN_TIMESTAMP_SECONDS.name})"
    return f"(time() - {seen} >= {NODE_SILENT_AFTER_S:.0f}) < {NODE_FORGOTTEN_AFTER_S:.0f}"


def expression(rule: Rule) -> str:
    """When it holds; one element an alert, with the labels that say whom it is about."""
    if rule == NODE_SILENT:
        return _silent()
    if rule == DROPPING_DATA:
        return f"sum by (node) ({DROPPED}) > 0"
    return f"max by (job) ({allocators(rule)})"


LOOKS_BACK = frozenset({OOM.name, DROPPING_DATA.name})
"""Rules that hold at a moment only: their expressions look back for as long as the alert keeps firing."""
