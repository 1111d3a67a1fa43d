"""The examples in deploy/: Prometheus and Alertmanager take them, and they route and inhibit what they say they do."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

import allocscope.alerts.prometheus
from allocscope.alerts.prometheus.shipped import RULES_FILE
from allocscope.alerts.rules import RULES
from allocscope.collector.config import HTTP_PORT
from tests.needs import REPO, amtool, promtool

PROMETHEUS = REPO / "deploy" / "prometheus" / "prometheus.yml"
ALERTMANAGER = REPO / "deploy" / "alertmanager" / "alertmanager.yml"


def _run(*command: object) -> str:
    ran = subprocess.run([str(c) for c in command], capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def test_prometheus_takes_its_configuration_with_the_rules_beside_it(tmp_path: Path):
    shutil.copy(PROMETHEUS, tmp_path)
    shutil.copy(Path(allocscope.alerts.prometheus.__path__[0]) / RULES_FILE, tmp_path)
    assert "SUCCESS" in _run(promtool(), "check", "config", tmp_path / PROMETHEUS.name)


def test_whatever_is_scraped_keeps_our_labels():
    """`job` is ours: without honor_labels all jobs would be one."""
    scraped = yaml.safe_load(PROMETHEUS.read_text())["scrape_configs"]
    assert [(one["job_name"], one["honor_labels"]) for one in scraped] == [
        ("allocscope-collector", True),
        ("allocscope-daemon", True),
    ]
    assert PROMETHEUS.read_text().count(f"127.0.0.1:{HTTP_PORT}") == 3


def test_alertmanager_takes_its_configuration():
    assert "SUCCESS" in _run(amtool(), "check-config", ALERTMANAGER)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.name} {rule.severity.value}")
def test_an_alert_goes_to_whom_its_severity_is_for(rule: Any):
    about = "node=n1" if rule.incident.value == "unwatched" else "job=llama"
    labels = [f"{name}={value}" for name, value in {"alertname": rule.name, **rule.labels()}.items()]
    receiver = _run(amtool(), "config", "routes", "test", f"--config.file={ALERTMANAGER}", *labels, about).split()
    assert receiver == [{"critical": "pager", "warning": "chat", "info": "nobody"}[rule.severity.value]]


def _matches(matchers: list[str], labels: dict[str, str]) -> bool:
    """As far as the example's matchers go."""
    for matcher in matchers:
        name, operator, value = next(
            (matcher.partition(one)[0], one, matcher.partition(one)[2].strip('"'))
            for one in ("!=", "=~", "=")
            if one in matcher
        )
        found = labels.get(name, "")
        holds = {"=": found == value, "!=": found != value, "=~": found in value.split("|")}[operator]
        if not holds:
            return False
    return True


def test_what_inhibits_what():
    """Among the alerts of one job, and of one node."""
    inhibits = yaml.safe_load(ALERTMANAGER.read_text())["inhibit_rules"]
    alerts = {f"{rule.name} {rule.severity.value}": {"alertname": rule.name, **rule.labels()} for rule in RULES}
    found: dict[str, set[str]] = {}
    for rule in inhibits:
        for source, source_labels in alerts.items():
            for target, target_labels in alerts.items():
                if (
                    _matches(rule["source_matchers"], source_labels)
                    and _matches(rule["target_matchers"], target_labels)
                    and source != target
                ):
                    assert rule["equal"] == (["node"] if "unwatched" in source_labels.values() else ["job"])
                    found.setdefault(source, set()).add(target)
    foreseen = {name for name, labels in alerts.items() if "cause" in labels}
    lesser = {name for name in foreseen if not name.endswith("critical")}
    thrashing, oom = "AllocscopeAllocatorThrashing warning", "AllocscopeOOM warning"
    for name in foreseen:
        expected = {
            "critical": lesser | {thrashing},
            "warning": {one for one in foreseen if one.endswith("info")},
            "info": None,
        }[name.rpartition(" ")[2]]
        assert found.get(name) == expected, name
    assert found[oom] == lesser | {thrashing}
    assert found["AllocscopeNodeSilent warning"] == {"AllocscopeDroppingData warning"}
    assert set(found) == {n for n in foreseen if not n.endswith("info")} | {oom, "AllocscopeNodeSilent warning"}
