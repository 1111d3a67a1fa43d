"""The demo's verdict: what is right, what was foreseen, when the usual rule fires."""

from __future__ import annotations

import pytest

from allocscope.cli.demo.verdict import Critical, Verdict, is_increasing, standing_at, usual_rule_at

MINUTE_US = 60_000_000


def verdict(
    *, died_at_s: float | None, alert_at_s: float | None, foreseeable: bool = True, cause: str | None = "leak"
) -> Verdict:
    return Verdict(
        job="job",
        node="node-a",
        outcome="completed" if died_at_s is None else "oom",
        foreseeable=foreseeable,
        causes=frozenset({"leak", "growth"}),
        died_at_s=died_at_s,
        alert_at_s=alert_at_s,
        cause=cause,
        usual_rule_at_s=None,
    )


@pytest.mark.parametrize(
    ("one", "right"),
    [
        pytest.param(verdict(died_at_s=500, alert_at_s=300), True, id="foreseen"),
        pytest.param(verdict(died_at_s=500, alert_at_s=300, cause="neighbour"), False, id="foreseen for another cause"),
        pytest.param(verdict(died_at_s=500, alert_at_s=None), False, id="missed"),
        pytest.param(
            verdict(died_at_s=25, alert_at_s=None, foreseeable=False), True, id="nobody could have foreseen it"
        ),
        pytest.param(verdict(died_at_s=None, alert_at_s=None), True, id="left in peace"),
        pytest.param(verdict(died_at_s=None, alert_at_s=300), False, id="false alarm"),
    ],
)
def test_a_death_must_be_foreseen_and_a_healthy_job_left_in_peace(one: Verdict, right: bool) -> None:
    assert one.right is right


def test_the_lead_is_from_the_alert_to_the_death() -> None:
    assert verdict(died_at_s=565.2, alert_at_s=171.0).lead_s == 394.2


@pytest.mark.parametrize(
    ("criticals", "died_at_s", "at_s"),
    [
        pytest.param(
            [Critical("leak", 100, 200), Critical("growth", 150, None)],
            300,
            150,
            id="one that resolved before does not count",
        ),
        pytest.param([Critical("leak", 100, 300)], 300, 100, id="one that ended with the death stood"),
        pytest.param([Critical("leak", 301, None)], 300, None, id="one that came after the death foresaw nothing"),
        pytest.param([Critical("leak", 100, 120)], None, 100, id="in a job that lived any counts"),
        pytest.param([], 300, None, id="none"),
    ],
)
def test_foresight_is_an_alert_that_stands_at_the_death(
    criticals: list[Critical], died_at_s: float | None, at_s: float | None
) -> None:
    found = standing_at(criticals, died_at_s)
    assert (found.at_s if found else None) == at_s


@pytest.mark.parametrize(
    ("used", "fires_at_us"),
    [
        pytest.param([96] * 7, 5 * MINUTE_US, id="five minutes above"),
        pytest.param([95] * 7, None, id="at the threshold is not above it"),
        pytest.param([96, 96, 96, 90, 96, 96, 96], None, id="a dip starts over"),
        pytest.param([], None, id="nothing known"),
    ],
)
def test_the_usual_rule_is_more_than_95_percent_for_five_minutes(used: list[int], fires_at_us: int | None) -> None:
    assert usual_rule_at(((minute * MINUTE_US, bytes_) for minute, bytes_ in enumerate(used)), 100) == fires_at_us


def test_a_sample_stored_twice_shows() -> None:
    assert is_increasing([1, 2, 5])
    assert not is_increasing([1, 2, 2])
