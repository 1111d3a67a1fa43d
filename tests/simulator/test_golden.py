"""Each version's own rules: PyTorch 2.11.0, 2.12.1, 2.13.0 and 2.14.1 chose these addresses."""

import json

import pytest

from allocscope.allocator.simulator.replay import golden_of, replay_golden
from allocscope.cli.replay import main as replay
from tests.simulator.recorded import files, read_lines

RUNS = [pytest.param(path, id=path.name.removesuffix(".jsonl.gz")) for path in files("golden")]


@pytest.mark.parametrize("path", RUNS)
def test_each_request_has_its_address_and_figures(path):
    header, *rows, _ = read_lines(path)
    found = replay_golden(golden_of([header, *rows], path.name), path.name)
    assert len(found) == len(rows) > 300
    for at, (row, expected) in enumerate(zip(found, rows, strict=True)):
        figures = dict(zip(header["stat_columns"], expected["stats"], strict=True))
        assert dict(zip(header["stat_columns"], row.stats, strict=True)) == figures, f"row {at}"
        if expected["op"] == "alloc":
            assert row.address == expected["addr"], f"row {at}"


VERSIONS = ["2.11.0", "2.12.1", "2.13.0", "2.14.1"]


def addresses_under(version, lines):
    return [row.address for row in replay_golden(golden_of([{**lines[0], "torch": version}, *lines[1:]], "run"))]


@pytest.mark.parametrize(
    ("run", "telling"),
    [("2.12.1-maxsplit", ["2.11.0", "2.13.0", "2.14.1"]), ("2.14.1-default-train", ["2.11.0", "2.12.1"])],
)
def test_these_runs_tell_the_versions_apart(run, telling):
    path = next(path for path in files("golden") if path.name == f"{run}.jsonl.gz")
    lines = read_lines(path)[:-1]
    true = [line.get("addr") for line in lines[1:]]
    assert [version for version in VERSIONS if addresses_under(version, lines) != true] == telling


def test_the_command_prints_a_row_for_each_request(capsys):
    path = next(path for path in files("golden") if path.name == "2.12.1-maxsplit.jsonl.gz")
    _, *rows, _ = read_lines(path)
    assert replay(["--golden", str(path), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)["rows"]
    assert [row["addr"] for row in printed] == [row.get("addr") for row in rows]
    assert [row["stats"] for row in printed] == [row["stats"] for row in rows]
