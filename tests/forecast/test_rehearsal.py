"""Recorded runs, rehearsed: what would have been said of them, and when."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from allocscope.alerts.rehearsal import Rehearsal, RehearsedAlert, rehearse
from allocscope.alerts.rules import Severity
from allocscope.allocator.recording import read_recording
from allocscope.cli import rehearse as command

RECORDINGS = Path(command.__file__).parent / "recordings"
LABELS: dict[str, dict[str, Any]] = json.loads((RECORDINGS / "labels.json").read_text())
DEATHS = sorted(name for name, label in LABELS.items() if label["oom"] and label["foreseeable"])
HEALTHY = sorted(name for name, label in LABELS.items() if not label["oom"] and not label["doomed"])


@cache
def rehearsed(name: str) -> Rehearsal:
    return rehearse(read_recording(RECORDINGS / f"{name}.run.json"))


def _critical(rehearsal: Rehearsal) -> list[RehearsedAlert]:
    return [alert for alert in rehearsal.alerts if alert.severity is Severity.CRITICAL]


def test_the_recordings_here_are_of_both_kinds():
    assert len(DEATHS) >= 5
    assert len(HEALTHY) >= 4


@pytest.mark.parametrize("name", DEATHS)
def test_a_death_is_foreseen_two_minutes_ahead_with_its_cause(name):
    rehearsal, label = rehearsed(name), LABELS[name]
    assert rehearsal.oom_us == label["oom_us"]
    standing = [alert for alert in _critical(rehearsal) if alert.resolved_us is None]
    assert standing
    assert min(alert.at_us for alert in standing) <= label["oom_us"] - 120_000_000
    assert standing[-1].cause is not None
    assert standing[-1].cause.value in label["cause"]


@pytest.mark.parametrize("name", HEALTHY)
def test_of_a_healthy_run_nothing_critical_is_said(name):
    rehearsal = rehearsed(name)
    assert rehearsal.oom_us is None
    assert not _critical(rehearsal)


@pytest.mark.parametrize("name", sorted(LABELS))
def test_no_alert_fires_more_than_twice_in_a_run(name):
    fired = [(alert.name, alert.severity) for alert in rehearsed(name).alerts]
    assert all(fired.count(alert) <= 2 for alert in fired)


@pytest.mark.parametrize("seed", [1, 2])
def test_the_moments_of_the_maps_do_not_decide(seed):
    again = rehearse(read_recording(RECORDINGS / "leak-1-3771.run.json"), seed=seed)
    assert [a.at_us for a in _critical(again)] == [a.at_us for a in _critical(rehearsed("leak-1-3771"))]


def test_a_rehearsal_says_the_same_each_time():
    assert rehearse(read_recording(RECORDINGS / "varlen-1-2985.run.json")) == rehearsed("varlen-1-2985")


def test_nothing_is_known_of_a_death_before_it_comes():
    """Up to any moment a run that is cut there gets the same alerts as the whole one."""
    whole = read_recording(RECORDINGS / "leak-1-3771.run.json")
    end_us = whole.start_us + 400_000_000
    cut = replace(whole, end_us=end_us, trace=tuple(entry for entry in whole.trace if entry.time_us <= end_us))
    begun = [(a.name, a.severity, a.at_us, a.summary) for a in rehearsed("leak-1-3771").alerts if a.at_us <= end_us]
    assert begun
    assert [(a.name, a.severity, a.at_us, a.summary) for a in rehearse(cut).alerts] == begun


def test_the_command_says_it_as_json(capsys):
    assert command.main([str(RECORDINGS / "leak-1-3771.run.json"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert set(told) == {"samples", "oom_us", "alerts"}
    assert told["samples"] == 606
    assert told["oom_us"] == LABELS["leak-1-3771"]["oom_us"]
    critical = [alert for alert in told["alerts"] if alert["severity"] == "critical"]
    assert [alert["name"] for alert in critical] == ["AllocscopeMemoryLeak"]
    assert set(critical[0]) == {"name", "severity", "cause", "at_us", "resolved_us", "summary"}
    assert critical[0]["cause"] == "leak"
    assert critical[0]["resolved_us"] is None


def test_the_command_says_it_to_people(capsys):
    assert command.main([str(RECORDINGS / "steady-1-2216.run.json")]) == 0
    assert capsys.readouterr().out == "steady-1-2216: 1,009 samples; went on to its end\nno alerts\n"


@pytest.mark.parametrize("what", ["missing", "cut off"])
def test_a_recording_that_cannot_be_used_is_an_error_in_one_line(what, tmp_path, capsys):
    description = tmp_path / "steady-1-2216.run.json"
    if what == "cut off":
        description.write_bytes((RECORDINGS / description.name).read_bytes())
        snapshot = (RECORDINGS / "steady-1-2216.pickle.gz").read_bytes()
        (tmp_path / "steady-1-2216.pickle.gz").write_bytes(snapshot[: len(snapshot) // 2])
    assert command.main([str(description), "--json"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("allocscope rehearse: ")
    assert err.count("\n") == 1
