"""Alerts of a job's ranks, gathered: one alert of one incident, naming the rank that goes first."""

from __future__ import annotations

from dataclasses import replace

import pytest

from allocscope.alerts.gather import Gathering, urgency
from allocscope.alerts.rules import Subject, alerts_of
from allocscope.alerts.states import Alert, AlertState, Progress
from allocscope.alerts.watch import Watch
from allocscope.model import Cause, Forecast, State
from tests.alerts.stories import CRITICAL, S
from tests.forecast.streams import outlook

NAME = "AllocscopeMemoryLeak"


def subject(rank: int, job: str = "llama") -> Subject:
    return Subject(node=f"n{rank // 8}", job=job, rank=rank, gpu=rank % 8, uuid=f"GPU-{rank}")


def foreseen(seconds: float | None, margin: float | None = -0.1, state: State = State.CRITICAL) -> Forecast:
    return Forecast(
        0, state, Cause.LEAK, margin_ratio=margin, seconds_to_oom=seconds, summary=f"it leaks, {seconds} s left"
    )


def watch(rank: int, forecast: Forecast, job: str = "llama") -> Watch:
    """One rank whose critical alert fires by this forecast."""
    it = Watch(subject(rank, job), outlook())
    it.forecast, it.alerts = forecast, (member(rank, forecast, job=job),)
    return it


def member(
    rank: int, forecast: Forecast | None = None, *, at_s: int = 1, over: bool = False, job: str = "llama"
) -> Alert:
    conditions = alerts_of(replace(forecast or foreseen(60.0), state=State.CRITICAL), subject(rank, job))
    condition = next(c for c in conditions if c.rule.severity is CRITICAL)
    state = AlertState.RESOLVED if over else AlertState.FIRING
    return Alert(condition, Progress(state, since_us=at_s * S, fired_us=at_s * S))


def test_sixty_four_ranks_at_risk_are_one_alert_that_names_the_first_to_go():
    gathering = Gathering()
    watches = {subject(rank): watch(rank, foreseen(600.0 - 10 * (rank == 41))) for rank in range(64)}
    told = [gathering.take(w.alerts[0], 0) for w in watches.values()]
    assert [alert is not None for alert in told] == [True] + [False] * 63
    [alert] = gathering.retell(watches, 5 * S)
    assert alert.labels == {
        "alertname": NAME,
        "severity": "critical",
        "cause": "leak",
        "incident": "memory",
        "job": "llama",
    }
    assert alert.condition.place == {"node": "n5", "job": "llama", "rank": "41", "gpu": "1", "uuid": "GPU-41"}
    assert alert.condition.summary == (
        "rank 41 of llama on n5, GPU 1 is about to run out of memory, by a leak: it leaks, 590.0 s left;"
        " 63 more of the job's ranks with it"
    )
    assert gathering.standing() == [alert]


def test_a_job_of_one_rank_says_what_the_rank_says():
    gathering = Gathering()
    alert = gathering.take(member(3), 0)
    assert alert is not None
    assert alert.condition.summary == member(3).condition.summary
    assert alert.fired_us == S
    over = gathering.take(member(3, at_s=9, over=True), 0)
    assert over is not None
    assert (over.state, over.resolved_us, over.fired_us) == (AlertState.RESOLVED, 9 * S, S)
    assert gathering.standing() == []


def test_it_is_over_with_the_last_rank_and_not_before():
    gathering = Gathering()
    gathering.take(member(1, at_s=100), 0)
    gathering.take(member(2, at_s=50), 0)
    assert gathering.take(member(1, at_s=200, over=True), 0) is None
    over = gathering.take(member(2, at_s=60, over=True), 0)
    assert over is not None
    assert (over.fired_us, over.resolved_us) == (100 * S, 100 * S), "not before it began, though the clocks differ"


def test_who_resolves_without_having_fired_changes_nothing():
    gathering = Gathering()
    assert gathering.take(member(1, over=True), 0) is None
    gathering.take(member(2), 0)
    assert gathering.take(member(1, over=True), 0) is None
    assert len(gathering.standing()) == 1


def test_two_jobs_are_two_alerts():
    gathering = Gathering()
    told = [gathering.take(member(1, job=job), 0) for job in ("a", "b")]
    assert [alert.labels["job"] for alert in told if alert] == ["a", "b"]


