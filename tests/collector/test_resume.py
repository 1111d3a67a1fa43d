"""After a kill or an outage: what is told is what would have been told without, once in each life of a collector."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import allocscope.cli
from allocscope.alerts.rehearsal import rehearse
from allocscope.alerts.states import Alert, AlertState
from allocscope.allocator.recording import read_recording
from allocscope.collector.evaluate import Evaluator
from allocscope.collector.fleet import Change, Fleet
from allocscope.collector.foreseen import Foreseen
from allocscope.collector.observation import Observation
from allocscope.collector.records import alert_record
from allocscope.collector.resume import resume
from allocscope.model import AllocatorRef, Event, EventKind, Process, Sample
from allocscope.storage.errors import StorageBroken
from allocscope.storage.records import NodeBatch, Page, ProcessRecord
from allocscope.storage.repository import Repository
from allocscope.storage.sql import open_repository
from tests.alerts.stories import until
from tests.collector.made import PROCESS_ID, RECEIVED_US, batch, batches, player, recorded_process

RECORDINGS = Path(allocscope.cli.__path__[0]) / "recordings"
SECOND_US = 1_000_000
MINUTE_US = 60 * SECOND_US
RETIRE_AFTER_US = 5 * MINUTE_US


@pytest.fixture(scope="module")
def recording():
    """Dies of a leak; what was called growth at first resolves in between."""
    return read_recording(RECORDINGS / "leak-1-3771.run.json")


@pytest.fixture(scope="module")
def seen(recording):
    return list(player(recording))


@pytest.fixture
def repository(tmp_path) -> Iterator[Repository]:
    opened = open_repository(f"sqlite:///{tmp_path / 'c.db'}")
    yield opened
    opened.close()


class Life:
    """One life of a collector, from what the one before has left; what it told."""

    def __init__(self, repository: Repository, now_us: int, began_us: int | None = None) -> None:
        self._repository = repository
        self.fleet, self.now_us = Fleet(retire_after_us=RETIRE_AFTER_US), now_us
        self.again = resume(repository, self.fleet, now_us=now_us, retire_after_us=RETIRE_AFTER_US, began_us=began_us)
        self.told: list[Change] = []
        self._tell(self.again)

    def take(self, one: NodeBatch) -> None:
        if one.sequence == 1:
            hello(self._repository, one.node, one.received_us)
        self._repository.store([one])
        self.now_us = one.received_us
        self._tell(self.fleet.take(one))

    def tick(self, now_us: int, last_seen_us: dict[str, int] | None = None) -> list[Change]:
        """What was told by it, but for newer words."""
        self.now_us = now_us
        changes = self.fleet.tick(now_us, last_seen_us or {})
        self._tell(changes)
        self._repository.save_forecasts(self.fleet.forecasts(), made_us=now_us)
        return [change for change in changes if not change.retold]

    def _tell(self, changes: list[Change]) -> None:
        self.told += changes
        kept = [alert_record(change, updated_us=self.now_us) for change in changes if not change.as_kept]
        self._repository.save_alerts(kept)


def hello(repository: Repository, node: str, now_us: int) -> None:
    """Its daemon comes."""
    repository.register_node(
        node, "d1", version="1", metrics_address=None, received_us=now_us, silent_before_us=now_us + 1
    )


def named(changes: list[Change]) -> list[tuple[str, str]]:
    return [(change.alert.condition.rule.name, change.alert.state.value) for change in changes]


def of_severity(changes: list[Change]) -> list[tuple[str, str, str]]:
    return [(c.alert.condition.rule.name, c.alert.condition.rule.severity.value, c.alert.state.value) for c in changes]


@pytest.mark.parametrize("kept", [True, False], ids=["forecasts were kept", "forecasts were not kept"])
def test_alerts_begin_and_end_as_rehearsed_however_often_the_collector_is_killed(recording, seen, repository, kept):
    """What was pending, or about to resolve, goes on where it was: to the very moment."""
    cut = list(batches(recorded_process(recording), seen, 20))
    life = Life(repository, RECEIVED_US)
    for number, one in enumerate(cut):
        life.take(one)
        if number % 4 == 3:
            if kept:
                life.tick(life.now_us)
            life = Life(repository, life.now_us)
    records = repository.alerts(limit=100).items
    expected = sorted((a.name, a.severity.value, a.at_us, a.resolved_us) for a in rehearse(recording).alerts)
    assert sorted((r.name, r.severity, r.at_us, r.resolved_us) for r in records) == expected
    assert any(resolved_us for *_, resolved_us in expected)


@pytest.mark.parametrize("stopped", [False, True], ids=["and fell silent", "and ended"])
def test_that_a_job_ran_out_of_memory_is_told_though_the_collector_was_killed_as_it_heard_it(
    recording, seen, repository, stopped
):
    process, oom = recorded_process(recording), seen[-1]
    *before, last = batches(process, seen, 100)
    life = Life(repository, RECEIVED_US)
    for one in before:
        life.take(one)
    events = (*last.events, Event(PROCESS_ID, oom.sequence + 1, oom.time_us, EventKind.STOPPED))
    repository.store([replace(last, events=events) if stopped else last])
    now_us = last.received_us
    for begins in (True, False):
        told = [c for c in Life(repository, now_us).again if c.alert.condition.rule.name == "AllocscopeOOM"]
        assert [(c.alert.state, c.alert.fired_us, c.as_kept) for c in told] == [
            (AlertState.FIRING, oom.time_us, not begins)
        ]
    again = Life(repository, now_us).fleet
    assert again.take(last) == [], "it is sent again, as it was not acknowledged"
    assert len(again.ooms) == 1


def test_what_was_foreseen_of_a_job_that_ended_as_the_collector_was_killed_ends_with_it(recording, seen, repository):
    before = at_risk(recording, seen, repository)
    ended_us = max(c.alert.fired_us or 0 for c in before.told) + SECOND_US
    stopped = [Event(PROCESS_ID, 10_000, ended_us, EventKind.STOPPED)]
    repository.store([batch(1000, recorded_process(recording), stopped, received_us=before.now_us)])
    again = Life(repository, before.now_us).again
    assert {(c.alert.state, c.alert.resolved_us, c.reason) for c in again if not c.as_kept} == {
        (AlertState.RESOLVED, ended_us, "its process stopped")
    }


def at_risk(recording, seen, repository: Repository) -> Life:
    """A collector that has told of a critical alert."""
    life = Life(repository, RECEIVED_US)
    for one in batches(recorded_process(recording), seen, 20):
        life.take(one)
        life.tick(life.now_us)
        if any(c.alert.condition.rule.severity.value == "critical" for c in life.told):
            return life
    raise AssertionError("it dies without an alert")


def test_an_outage_of_the_collector_is_no_silence_of_those_it_listens_to(recording, seen, repository):
    before = at_risk(recording, seen, repository)
    now_us = before.now_us + 30 * MINUTE_US
    hello(repository, "n1", now_us)
    after = Life(repository, now_us, began_us=now_us - SECOND_US)
    assert {state for _, severity, state in of_severity(after.again) if severity == "critical"} == {"firing"}
    assert [after.tick(now_us + second * SECOND_US) for second in range(59)] == [[]] * 59
    assert named(after.tick(now_us + 61 * SECOND_US)) == [("AllocscopeNodeSilent", "firing")]
    over = [c for second in range(62, 302) for c in after.tick(now_us + second * SECOND_US)]
    assert {state for name, state in named(over) if name != "AllocscopeNodeSilent"} == {"resolved"}


def test_a_node_that_was_silent_before_the_collector_ended_is_so_after_it(repository):
    process = Process(PROCESS_ID, "calm", 4711, "host", 1, rank=0)
    life = Life(repository, RECEIVED_US)
    life.take(batch(1, process, []))
    assert named(life.tick(life.now_us + 61 * SECOND_US, {"n1": life.now_us})) == [("AllocscopeNodeSilent", "firing")]
    after = Life(repository, life.now_us + 10 * MINUTE_US)
    assert named(after.again) == [("AllocscopeNodeSilent", "firing")]
    assert after.tick(after.now_us + SECOND_US) == []


@pytest.mark.parametrize("later_us", [10 * MINUTE_US, 0], ids=["after an outage", "at once"])
def test_what_resolved_just_before_the_end_is_told_again_as_its_telling_may_have_been_cut_off(
    recording, seen, repository, later_us
):
    before = at_risk(recording, seen, repository)
    heard_us, over = before.now_us, list[Change]()
    for second in range(1, 302):
        over += before.tick(heard_us + second * SECOND_US)
    ended = set(of_severity(over))
    assert {state for *_, state in ended} == {"resolved"}
    again = Life(repository, before.now_us + later_us).again
    assert (set(of_severity(again)), {change.as_kept for change in again}) == (ended, {True})


def test_a_jobs_alert_stands_though_the_rank_that_it_named_ends_with_the_restart(recording, seen, repository):
    life = Life(repository, RECEIVED_US)
    ranks = [replace(recorded_process(recording), process_id=str(rank) * 32, rank=rank) for rank in range(2)]
    for cut in batches(ranks[0], seen, 20):
        for process in ranks:
            life.take(of(process, cut))
        if any(c.alert.condition.rule.severity.value == "warning" for c in life.told):
            break
    after = Life(repository, life.now_us)
    stopped = [Event(PROCESS_ID, 10_000, life.now_us, EventKind.STOPPED)]
    after.take(of(ranks[0], batch(1000, ranks[0], stopped)))
    assert {state for _, state in named(after.told)} == {"firing"}
    after.take(of(ranks[1], batch(1001, ranks[1], stopped)))
    states = dict(named(after.told))
    assert states
    assert set(states.values()) == {"resolved"}


def of(process: Process, one: NodeBatch) -> NodeBatch:
    """A batch, as another rank on another node would send it."""
    ref = AllocatorRef(process.process_id, "GPU-a")
    return replace(
        one,
        node=f"n{process.rank}",
        processes=(process,),
        chunks=tuple(replace(chunk, allocator=ref) for chunk in one.chunks),
        block_maps=tuple((ref, block_map) for _, block_map in one.block_maps),
        events=tuple(replace(event, process_id=process.process_id) for event in one.events),
    )


def test_a_database_that_does_not_answer_at_the_start_is_asked_until_it_does(recording, seen, repository, monkeypatch):
    before = at_risk(recording, seen, repository)
    real, failing = repository.processes, [StorageBroken("gone"), StorageBroken("gone")]

    def processes(**asked: Any) -> Page[ProcessRecord]:
        if failing:
            raise failing.pop()
        page: Page[ProcessRecord] = real(**asked)
        return page

    monkeypatch.setattr(repository, "processes", processes)
    monkeypatch.setattr("allocscope.collector.evaluate.TICK_S", 0.01)
    told: list[Alert] = []
    evaluator = following(repository, told, before.now_us)
    evaluator.start()
    until(lambda: told)
    evaluator.close(10)
    assert len(told) == len({tuple(alert.labels.items()) for alert in told})
    assert len(evaluator.fleet.watched) == 1
    assert not failing


def following(
    repository: Repository, told: list[Alert], at_us: int, now_us: Callable[[], int] | None = None
) -> Evaluator:
    observation = Observation()
    return Evaluator(
        repository,
        observation,
        nodes=lambda: (),
        publish=told.extend,
        foreseen=Foreseen(repository.captures, observation, wake=lambda: None, enabled=False),
        now_us=now_us or (lambda: at_us),
        retire_after_s=300,
    )


def test_with_an_alert_it_is_kept_how_far_everybody_was_judged(recording, seen, repository, monkeypatch):
    """Not a second later: what was told must not be judged anew after a kill, whichever rank it was told of."""
    monkeypatch.setattr("allocscope.collector.evaluate.TICK_S", 1000.0)
    first, *others = batches(recorded_process(recording), seen, 50)
    told: list[Alert] = []
    evaluator = following(repository, told, RECEIVED_US)
    repository.store([first, *others])
    evaluator.start()
    evaluator.put([first])
    until(lambda: repository.forecasts(limit=1).items)  # by the first tick; there is no second one
    evaluator.put(others)
    until(lambda: told)
    latest_us = max(item.time_us for item in seen if isinstance(item, Sample))
    until(lambda: repository.forecasts(limit=1).items[0].forecast.time_us > latest_us - 2 * SECOND_US)
    evaluator.close(10)


def test_an_end_is_kept_though_the_clock_was_set_back_since_the_beginning(recording, seen, repository):
    before = at_risk(recording, seen, repository)
    stopped = [Event(PROCESS_ID, 10_000, seen[-1].time_us, EventKind.STOPPED)]
    repository.store([batch(1000, recorded_process(recording), stopped)])
    told: list[Alert] = []
    evaluator = following(repository, told, before.now_us - 60 * MINUTE_US)
    evaluator.start()
    until(lambda: told)
    evaluator.close(10)
    assert {record.state for record in repository.alerts(limit=100).items} == {"resolved"}


@pytest.mark.parametrize("moved", [True, False], ids=["speaks to another collector", "speaks to nobody"])
def test_a_node_is_silent_where_no_collector_on_the_database_hears_it(repository, tmp_path, monkeypatch, moved):
    monkeypatch.setattr("allocscope.collector.evaluate.TICK_S", 0.001)
    process = Process(PROCESS_ID, "calm", 4711, "host", 1, rank=0)
    hello(repository, "n1", RECEIVED_US)
    repository.store([batch(1, process, [], received_us=RECEIVED_US)])
    other, times_us = open_repository(f"sqlite:///{tmp_path / 'c.db'}"), [RECEIVED_US]

    def now_us() -> int:
        """Five seconds later with each look, for four minutes."""
        if times_us[-1] < RECEIVED_US + 4 * MINUTE_US:
            times_us.append(times_us[-1] + 5 * SECOND_US)
            if moved:
                other.store([batch(len(times_us), process, [], received_us=times_us[-1])])
        return times_us[-1]

    told: list[Alert] = []
    evaluator = following(repository, told, RECEIVED_US, now_us)
    evaluator.start()
    until(lambda: times_us[-1] >= RECEIVED_US + 4 * MINUTE_US)
    evaluator.close(10)
    other.close()
    assert [alert.condition.rule.name for alert in told] == ([] if moved else ["AllocscopeNodeSilent"])
