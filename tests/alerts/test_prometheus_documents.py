"""The shipped rule files: what the table says, no more and no less, in forms that Prometheus and its operator take."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

import allocscope.alerts.prometheus
from allocscope.alerts.prometheus.documents import prometheus_rule, rule_file
from allocscope.alerts.prometheus.shipped import FILES, OPERATOR_FILE, RULES_FILE, text
from allocscope.alerts.prometheus.yaml_text import written
from allocscope.alerts.rules import RULES
from allocscope.model import metrics
from tests.needs import promtool

FOLDER = Path(allocscope.alerts.prometheus.__path__[0])
SECONDS = {"s": 1, "m": 60, "h": 3600}


def shipped(name: str) -> Any:
    return yaml.safe_load((FOLDER / name).read_text())


def rules_of(groups: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [rule for group in groups for rule in group["rules"] if kind in rule]


ALERTS = rules_of(shipped(RULES_FILE)["groups"], "alert")
RECORDS = rules_of(shipped(RULES_FILE)["groups"], "record")


def seconds(duration: str) -> float:
    return float(duration[:-1]) * SECONDS[duration[-1]]


@pytest.mark.parametrize("name", FILES)
def test_the_shipped_files_are_what_the_rules_make(name: str):
    assert (FOLDER / name).read_text() == text(name), "run ./dev rules, and commit what it makes"


def test_prometheus_takes_them():
    checked = subprocess.run(
        [promtool(), "check", "rules", "--lint=all", "--lint-fatal", FOLDER / RULES_FILE],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_each_rule_of_the_table_is_there_once_with_its_severity_and_labels():
    told = [(alert["alert"], alert["labels"]) for alert in ALERTS]
    assert told == [(rule.name, rule.labels()) for rule in RULES]


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: f"{alert['alert']} {alert['labels']['severity']}")
def test_each_has_what_people_need(alert: dict[str, Any]):
    assert set(alert["annotations"]) >= {"summary", "description", "runbook_url"}
    assert all(alert["annotations"].values())
    assert alert["annotations"]["runbook_url"] == f"docs/runbook/{alert['alert']}.md"


@pytest.mark.parametrize(
    ("alert", "rule"), list(zip(ALERTS, RULES, strict=True)), ids=[f"{r.name} {r.severity.value}" for r in RULES]
)
def test_times_are_the_tables(alert: dict[str, Any], rule: Any):
    """What holds at a moment only looks back for as long instead."""
    assert seconds(alert.get("for", "0s")) == rule.hold_for_s
    if rule.name in ("AllocscopeOOM", "AllocscopeDroppingData"):
        assert "keep_firing_for" not in alert
        recorded = {"AllocscopeOOM": "allocscope:ooms:last10m", "AllocscopeDroppingData": "allocscope:dropped:last5m"}
        [record] = [record for record in RECORDS if record["record"] == recorded[rule.name]]
        assert f"[{rule.keep_firing_for_s / 60:.0f}m]" in record["expr"]
    else:
        assert seconds(alert.get("keep_firing_for", "0s")) == rule.keep_firing_for_s


def test_expressions_ask_for_metrics_that_are_exposed_or_recorded():
    recorded = {record["record"] for record in RECORDS}
    templates = [text for alert in ALERTS for text in alert["annotations"].values()]
    expressions = " ".join([*(rule["expr"] for rule in (*ALERTS, *RECORDS)), *templates])
    assert set(re.findall(r"\ballocscope:[\w:]+", expressions)) == recorded
    assert set(re.findall(r"\ballocscope_\w+", expressions)) <= set(metrics.BY_NAME)


def test_a_runbook_address_is_put_before_each_page():
    document: Any = rule_file(runbook_address="https://docs.example/x/")
    urls = [alert["annotations"]["runbook_url"] for alert in rules_of(document["groups"], "alert")]
    assert urls == [f"https://docs.example/x/docs/runbook/{rule.name}.md" for rule in RULES]


# the operator's form


DURATION = re.compile(r"^(0|(([0-9]+)y)?(([0-9]+)w)?(([0-9]+)d)?(([0-9]+)h)?(([0-9]+)m)?(([0-9]+)s)?(([0-9]+)ms)?)$")
"""monitoring.coreos.com/v1, Duration; a NonEmptyDuration is not empty besides."""


def test_the_prometheusrule_has_the_same_groups():
    document = shipped(OPERATOR_FILE)
    assert (document["apiVersion"], document["kind"]) == ("monitoring.coreos.com/v1", "PrometheusRule")
    assert set(document) == {"apiVersion", "kind", "metadata", "spec"}
    assert document["metadata"] == {"name": "allocscope", "labels": {"app.kubernetes.io/name": "allocscope"}}
    assert document["spec"] == {"groups": shipped(RULES_FILE)["groups"]}


def test_the_prometheusrule_has_only_what_its_definition_has():
    """What an API server would refuse or drop: fields, their types and forms, as the operator's CRD has them."""
    groups = shipped(OPERATOR_FILE)["spec"]["groups"]
    assert len({group["name"] for group in groups}) == len(groups), "a group's name is the key of a list-map"
    for group in groups:
        assert set(group) == {"name", "interval", "rules"}
        assert group["name"]
        assert DURATION.match(group["interval"])
        for rule in group["rules"]:
            assert set(rule) <= {"record", "alert", "expr", "for", "keep_firing_for", "labels", "annotations"}
            assert ("record" in rule) != ("alert" in rule)
            assert isinstance(rule["expr"], str)
            assert all(
                rule.get(key, "1s") and DURATION.match(rule.get(key, "1s")) for key in ("for", "keep_firing_for")
            )
            for texts in (rule.get("labels", {}), rule.get("annotations", {})):
                assert all(isinstance(text, str) for pair in texts.items() for text in pair)


