"""An allocator whose forecast turns at_risk is captured without anybody asking: seldom, and few at a time."""

import pytest

from allocscope.collector.fleet import Fleet
from allocscope.collector.foreseen import Foreseen
from allocscope.collector.observation import Observation
from allocscope.model import AllocatorRef, CaptureReason, Forecast, Process, State
from allocscope.storage.captures import CaptureState
from allocscope.storage.errors import StorageBusy
from allocscope.storage.sql import open_repository

NOW_US = 1_800_000_000_000_000
MINUTE_US = 60_000_000


class Watching:
    """A fleet with two ranks a job, and a database."""

    def __init__(self, path, *, enabled=True, jobs=5) -> None:
        self.captures = open_repository(f"sqlite:///{path}").captures
        self.observation, self.woken, self.now_us = Observation(), 0, NOW_US
        self.fleet = Fleet(retire_after_us=10 * MINUTE_US)
        for job in range(jobs):
            for rank in range(2):
                process = Process(f"{job}-{rank}", f"job{job}", 1, "host", 1, rank=rank)
                self.fleet.watch(self.ref(job, rank), process, "n1")
        self.enabled = enabled
        self.foreseen = self.restarted()

    def restarted(self) -> Foreseen:
        return Foreseen(self.captures, self.observation, wake=self.wake, enabled=self.enabled)

    def wake(self) -> None:
        self.woken += 1

    def ref(self, job=0, rank=0) -> AllocatorRef:
        return AllocatorRef(f"{job}-{rank}", "GPU-1")

    def look(self, *states: State, after_us=0, ref=None, seconds_to_oom=None) -> None:
        """Forecasts one after the other, told together, so much later."""
        self.now_us += after_us
        ref = ref or self.ref()
        forecasts = [Forecast(self.now_us, state, seconds_to_oom=seconds_to_oom) for state in states]
        if forecasts and ref in self.fleet.watched:
            self.fleet.watched[ref].watch.forecast = forecasts[-1]
        self.foreseen.look([(ref, forecast) for forecast in forecasts], self.fleet.watched, self.now_us)

    def ordered(self):
        return self.captures.page(limit=100).items[::-1]


@pytest.fixture
def watching(tmp_path):
    return Watching(tmp_path / "c.db")


def test_a_forecast_that_turns_at_risk_orders_a_capture_with_history(watching):
    watching.look(State.OK)
    watching.look(State.WATCH)
    assert watching.ordered() == ()
    watching.look(State.AT_RISK)
    [one] = watching.ordered()
    assert (one.process_id, one.job, one.rank, one.node, one.device_uuid) == ("0-0", "job0", 0, "n1", "GPU-1")
    assert (one.reason, one.state, one.ordered_us) == (CaptureReason.FORECAST, CaptureState.ORDERED, NOW_US)
    assert (one.history_us, one.most_history_entries, one.tensors) == (20_000_000, 200_000, False)
    assert watching.woken == 1
    found = watching.observation.registry.get_sample_value
    assert found("allocscope_captures_ordered_total", {"reason": "forecast", "outcome": "ordered"}) == 1


@pytest.mark.parametrize("states", [[State.CRITICAL], [State.AT_RISK, State.CRITICAL], [State.AT_RISK] * 9])
def test_however_it_gets_there_it_is_one(watching, states):
    for state in states:
        watching.look(state, after_us=MINUTE_US)
    assert len(watching.ordered()) == 1


def test_a_forecast_that_only_stays_at_risk_orders_no_more(watching):
    for _ in range(60):
        watching.look(State.AT_RISK, after_us=MINUTE_US)
    assert len(watching.ordered()) == 1


def test_a_forecast_that_comes_and_goes_orders_one_in_fifteen_minutes(watching):
    for _ in range(30):
        watching.look(State.OK, State.AT_RISK, after_us=MINUTE_US)
        watching.captures.fail({one.capture_id: "answered" for one in watching.captures.open_orders()})
    assert [one.ordered_us - NOW_US for one in watching.ordered()] == [MINUTE_US, 17 * MINUTE_US]


def test_a_restarted_collector_does_not_begin_anew(watching):
    watching.look(State.AT_RISK)
    watching.foreseen = watching.restarted()
    watching.look(State.AT_RISK, after_us=MINUTE_US)
    assert len(watching.ordered()) == 1


def test_few_are_on_order_at_a_time_and_others_have_their_turn_while_they_are_still_at_risk(tmp_path):
    watching = Watching(tmp_path / "c.db", jobs=6)
    for job in range(6):
        for rank in range(2):
            watching.look(State.AT_RISK, ref=watching.ref(job, rank))
    assert [one.job for one in watching.ordered()] == [f"job{number}" for number in (0, 0, 1, 1, 2, 2, 3, 3)]
    watching.look(State.OK, ref=watching.ref(4, 0))
    done = watching.captures.open_orders()[:4]
    watching.captures.fail({one.capture_id: "answered" for one in done})
    watching.look(after_us=MINUTE_US)
    assert [(one.job, one.rank) for one in watching.ordered()[8:]] == [("job4", 1), ("job5", 0), ("job5", 1)]


def test_few_ranks_of_one_job_are_captured_at_a_time(tmp_path):
    watching = Watching(tmp_path / "c.db", jobs=1)
    for rank in range(2, 8):
        ref = watching.ref(0, rank)
        watching.fleet.watch(ref, Process(f"0-{rank}", "job0", 1, "host", 1, rank=rank), "n1")
        watching.look(State.CRITICAL, ref=ref)
    assert [one.rank for one in watching.ordered()] == [2, 3]


def test_who_has_gone_is_not_captured(watching):
    for job in range(5):
        for rank in range(2):
            watching.look(State.AT_RISK, ref=watching.ref(job, rank))
    assert len(watching.ordered()) == 8
    watching.captures.fail({one.capture_id: "answered" for one in watching.captures.open_orders()})
    del watching.fleet.watched[watching.ref(4, 0)]
    watching.look(after_us=MINUTE_US)
    assert [(one.job, one.rank) for one in watching.ordered()[8:]] == [("job4", 1)]


@pytest.mark.parametrize(
    ("seconds_to_oom", "history_us"), [(None, 20_000_000), (3600.0, 20_000_000), (10.0, 5_000_000), (0.0, 1_000_000)]
)
def test_the_history_is_over_before_the_job_dies(watching, seconds_to_oom, history_us):
    watching.look(State.CRITICAL, seconds_to_oom=seconds_to_oom)
    assert [one.history_us for one in watching.ordered()] == [history_us]


def test_a_setting_switches_it_off(tmp_path):
    watching = Watching(tmp_path / "c.db", enabled=False)
    watching.look(State.CRITICAL)
    assert watching.ordered() == ()


def test_a_database_that_takes_nothing_is_asked_again(watching, monkeypatch):
    ordering = type(watching.captures).order

    def busy(*_, **__):
        raise StorageBusy("busy")

    monkeypatch.setattr(type(watching.captures), "order", busy)
    watching.look(State.AT_RISK)
    monkeypatch.setattr(type(watching.captures), "order", ordering)
    watching.look(after_us=1_000_000)
    assert watching.ordered() == (), "not at once"
    watching.look(after_us=MINUTE_US)
    assert len(watching.ordered()) == 1
