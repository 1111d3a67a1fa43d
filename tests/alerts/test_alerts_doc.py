"""docs/alerts.md and the rules say the same."""

import re
import subprocess
from pathlib import Path

import yaml

from allocscope.alerts.rules import RULES
from tests.needs import REPO, amtool

DOC = (REPO / "docs" / "alerts.md").read_text()
ROW = re.compile(r"^\| `(\w+)` \| (\w+) \| (\d+) s \| (\d+) s \|", re.MULTILINE)


def test_the_table_has_each_rule_with_its_severity_and_times():
    told = [(name, severity, float(hold), float(keeps)) for name, severity, hold, keeps in ROW.findall(DOC)]
    rules = [(r.name, r.severity.value, r.hold_for_s, r.keep_firing_for_s) for r in RULES]
    assert sorted(told) == sorted(rules)


def test_each_rule_says_what_to_do():
    assert set(re.findall(r"^\*\*(Allocscope\w+)\.\*\*", DOC, re.MULTILINE)) == {r.name for r in RULES}


def test_the_example_for_alertmanager_names_labels_that_alerts_have():
    (example,) = re.findall(r"```yaml\n(.*?)```", DOC, re.DOTALL)
    (rule,) = yaml.safe_load(example)["inhibit_rules"]
    assert set(rule["equal"]) <= {"node", "job", "rank", "gpu", "uuid"}


def test_alertmanager_takes_the_example(tmp_path: Path):
    (example,) = re.findall(r"```yaml\n(.*?)```", DOC, re.DOTALL)
    routes = tmp_path / "routes.yml"
    routes.write_text(f"{example}receivers: [{{name: team}}]\n")
    checked = subprocess.run(
        [amtool(), "check-config", routes], capture_output=True, text=True, timeout=30, check=False
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