@pytest.mark.parametrize(
    ("forecasts", "first"),
    [
        pytest.param([foreseen(600.0), foreseen(60.0)], 1, id="the least time left"),
        pytest.param([foreseen(None, -0.5), foreseen(6000.0, 0.2)], 1, id="a trend before none"),
        pytest.param([foreseen(None, -0.1), foreseen(None, -0.2)], 1, id="the least margin"),
        pytest.param([foreseen(None, None), foreseen(None, 0.9)], 1, id="a margin before none"),
        pytest.param([foreseen(10.0, state=State.AT_RISK), foreseen(99.0)], 1, id="the gravest state"),
        pytest.param([foreseen(60.0), foreseen(60.0)], 0, id="of equals the one that began first"),
    ],
)
def test_who_goes_first(forecasts, first):
    assert min(range(len(forecasts)), key=lambda rank: urgency(forecasts[rank])) == first
    gathering = Gathering()
    watches = {subject(rank): watch(rank, forecast) for rank, forecast in enumerate(forecasts)}
    for one in watches.values():
        gathering.take(member(one.subject.rank or 0), 0)
    gathering.retell(watches, 60 * S)
    assert gathering.standing()[0].condition.first == subject(first)


def test_another_leader_is_told_of_soon_other_figures_each_minute():
    gathering = Gathering()
    watches = {subject(rank): watch(rank, foreseen(60.0 + rank)) for rank in range(2)}
    for one in watches.values():
        gathering.take(one.alerts[0], 0)
    assert gathering.retell(watches, 4 * S) == []
    assert [a.condition.ranks for a in gathering.retell(watches, 5 * S)] == [2]
    watches[subject(0)] = watch(0, foreseen(50.0))
    assert gathering.retell(watches, 64 * S) == []
    assert [a.condition.summary.partition(": ")[2] for a in gathering.retell(watches, 65 * S)] == [
        "it leaks, 50.0 s left; 1 more of the job's ranks with it"
    ]
    watches[subject(1)] = watch(1, foreseen(5.0))
    assert gathering.retell(watches, 69 * S) == []
    assert [a.condition.first for a in gathering.retell(watches, 70 * S)] == [subject(1)]
    assert gathering.retell(watches, 1000 * S) == [], "nothing is new"


def test_a_rank_that_has_gone_still_counts_while_its_alert_stands():
    gathering = Gathering()
    gathering.take(member(1), 0)
    gathering.take(member(2), 0)
    [alert] = gathering.retell({}, 60 * S)
    assert (alert.condition.first, alert.condition.ranks) == (subject(1), 2)


def test_an_alert_that_stood_before_a_restart_goes_on():
    gathering = Gathering()
    before = Gathering().take(member(1), 0)
    assert before is not None
    assert gathering.restore(before, replace(member(1)), 0) == before
    assert gathering.take(member(2), 0) is None
    assert gathering.take(member(1, over=True), 0) is None
    assert gathering.take(member(2, over=True), 0) is not None


def test_a_rank_of_whom_more_is_known_goes_on():
    gathering = Gathering()
    unknown, known = subject(1), replace(subject(1), rank=17)
    gathering.take(member(1), 0)
    gathering.take(member(2), 0)
    gathering.rename(unknown, known)
    [alert] = gathering.retell({}, 60 * S)
    assert (alert.condition.first, alert.condition.ranks) == (known, 2)
    assert gathering.take(member(1, over=True), 0) is None, "nobody is called that any more"
    assert gathering.take(member(2, over=True), 0) is None
    over = gathering.take(member(1, over=True).of(known), 0)
    assert over is not None


def test_a_job_that_was_killed_and_begun_anew_has_its_alert_until_the_new_one_is_well():
    """The one before it is given up minutes later, and was in the very same place."""
    gathering = Gathering()
    assert gathering.take(member(3), 0) is not None
    assert gathering.take(member(3, at_s=200), 0) is None
    assert gathering.take(member(3, at_s=300, over=True), 0) is None
    over = gathering.take(member(3, at_s=900, over=True), 0)
    assert over is not None
    assert over.resolved_us == 900 * S
    assert gathering.standing() == []


def test_of_two_in_one_place_one_takes_another_rank():
    gathering = Gathering()
    gathering.take(member(3), 0)
    gathering.take(member(3, at_s=200), 0)
    gathering.rename(subject(3), subject(5))
    assert set(gathering.members(NAME)) == {subject(3), subject(5)}
    assert gathering.take(member(5, over=True), 0) is None
    assert gathering.take(member(3, over=True), 0) is not None
