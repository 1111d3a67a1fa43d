"""What follows from each batch: told the time, so that nothing here waits."""

from dataclasses import replace
from pathlib import Path

import pytest

import allocscope.cli
from allocscope.alerts.rehearsal import rehearse
from allocscope.alerts.states import AlertState
from allocscope.allocator.recording import read_recording
from allocscope.collector.fleet import Fleet
from allocscope.collector.records import alert_record
from allocscope.collector.resume import resume
from allocscope.model import Device, DeviceReading, Event, EventKind, Process, Sample
from allocscope.storage.sql import open_repository
from tests.collector.made import PROCESS_ID, RECEIVED_US, REF, batch, batches, player, recorded_process

RECORDINGS = Path(allocscope.cli.__path__[0]) / "recordings"
MINUTE_US = 60_000_000
SECOND_US = 1_000_000


@pytest.fixture(scope="module")
def recording():
    """A run that dies of a curriculum's growth, after flushes."""
    return read_recording(RECORDINGS / "curriculum-2-2200.run.json")


@pytest.fixture(scope="module")
def seen(recording):
    return list(player(recording))


def fleet(retire_after_us=5 * MINUTE_US):
    return Fleet(retire_after_us=retire_after_us)


def told(changes):
    """Name, severity, and when it began or ended."""
    return [
        (
            change.alert.condition.rule.name,
            change.alert.condition.rule.severity.value,
            change.alert.state.value,
            change.alert.progress.since_us,
        )
        for change in changes
    ]


def began(changes):
    return sorted((name, severity, at) for name, severity, state, at in told(changes) if state == "firing")


@pytest.mark.parametrize("size", [1, 7, 200], ids=lambda size: f"{size} a batch")
def test_the_verdict_is_the_rehearsals_however_the_samples_are_cut(recording, seen, size):
    """At any speed a play has, and in whatever batches its samples come."""
    it, process, changes = fleet(), recorded_process(recording), []
    for one in batches(process, seen, size):
        changes += it.take(one)
    rehearsed = [(alert.name, alert.severity.value, alert.at_us) for alert in rehearse(recording).alerts]
    assert began(changes) == sorted(rehearsed)
    assert "AllocscopeOOM" in {name for name, _, _ in rehearsed}


def test_what_is_sent_again_changes_nothing(recording, seen):
    it, process, changes = fleet(), recorded_process(recording), []
    for one in batches(process, seen, 50):
        changes += it.take(one)
        assert it.take(one) == []
    assert len(began(changes)) == len(rehearse(recording).alerts)


def test_a_restarted_collector_goes_on_where_the_one_before_was_killed(recording, seen, tmp_path):
    """What was stored is what it goes on from: no alert begins twice, none is forgotten."""
    process = recorded_process(recording)
    cut = list(batches(process, seen, 10))
    whole, uninterrupted = fleet(), []
    for one in cut:
        uninterrupted += whole.take(one)
    half = len(cut) * 3 // 4
    assert any(change.alert.state is AlertState.FIRING for change in uninterrupted)

    repository = open_repository(f"sqlite:///{tmp_path / 'c.db'}")
    before, changes = fleet(), []
    for one in cut[:half]:
        repository.store([one])
        changes += before.take(one)
    repository.save_forecasts(before.forecasts(), made_us=cut[half].received_us)
    repository.save_alerts([alert_record(change, updated_us=cut[half].received_us) for change in changes])
    repository.store([cut[half]])  # stored, but killed before it was judged

    after = fleet()
    again = resume(repository, after, now_us=cut[half].received_us, retire_after_us=5 * MINUTE_US)
    standing = {
        (a.condition.rule.name, a.condition.rule.severity) for a in before.standing() if a.state is AlertState.FIRING
    }
    assert standing
    assert {(c.alert.condition.rule.name, c.alert.condition.rule.severity) for c in again} >= standing
    for one in cut[half - 1 :]:  # the daemon sends the last ones again
        changes += after.take(one)
    repository.close()
    assert began(changes) == began(uninterrupted)


def test_a_process_that_stops_takes_its_alerts_with_it(recording, seen):
    it, process = fleet(), recorded_process(recording)
    for one in batches(process, seen, 100):
        it.take(one)
    firing = {a.condition.rule.name for a in it.standing() if a.state is AlertState.FIRING}
    stopped = Event(PROCESS_ID, seen[-1].sequence + 1, seen[-1].time_us, EventKind.STOPPED)
    changes = it.take(batch(999, process, [stopped]))
    assert firing
    assert {(change.alert.state, change.reason) for change in changes} == {(AlertState.RESOLVED, "its process stopped")}
    assert {change.alert.condition.rule.name for change in changes} == firing
    assert it.watched == {}
    assert it.take(batch(1000, process, [seen[-2]])) == []
    assert it.watched == {}


@pytest.mark.parametrize(
    ("after_us", "reason"),
    [
        pytest.param(16 * SECOND_US, "its process ran out of memory and sent nothing more", id="it died"),
        pytest.param(14 * SECOND_US, None, id="it may go on"),
    ],
)
def test_after_an_oom_silence_is_death(recording, seen, after_us, reason):
    it, process, last_us = fleet(), recorded_process(recording), 0
    for one in batches(process, seen, 100):
        it.take(one)
        last_us = one.received_us
    assert isinstance(seen[-1], Event)
    changes = it.tick(last_us + after_us, {})
    assert {change.reason for change in changes} == ({reason} if reason else set())
    assert (REF in it.watched) is (reason is None)


