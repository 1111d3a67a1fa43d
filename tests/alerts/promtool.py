"""`promtool test rules`, told in few words: series in, alerts out, on the shipped rules."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import allocscope.alerts.prometheus
from allocscope.alerts.prometheus.shipped import RULES_FILE
from tests.needs import promtool

SHIPPED = Path(allocscope.alerts.prometheus.__path__[0]) / RULES_FILE

Firing = tuple[str, str, str]
"""An alert's name, its severity, and whom it is about: a job, or a node (n…)."""

CAUSES = {
    "AllocscopeFragmentationOOMRisk": "fragmentation",
    "AllocscopeCapacityOOMRisk": "capacity",
    "AllocscopeMemoryGrowth": "growth",
    "AllocscopeMemoryLeak": "leak",
    "AllocscopeNeighbourPressure": "neighbour",
}
ABOUT_NODES = ("AllocscopeNodeSilent", "AllocscopeDroppingData")

Series = Mapping[str, str]
"""What is scraped each ten seconds, as promtool writes it."""

SCRAPED_EVERY_S = 10


def spans(*values: tuple[float | str | None, int]) -> str:
    """One value after the other, each for so many seconds. "+2": two more with each scrape; None: no sample; "stale": the series ends
    with a failed scrape."""
    told: list[str] = []
    last = 0.0
    for value, seconds in values:
        count = seconds // SCRAPED_EVERY_S
        if value is None:
            told += ["_"] * count
        elif value == "stale":
            told += ["stale", *["_"] * (count - 1)]
        elif isinstance(value, str):
            more = float(value)
            told += [f"{last + more * (at + 1):g}" for at in range(count)]
            last += more * count
        else:
            told += [f"{value:g}"] * count
            last = value
    return " ".join(told)


def labels(alert: Firing) -> dict[str, str]:
    """All that an alert has, besides its state."""
    name, severity, about = alert
    if name in ABOUT_NODES:
        node = {"node": about} if about else {}
        return {"alertname": name, "severity": severity, "incident": "unwatched", **node}
    cause = {"cause": CAUSES[name]} if name in CAUSES else {}
    return {"alertname": name, "severity": severity, "incident": "memory", "job": about, **cause}


def assert_fires(folder: Path, series: Series, moments: Mapping[str, Sequence[Firing]]) -> None:
    """At each moment exactly these fire."""
    run_promtool(
        folder,
        series,
        promql_expr_test=[
            {
                "expr": 'ALERTS{alertstate="firing"}',
                "eval_time": moment,
                "exp_samples": [{"labels": _selector(alert), "value": 1} for alert in firing],
            }
            for moment, firing in moments.items()
        ],
    )


def assert_says(folder: Path, series: Series, moment: str, alert: Firing, annotations: Mapping[str, str]) -> None:
    """One alert of its name fires at its severity, and says this; others of the name are told apart by `severity`."""
    run_promtool(
        folder,
        series,
        alert_rule_test=[
            {
                "eval_time": moment,
                "alertname": alert[0],
                "exp_alerts": [
                    {
                        "exp_labels": {k: v for k, v in labels(alert).items() if k != "alertname"},
                        "exp_annotations": dict(annotations),
                    }
                ],
            }
        ],
    )


def assert_holds(folder: Path, series: Series, moment: str, *expressions: str) -> None:
    """Each expression is true at this moment."""
    run_promtool(
        folder,
        series,
        promql_expr_test=[
            {"expr": f"({one}) * 0 + 1", "eval_time": moment, "exp_samples": [{"labels": "{}", "value": 1}]}
            for one in expressions
        ],
    )


def _selector(alert: Firing) -> str:
    pairs = {**labels(alert), "alertstate": "firing"}
    return "ALERTS{" + ",".join(f"{name}={json.dumps(value)}" for name, value in pairs.items()) + "}"


def run_promtool(folder: Path, series: Series, rules: Path = SHIPPED, **tests: object) -> None:
    """Tests, as promtool has them, of rules that saw these series."""
    case = {
        "rule_files": [str(rules)],
        "evaluation_interval": "10s",
        "tests": [
            {
                "interval": "10s",
                "input_series": [{"series": name, "values": values} for name, values in series.items()],
                **tests,
            }
        ],
    }
    path = folder / "case.yml"
    path.write_text(json.dumps(case))  # JSON is YAML
    ran = subprocess.run([promtool(), "test", "rules", path], capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
