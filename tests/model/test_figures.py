"""Figures are written by one rule, by whatever writes them: Python, the page, Prometheus."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from allocscope.alerts.prometheus import templates
from allocscope.cli.figures import moment
from allocscope.model.figures import duration, percent, size
from tests.alerts.promtool import run_promtool
from tests.collector.test_page import SCRIPT, node

GIB = 1 << 30

SIZES = [
    (None, "–"),
    (0, "0 bytes"),
    (1, "1 byte"),
    (1023, "1023 bytes"),
    (1024, "1.00 KiB"),
    (1152, "1.12 KiB"),  # 1.125, exactly between two: to the even one, as PyTorch has it
    (1408, "1.38 KiB"),
    (3 << 19, "1.50 MiB"),
    (1_048_534_057, "999.96 MiB"),
    (GIB - 1, "1024.00 MiB"),
    (GIB, "1.00 GiB"),
    (85_469_849_190, "79.60 GiB"),
    (1_319_413_953_331, "1.20 TiB"),
    (5 << 50, "5120.00 TiB"),
    (-3 << 19, "-1.50 MiB"),
    (-1152, "-1.12 KiB"),
]
DURATIONS = [
    (None, "–"),
    (0, "0 s"),
    (0.04, "0 s"),
    (0.25, "0.2 s"),
    (0.4, "0.4 s"),
    (5.0, "5 s"),
    (9.97, "10 s"),
    (59.6, "60 s"),
    (90, "90 s"),
    (119, "119 s"),
    (120, "2 min"),
    (150, "2 min"),
    (3600, "60 min"),
    (7199, "120 min"),
    (10_800, "3 h"),
    (172_799, "48 h"),
    (7 * 86_400, "7 d"),
]
SHARES = [(None, "–"), (0, "0.0 %"), (0.1235, "12.3 %"), (0.125, "12.5 %"), (1, "100.0 %"), (-0.031, "-3.1 %")]


@pytest.mark.parametrize(("size_bytes", "written"), SIZES)
def test_a_size_is_written_as_pytorch_writes_it(size_bytes: int | None, written: str) -> None:
    assert size(size_bytes) == written


def test_a_size_that_was_reckoned_is_whole_bytes_first() -> None:
    assert [size(reckoned) for reckoned in (0.6, 1023.4, 1023.6)] == ["1 byte", "1023 bytes", "1.00 KiB"]


@pytest.mark.parametrize(("seconds", "written"), DURATIONS)
def test_a_duration_is_written_roughly(seconds: float | None, written: str) -> None:
    assert duration(seconds) == written


@pytest.mark.parametrize(("ratio", "written"), SHARES)
def test_a_share_is_written_in_percent(ratio: float | None, written: str) -> None:
    assert percent(ratio) == written


def test_in_a_sentence_what_is_not_known_has_a_word() -> None:
    assert {write(None, "unknown") for write in (size, duration, percent)} == {"unknown"}


def _many(seed: int = 1) -> dict[str, list[Any]]:
    """Besides those above: of every magnitude, about where the unit changes, and exactly between two that are written."""
    chance = random.Random(seed)
    some = [chance.randrange(1 << bits) for bits in range(1, 48) for _ in range(40)]
    edges = [(1 << power) + near for power in (10, 20, 30, 40) for near in (-1, 0, 1)]
    between = [unit * eighths // 8 for unit in (1 << 10, 1 << 20, 1 << 30, 1 << 40) for eighths in range(8, 100)]
    seconds = [chance.uniform(0, 10.0**power) for power in range(8) for _ in range(60)]
    halves = [unit * quarters / 4 for unit in (0.2, 1, 60, 3600, 86_400) for quarters in range(60)]
    ratios = [thousandths / 4000 for thousandths in range(-500, 5000)]
    return {
        "size": [value for value, _ in SIZES] + some + edges + between,
        "duration": [value for value, _ in DURATIONS] + seconds + halves,
        "percent": [value for value, _ in SHARES] + ratios,
        "moment": [None, 0, 1_700_000_000_000_000, 1_769_860_799_999_000],
    }


def test_the_page_writes_all_figures_as_the_commands_do() -> None:
    functions = SCRIPT[SCRIPT.index("// words and figures") : SCRIPT.index("// elements")]
    values = _many()
    calls = ",".join(f"{name}: {json.dumps(of)}.map((value) => {name}(value))" for name, of in values.items())
    said = node("--eval", f"{functions}\nconsole.log(JSON.stringify({{{calls}}}));")
    assert said.returncode == 0, said.stderr
    of_page = json.loads(said.stdout)
    for write in (size, duration, percent, moment):
        name = write.__name__
        assert dict(zip(values[name], of_page[name], strict=True)) == {value: write(value) for value in values[name]}


def test_prometheus_writes_sizes_and_durations_as_the_commands_do(tmp_path: Path) -> None:
    chance, many = random.Random(2), _many()
    sizes = [value for value, _ in SIZES if value is not None and value >= 0] + chance.sample(
        [s for s in many["size"] if s and s >= 0], 150
    )
    durations = [value for value, _ in DURATIONS[1:]] + chance.sample(many["duration"][len(DURATIONS) :], 150)
    shown = {"size": (sizes, templates.size, size), "duration": (durations, templates.duration, duration)}
    rules = tmp_path / "rules.yml"
    written = [
        {"alert": name, "expr": name, "annotations": {"written": templates.defined(template("$value"))}}
        for name, (_, template, _) in shown.items()
    ]
    rules.write_text(json.dumps({"groups": [{"name": "figures", "rules": written}]}))
    run_promtool(
        tmp_path,
        {f'{name}{{at="{at}"}}': repr(value) for name, (of, _, _) in shown.items() for at, value in enumerate(of)},
        rules,
        alert_rule_test=[
            {
                "eval_time": "0s",
                "alertname": name,
                "exp_alerts": [
                    {"exp_labels": {"at": str(at)}, "exp_annotations": {"written": write(value)}}
                    for at, value in enumerate(of)
                ],
            }
            for name, (of, _, write) in shown.items()
        ],
    )
