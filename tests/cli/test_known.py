"""A name that nobody knows is told apart from one of which there is nothing to tell; a real collector is asked."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from allocscope.cli.app import main
from allocscope.cli.capture_options import read_options
from allocscope.collector.capture_api import LONGEST_HISTORY_S, MOST_HISTORY_ENTRIES
from allocscope.probe.captures import HISTORY_ENTRIES
from tests.collector.harness import CollectorProcess, batch, collector, sample, stream


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CollectorProcess]:
    with collector(tmp_path_factory.mktemp("collector")) as made:
        with stream(made.grpc, "gpu-01") as it:
            it.batch(batch(1, sample(1), number=1, job="llama"))
            it.until(1)
        yield made


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch, running: CollectorProcess) -> None:
    monkeypatch.setenv("ALLOCSCOPE_URL", f"http://{running.http}")


NO_JOB = (
    "no reports of job 'lama': it never reported, or aged out of retention"
    " (allocscope jobs, or /api/v1/jobs, lists those that there are)"
)
NO_NODE = "no reports of node 'gpu-1'; known: gpu-01"


@pytest.mark.parametrize("form", [[], ["--json"]])
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["bill", "lama"], NO_JOB),
        (["advise", "lama"], NO_JOB),
        (["capture", "lama"], NO_JOB),
        (["capture", "--list", "lama"], NO_JOB),
        (["alerts", "--job", "lama"], NO_JOB),
        (["alerts", "--job", "lama", "--state", "firing"], NO_JOB),
        (["devices", "--node", "gpu-1"], NO_NODE),
        (["advise", "llama", "--rank", "7"], "no process of job 'llama' is of rank 7; known: 0"),
    ],
)
def test_what_nobody_knows_is_an_error(
    capsys: pytest.CaptureFixture[str], arguments: list[str], form: list[str], says: str
) -> None:
    assert main([*arguments, *form]) == 1
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", f"allocscope: {says}\n")


@pytest.mark.parametrize(
    "arguments",
    [
        ["capture", "--list", "llama"],
        ["alerts", "--job", "llama"],
        ["devices", "--node", "gpu-01"],
        ["capture", "--list"],
    ],
)
def test_what_is_known_may_have_nothing(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    assert main(arguments) == 0
    assert capsys.readouterr().out.endswith("\n(none)\n")
    assert main([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"items": []}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["capture", "llama", "--history", "5h"], "--history: at most 600 s, not 18000"),
        (["capture", "llama", "--history", "0"], "--history: at least 0.1 s, not 0"),
        (["capture", "llama", "--entries", "0"], "--entries: at least 1, not 0"),
        (["capture", "llama", "--entries", "9999999"], "--entries: at most 1000000, not 9999999"),
        (["capture", "llama", "--device", "x" * 600], "--device: at most 512 letters"),
        (["advise", "llama", "--fresh", "--history", "5h"], "--history: at most 600 s, not 18000"),
    ],
)
def test_a_value_that_may_not_be_is_told_by_its_option_with_what_may_be(
    capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    assert main(arguments) == 2
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", f"allocscope {arguments[0]}: {says}\n")


@pytest.mark.parametrize(
    "arguments", [["bill", ""], ["advise", ""], ["capture", ""], ["alerts", "--job", ""], ["devices", "--node", ""]]
)
def test_an_empty_name_is_a_wrong_call(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert "a name is wanted, and none was given" in capsys.readouterr().err


def test_help_tells_the_bounds_that_the_collector_and_the_probe_hold(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        read_options(["--help"], "")
    told = " ".join(capsys.readouterr().out.split())
    assert (LONGEST_HISTORY_S, MOST_HISTORY_ENTRIES, HISTORY_ENTRIES) == (600, 1_000_000, 200_000)
    assert "0.1s to 10m" in told
    assert "1 to 1000000 (default: 200000)" in told
