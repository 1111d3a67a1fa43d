"""docs/alerts.md and the rules say the same."""

import re
from typing import Any

from allocscope.alerts.prometheus.documents import rule_file
from allocscope.alerts.rules import RULES, Incident
from allocscope.model import Cause
from tests.needs import REPO

DOC = (REPO / "docs" / "alerts.md").read_text()
CELLS = re.compile(r"^\| \[?`(\w+)`\S* \| (\w+) \| (\d+) s \| (\d+) s \|", re.MULTILINE)


def test_the_table_has_each_rule_with_its_severity_and_times():
    told = [(name, severity, float(hold), float(keeps)) for name, severity, hold, keeps in CELLS.findall(DOC)]
    rules = [(r.name, r.severity.value, r.hold_for_s, r.keep_firing_for_s) for r in RULES]
    assert sorted(told) == sorted(rules)


def test_the_table_leads_to_the_runbook():
    assert re.findall(r"^\| \[`(\w+)`\]\(runbook/\1\.md\)", DOC, re.MULTILINE) == list(
        dict.fromkeys(r.name for r in RULES)
    )


def test_labels_and_their_values_are_told():
    labels = {label for rule in RULES for label in rule.labels()}
    assert {name for name in labels if f"`{name}`" not in DOC} == set()
    values = [*(cause.value for cause in Cause), *(incident.value for incident in Incident)]
    assert [value for value in values if f"`{value}`" not in DOC] == []


def test_what_is_recorded_is_told():
    document: Any = rule_file()
    recorded = {rule["record"] for group in document["groups"] for rule in group["rules"] if "record" in rule}
    assert set(re.findall(r"`(allocscope:[\w:]+)`", DOC)) == recorded


def test_no_link_leads_nowhere():
    targets = re.findall(r"\]\(([^)#]+)\)", DOC)
    assert [target for target in targets if not (REPO / "docs" / target).is_file()] == []
