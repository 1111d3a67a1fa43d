"""What an alert says, as Prometheus's templates: the table's own sentences, their words filled in by queries.

A figure that is not exposed reads "unknown", as it does where the collector tells.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from allocscope.alerts.prometheus import templates
from allocscope.alerts.prometheus.expressions import DROPPED, FORECAST_FIRST, allocators
from allocscope.alerts.rules import (
    DROPPING_DATA,
    NODE_SILENT,
    OOM,
    OTHERS,
    THE_COLLECTOR,
    THRASHING,
    THRASHING_WINDOW_S,
    UNKNOWN,
    Incident,
    Rule,
)
from allocscope.model import metrics
from allocscope.model.figures import duration

PLACE = ("node", "rank", "gpu", "uuid")
"""Where to look first, as annotations."""

_JOB = "job=%q"
_WHO = (
    "{{ with $at.rank }}rank {{ . }} of {{ end }}{{ $labels.job }}"
    "{{ with $at.node }} on {{ . }}{{ end }}{{ with $at.gpu }}, GPU {{ . }}{{ end }}"
)
_LOST_BY = f'{{{{ or $labels.node "{THE_COLLECTOR}" }}}}'


def annotated(rule: Rule, runbook_address: str | None = None) -> dict[str, str]:
    """The annotations of one rule. `runbook_address`: what to put before a runbook page's path."""
    words, first = _words(rule), _first(rule)
    summary, description = rule.summary.format_map(words) + _others(rule), rule.description.format_map(words)
    at = f"{{{{ $at := {first}.Labels }}}}" if first else ""
    return {
        "summary": templates.defined(at + summary),
        "description": templates.defined(at + description if "$at" in description else description),
        "runbook_url": rule.runbook_url_at(runbook_address),
        **({name: f"{{{{ {first}.Labels.{name} }}}}" for name in PLACE} if first else {}),
    }


def _first(rule: Rule) -> str:
    """The rank that goes first, of a job. It is there whenever the rule holds: both come from the same series."""
    if rule.cause is not None:
        query = f'{FORECAST_FIRST}{{{_JOB},cause="{rule.cause.value}",severity="{rule.severity.value}"}}'
    elif rule in (THRASHING, OOM):
        query = f"{'topk' if rule == THRASHING else 'bottomk'}(1, {allocators(rule, _JOB)})"
    else:
        return ""
    return f"({_asked(query)} | first)"


def _others(rule: Rule) -> str:
    """How many ranks there are beside the first."""
    if rule.incident is not Incident.MEMORY:
        return ""
    others = _asked(f"count({allocators(rule, _JOB)}) - 1 > 0")
    return f"{{{{ with {others} }}}}{OTHERS.format(others='{{ . | first | value }}')}{{{{ end }}}}"


def _words(rule: Rule) -> Mapping[str, str]:
    if rule == NODE_SILENT:
        return {"node": "{{ $labels.node }}", "silent": templates.duration("$value")}
    if rule == DROPPING_DATA:
        lost = f'{_asked(f"sum by (what, reason) ({DROPPED}{{node=%q}})", "$labels.node")} | sortByLabel "what"'
        comma, one = "{{ if $i }}, {{ end }}", "{{ .Value }} {{ .Labels.what }} ({{ .Labels.reason }})"
        why = f"{{{{ range $i, $_ := {lost} }}}}{comma}{one}{{{{ end }}}}"
        return {"who": _LOST_BY, "dropped": "{{ $value }}", "what": "things", "why": why}
    words = {"who": _WHO, "job": "{{ $labels.job }}"}
    if rule == THRASHING:
        return {**words, "rounds": "{{ $value }}", "window": duration(THRASHING_WINDOW_S)}
    if rule == OOM:
        return {**words, "figures": "", "message": ""}
    request, headroom = _size(metrics.FORECAST_REQUEST_BYTES), _size(metrics.HEADROOM_BYTES)
    left = _figure("min", metrics.FORECAST_SECONDS_TO_OOM, templates.duration)
    forecast = f"asks for up to {request} at once, {headroom} would fit now"
    return {**words, "forecast": forecast, "headroom": headroom, "request": request, "left": left}


def _size(metric: metrics.Metric) -> str:
    return _figure("max", metric, templates.size)


def _figure(aggregate: str, metric: metrics.Metric, shown: Callable[[str], str]) -> str:
    """Of the rank that goes first."""
    query = f"{aggregate}({metric.name}{{job=%q,rank=%q,uuid=%q}})"
    asked = f"(printf `{query}` $labels.job $at.rank $at.uuid | query)"
    return f"{{{{ with {asked} }}}}{shown('(. | first | value)')}{{{{ else }}}}{UNKNOWN}{{{{ end }}}}"


def _asked(query: str, argument: str = "$labels.job") -> str:
    """A query, `argument` where it has %q: whatever a job is called, it stays a string of PromQL's."""
    return f"(printf `{query}` {argument} | query)"
