"""The rules as documents: a rule file of Prometheus, and a PrometheusRule of its operator (monitoring.coreos.com/v1)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from allocscope.alerts.prometheus import expressions
from allocscope.alerts.prometheus.expressions import duration
from allocscope.alerts.prometheus.words import annotated
from allocscope.alerts.prometheus.yaml_text import Document
from allocscope.alerts.rules import DROPPING_DATA, FORECAST_RULES, NODE_SILENT, OOM, THRASHING, Rule, Severity

EVERY_S = 10.0
"""Between evaluations: a critical forecast holds for so long before it fires, and each second of its lead counts."""


def rule_file(*, runbook_address: str | None = None) -> Document:
    """`groups`, as in a file that `rule_files` names."""
    return {"groups": _groups(runbook_address)}


def prometheus_rule(
    *,
    name: str = "allocscope",
    namespace: str | None = None,
    labels: Mapping[str, str] | None = None,
    runbook_address: str | None = None,
) -> Document:
    """The same groups. `labels`: those by which the operator's Prometheus selects its rules (`ruleSelector`)."""
    metadata: dict[str, Document] = {"name": name}
    if namespace:
        metadata["namespace"] = namespace
    metadata["labels"] = {"app.kubernetes.io/name": "allocscope", **(labels or {})}
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": metadata,
        "spec": {"groups": _groups(runbook_address)},
    }


def _groups(runbook_address: str | None) -> list[Document]:
    forecast: list[Document] = [
        _record(expressions.FORECAST_STATE, expressions.forecast_state()),
        _record(expressions.FORECAST_URGENCY, expressions.forecast_urgency()),
        *(
            _record(expressions.FORECAST_FIRST, expressions.forecast_first(one), severity=one.value)
            for one in reversed(Severity)
        ),
        *_alerts(list(FORECAST_RULES.values()), runbook_address),
    ]
    jobs = [
        _record(expressions.FLUSHES, expressions.flushes()),
        _record(expressions.RAN_OUT, expressions.ran_out()),
        *_alerts([THRASHING, OOM], runbook_address),
    ]
    watching = [
        _record(expressions.DROPPED, expressions.dropped()),
        *_alerts([NODE_SILENT, DROPPING_DATA], runbook_address),
    ]
    return [
        _group("allocscope-forecast", forecast),
        _group("allocscope-jobs", jobs),
        _group("allocscope-watching", watching),
    ]


def _group(name: str, rules: list[Document]) -> Document:
    """One after the other in each evaluation: what is recorded is there for the alerts below it."""
    return {"name": name, "interval": duration(EVERY_S), "rules": rules}


def _record(name: str, expression: str, **labels: str) -> Document:
    labelled: dict[str, Document] = {"labels": {**labels}} if labels else {}
    return {"record": name, "expr": expression, **labelled}


def _alerts(rules: Sequence[Rule], runbook_address: str | None) -> list[Document]:
    return [_alert(rule, runbook_address) for rule in rules]


def _alert(rule: Rule, runbook_address: str | None) -> Document:
    times: dict[str, Document] = {}
    if rule.hold_for_s:
        times["for"] = duration(rule.hold_for_s)
    if rule.keep_firing_for_s and rule.name not in expressions.LOOKS_BACK:
        times["keep_firing_for"] = duration(rule.keep_firing_for_s)
    return {
        "alert": rule.name,
        "expr": expressions.expression(rule),
        **times,
        "labels": {**rule.labels()},
        "annotations": {**annotated(rule, runbook_address)},
    }