def test_a_prometheusrule_may_be_named_and_labelled_as_a_cluster_selects_it():
    document: Any = prometheus_rule(name="watch", namespace="ml", labels={"release": "kube-prometheus"})
    assert document["metadata"] == {
        "name": "watch",
        "namespace": "ml",
        "labels": {"app.kubernetes.io/name": "allocscope", "release": "kube-prometheus"},
    }


# made by one command


def _make(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "allocscope.alerts.prometheus", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_a_check_says_that_all_is_well_and_a_wrong_call_how_to_call():
    assert (_make("--check").returncode, _make("--check").stderr) == (0, "")
    assert _make("--chekc").returncode == 2


def test_a_check_names_a_file_that_somebody_edited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    from allocscope.alerts.prometheus import __main__ as made

    monkeypatch.setattr(made, "__file__", str(tmp_path / "__main__.py"))
    assert made.main([]) == 0
    assert made.main(["--check"]) == 0
    edited = tmp_path / RULES_FILE
    edited.write_text(edited.read_text().replace(">= 3", ">= 2"))
    assert made.main(["--check"]) == 1
    assert f"{edited} is not what the rules make: run ./dev rules" in capsys.readouterr().err


# as YAML


TEXTS = st.text(max_size=30) | st.sampled_from(
    [
        "",
        "yes",
        "null",
        "~",
        "1e3",
        "0x1f",
        "10s",
        "a: b",
        "- a",
        "# a",
        "it's",
        'a "b"',
        "{{ $x }}",
        "a\nb\n",
        "\n",
        " a",
        "1:30",
    ]
)
DOCUMENTS = st.recursive(
    TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS.filter(bool), inner, max_size=3),
    max_leaves=12,
)


@given(DOCUMENTS)
def test_what_is_written_reads_as_it_was(document: Any):
    assert yaml.safe_load(written(document)) == document


def test_it_is_written_as_people_write_it():
    document: Any = {
        "groups": [{"name": "a", "interval": "10s", "rules": [{"expr": "a\n  > 1", "labels": {}}]}],
        "odd": "it's: a",
    }
    assert written(document) == (
        "groups:\n"
        "  - name: a\n"
        "    interval: 10s\n"
        "    rules:\n"
        "      - expr: |-\n"
        "          a\n"
        "            > 1\n"
        "        labels: {}\n"
        'odd: "it\'s: a"\n'
    )
