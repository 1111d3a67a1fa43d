"""Advice reaches the alerts of whom it is for, stays with them over restarts, and never goes to somebody else's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import takewhile
from pathlib import Path

import pytest

import allocscope.cli
from allocscope.alerts.states import Alert
from allocscope.allocator.recording import read_recording
from allocscope.collector.advice_words import alert_words
from allocscope.collector.evaluate import Evaluator
from allocscope.collector.fleet import Fleet
from allocscope.collector.foreseen import Foreseen
from allocscope.collector.observation import Observation
from allocscope.collector.records import alert_record, standing_alert
from allocscope.collector.resume import resume
from allocscope.model import Advice, AdviceKind, Event
from allocscope.storage.advice import AdviceRecord
from allocscope.storage.records import NodeBatch
from allocscope.storage.sql import open_repository
from tests.collector.made import PROCESS_ID, RECEIVED_US, UUID, batches, player, recorded_process
from tests.e2e.processes import until

RECORDINGS = Path(allocscope.cli.__path__[0]) / "recordings"
HELPS = Advice(AdviceKind.SETTING, "Set it so.", is_exact=True)
SECOND_US = 1_000_000


@pytest.fixture(scope="module")
def recording():
    """A run that dies of a curriculum's growth, after flushes."""
    return read_recording(RECORDINGS / "curriculum-2-2200.run.json")


@pytest.fixture(scope="module")
def seen(recording):
    return list(player(recording))


def advice(process, **more) -> AdviceRecord:
    given = {
        "process_id": PROCESS_ID,
        "job": process.job,
        "rank": 0,
        "node": "n1",
        "made_us": 1,
        "advice": HELPS,
        **more,
    }
    return AdviceRecord("c1", device_uuid=UUID, **given)


def at_risk(process, seen) -> tuple[Fleet, int]:
    """A fleet that follows it up to before its death, and when that is."""
    fleet, now_us = taken(alive(process, seen))
    assert list(fleet.standing())
    return fleet, now_us


def alive(process, seen) -> Iterator[NodeBatch]:
    """What it sends before it dies."""
    return batches(process, takewhile(lambda item: not isinstance(item, Event), seen), 50)


def taken(sent: Iterable[NodeBatch]) -> tuple[Fleet, int]:
    """A fleet that was told of it all, and when that was over."""
    fleet, now_us = Fleet(retire_after_us=300 * SECOND_US), RECEIVED_US
    for one in sent:
        fleet.take(one)
        now_us = one.received_us
    return fleet, now_us


def dead(process, seen) -> tuple[Fleet, int]:
    """A fleet that has given it up, so that nothing but its death is told of."""
    fleet, now_us = taken(batches(process, seen, 50))
    fleet.tick(now_us + 20 * SECOND_US, {})
    assert [alert.condition.rule.name for alert in fleet.standing()] == ["AllocscopeOOM"]
    return fleet, now_us


def said(fleet: Fleet) -> set[str | None]:
    return {alert.condition.advice for alert in fleet.standing()}


def test_standing_alerts_are_told_again_with_it(recording, seen):
    process = recorded_process(recording)
    fleet, now_us = at_risk(process, seen)
    fleet.tick(now_us + 60 * SECOND_US, {})
    fleet.advise(advice(process), "Set it so.")
    changes = fleet.tick(now_us + 70 * SECOND_US, {})
    assert {(change.retold, change.alert.condition.advice) for change in changes} == {(True, "Set it so.")}
    assert said(fleet) == {"Set it so."}
    assert fleet.tick(now_us + 71 * SECOND_US, {}) == []


def test_it_is_kept_and_goes_on_after_a_restart(recording, seen, tmp_path):
    process = recorded_process(recording)
    repository = open_repository(f"sqlite:///{tmp_path}/c.db")
    repository.store(list(alive(process, seen)))
    fleet, now_us = at_risk(process, seen)
    fleet.advise(advice(process), "Set it so.")
    changes = fleet.tick(now_us + 70 * SECOND_US, {})
    records = [alert_record(change, updated_us=now_us) for change in changes]
    assert {record.advice for record in records} == {"Set it so."}
    assert {alert.condition.advice for record in records if (alert := standing_alert(record))} == {"Set it so."}
    repository.save_alerts(records)
    again = Fleet(retire_after_us=300 * SECOND_US)
    resume(repository, again, now_us=now_us, retire_after_us=300 * SECOND_US)
    kept = {record.name for record in records}
    standing = [alert for alert in again.standing() if alert.condition.rule.name in kept]
    assert "Set it so." in {alert.condition.advice for alert in standing}
    again.advise(advice(process), "Set it so.")  # as the database tells it anew
    again.tick(now_us + 70 * SECOND_US, {})
    assert said(again) == {"Set it so."}


def test_of_a_process_that_died_only_what_tells_of_its_death_says_it(recording, seen):
    process = recorded_process(recording)
    fleet, now_us = dead(process, seen)
    fleet.advise(advice(process), "Set it so.")
    fleet.tick(now_us + 30 * SECOND_US, {})
    assert said(fleet) == {"Set it so."}


@pytest.mark.parametrize("whose", [{"job": "another"}, {"rank": 7}, {"node": "n2"}])
def test_somebody_elses_is_not_taken(recording, seen, whose):
    process = recorded_process(recording)
    fleet, now_us = dead(process, seen)
    fleet.advise(advice(process, process_id="b" * 32, **whose), "Set it so.")
    fleet.tick(now_us + 30 * SECOND_US, {})
    assert said(fleet) == {None}


def test_the_evaluator_takes_it_from_any_thread_and_tells_everybody(recording, seen, tmp_path):
    process = recorded_process(recording)
    repository, observation = open_repository(f"sqlite:///{tmp_path}/c.db"), Observation()
    published: list[Alert] = []
    fed = list(alive(process, seen))
    clock_us = [fed[-1].received_us]
    evaluator = Evaluator(
        repository,
        observation,
        nodes=list,
        publish=published.extend,
        foreseen=Foreseen(repository.captures, observation, wake=lambda: None, enabled=False),
        now_us=lambda: clock_us[0],
        retire_after_s=300,
    )
    evaluator.start()
    evaluator.put(fed)
    until(lambda: published, "alerts fire")
    evaluator.advise([advice(process, advice=Advice(AdviceKind.UNKNOWN, "it was killed")), advice(process)])

    def told() -> list[str]:
        clock_us[0] += SECOND_US  # by which it may tell again
        return [alert.condition.advice for alert in published if alert.condition.advice]

    assert set(until(told, "they are told again")) == {alert_words(HELPS)}
    kept = until(lambda: [one for one in repository.alerts().items if one.advice], "it is kept")
    assert {one.advice for one in kept} == {"Set it so."}
    evaluator.close(10)


def test_of_two_for_one_allocator_the_later_one_counts(recording, seen):
    process = recorded_process(recording)
    fleet, now_us = at_risk(process, seen)
    fleet.advise(advice(process), "Set it so.")
    fleet.advise(replace(advice(process), capture_id="c2"), "Set it otherwise.")
    fleet.tick(now_us + 70 * SECOND_US, {})
    assert said(fleet) == {"Set it otherwise."}