def healthy(sequence, time_us=None, **more):
    return Sample(
        sequence,
        RECEIVED_US + sequence * SECOND_US if time_us is None else time_us,
        allocated_bytes=5,
        reserved_bytes=6,
        **more,
    )


PROCESS = Process(PROCESS_ID, "calm", 4711, "host", 1, rank=0, devices=(Device("GPU-a", 0, total_bytes=100),))


def test_who_is_silent_for_long_is_retired_and_taken_up_when_it_speaks_again():
    it = fleet(retire_after_us=5 * MINUTE_US)
    it.take(batch(1, PROCESS, [healthy(1)]))
    heard_us = RECEIVED_US + SECOND_US
    it.tick(heard_us + 5 * MINUTE_US, {})
    assert set(it.watched) == {REF}
    it.tick(heard_us + 5 * MINUTE_US + 1, {})
    assert it.watched == {}
    it.take(batch(2, PROCESS, [healthy(2)]))
    assert set(it.watched) == {REF}


def test_a_clock_that_is_minutes_off_or_goes_back_does_not_retire_anybody():
    it = fleet()
    it.take(batch(1, PROCESS, [healthy(1, time_us=RECEIVED_US - 60 * MINUTE_US)]))
    it.take(batch(2, PROCESS, [healthy(2, time_us=RECEIVED_US - 90 * MINUTE_US)]))
    it.tick(RECEIVED_US + 3 * SECOND_US, {})
    assert it.watched[REF].sample == healthy(2, time_us=RECEIVED_US - 90 * MINUTE_US)


def test_counters_that_go_backwards_raise_nothing():
    it = fleet()
    up = [healthy(n, num_alloc_retries=n, num_ooms=1) for n in range(1, 3)]
    down = [healthy(n, num_alloc_retries=0, num_ooms=0) for n in range(3, 6)]
    assert it.take(batch(1, PROCESS, up)) == []
    assert it.take(batch(2, PROCESS, down)) == []


def test_a_silent_node_is_told_of_after_a_minute_and_until_it_speaks():
    it, at_us = fleet(), RECEIVED_US
    changes = []
    for second in range(100):
        changes += it.tick(at_us + second * SECOND_US, {"n1": at_us})
    [(name, severity, state, since_us)] = told(changes)
    assert (name, severity, state) == ("AllocscopeNodeSilent", "warning", "firing")
    assert since_us == at_us + 60 * SECOND_US
    assert told(it.tick(at_us + 101 * SECOND_US, {"n1": at_us + 100 * SECOND_US})) == [
        ("AllocscopeNodeSilent", "warning", "resolved", at_us + 101 * SECOND_US)
    ]


def test_a_node_that_was_taken_away_is_forgotten_after_a_day():
    it = fleet()
    changes = []
    for minute in range(-2, 3):
        changes += it.tick(RECEIVED_US + 24 * 60 * MINUTE_US + minute * MINUTE_US, {"n1": RECEIVED_US})
    assert [state for _, _, state, _ in told(changes)] == ["firing", "resolved"]


def test_data_that_was_lost_on_the_way_is_told_of():
    it = fleet()
    dropped = Event(PROCESS_ID, 2, 1, EventKind.DROPPED, dropped_count=7)
    it.take(batch(1, PROCESS, [healthy(1), dropped]))
    it.take(batch(4, PROCESS, [healthy(3)]))
    it.refused("n2", 5, "out_of_range")
    changes = it.tick(RECEIVED_US, {})
    losses = [(str(c.alert.condition.subject), c.alert.condition.summary.partition(": ")[2]) for c in changes]
    assert losses == [
        ("rank 0 of calm on n1", "7 samples, maps or events dropped (the probe's buffer was full)"),
        (
            "n1",
            "an unknown number of batches dropped (numbers 2 to 3 are missing; its daemon's log says what was lost)",
        ),
        ("n2", "5 samples, maps or events dropped (refused: out_of_range)"),
    ]


def test_where_batches_wait_an_allocator_is_judged_every_five_seconds_of_its_time():
    it = fleet()
    judged = []
    for n in range(1, 16):
        it.take(batch(n, PROCESS, [healthy(n)]), behind=True)
        judged += [(forecast.time_us - RECEIVED_US) // SECOND_US for _, forecast in it.forecasts()]
    assert judged == [1, 6, 11]
    assert it.folded == 12
    assert it.watched[REF].sample == healthy(15)


def test_a_device_says_what_is_free_where_samples_do_not():
    it = fleet()
    reading = DeviceReading(Device("GPU-a", 3, "H200", 100), RECEIVED_US, True, free_bytes=94)
    it.take(batch(1, PROCESS, [healthy(1)], readings=(reading,)))
    assert it.watched[REF].watch.subject.gpu == 3
    assert it.devices["GPU-a"].reading == reading
    it.tick(RECEIVED_US + 6 * MINUTE_US, {})
    assert it.devices == {}


def test_an_alert_has_one_id_however_often_it_is_kept(recording, seen):
    first, second = (
        [change for one in batches(recorded_process(recording), seen, 100) for change in it.take(one)]
        for it in (fleet(), fleet())
    )
    changes = first
    ids = [[alert_record(change, updated_us=1).alert_id for change in changes] for changes in (first, second)]
    assert ids[0] == ids[1]
    assert len(set(ids[0])) == len(began(changes))
    other = replace(
        changes[0], alert=replace(changes[0].alert, progress=replace(changes[0].alert.progress, fired_us=1))
    )
    assert alert_record(other, updated_us=1).alert_id not in ids[0]
