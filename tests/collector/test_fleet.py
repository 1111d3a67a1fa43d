"""What follows from each batch: told the time, so that nothing here waits."""

from dataclasses import replace
from pathlib import Path

import pytest

import allocscope.cli
from allocscope.alerts.rehearsal import rehearse
from allocscope.alerts.rules import Subject, alerts_of
from allocscope.alerts.states import Alert, AlertState, Progress
from allocscope.allocator.recording import read_recording
from allocscope.collector.fleet import Change, Fleet
from allocscope.collector.records import alert_record
from allocscope.collector.resume import resume
from allocscope.model import Cause, Device, DeviceReading, Event, EventKind, Forecast, Process, Sample, State
from allocscope.storage.records import Dropped
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


def test_a_collector_that_was_killed_before_it_kept_its_forecasts_does_not_judge_anew_what_it_had_told_of(
    recording, seen, tmp_path
):
    """Alerts are kept at once, forecasts once a second: at a play's speed that is minutes of an allocator's time."""
    process = recorded_process(recording)
    repository = open_repository(f"sqlite:///{tmp_path / 'c.db'}")
    before, changes, killed_us = fleet(), [], 0
    for one in batches(process, seen, 10):
        repository.store([one])
        begun = before.take(one)
        changes += begun
        killed_us = one.received_us
        if {change.alert.condition.rule.severity.value for change in begun} & {"critical"}:
            break
        if not changes:
            repository.save_forecasts(before.forecasts(), made_us=one.received_us)
    repository.save_alerts([alert_record(change, updated_us=killed_us) for change in changes])
    after = fleet()
    again = resume(repository, after, now_us=killed_us, retire_after_us=5 * MINUTE_US)
    repository.close()
    assert sorted(told(again)) == sorted(told(changes))


def stop(it, recording, seen):
    """Its process says that it stops; what was told by it, and when it was heard."""
    stopped = Event(PROCESS_ID, seen[-1].sequence + 1, seen[-1].time_us, EventKind.STOPPED)
    last = batch(999, recorded_process(recording), [stopped])
    return it.take(last), last.received_us


def test_a_restarted_collector_tells_for_the_rest_of_ten_minutes_that_a_job_ran_out_of_memory(
    recording, seen, tmp_path
):
    it, changes = fleet(), []
    for one in batches(recorded_process(recording), seen, 100):
        changes += it.take(one)
    over, ended_us = stop(it, recording, seen)
    repository = open_repository(f"sqlite:///{tmp_path / 'c.db'}")
    repository.save_alerts([alert_record(change, updated_us=ended_us) for change in [*changes, *over]])
    after = fleet()
    again = resume(repository, after, now_us=ended_us + 400 * SECOND_US, retire_after_us=5 * MINUTE_US)
    repository.close()
    assert [name for name, _, state, _ in told(again) if state == "firing"] == ["AllocscopeOOM"]
    [subject] = after.ooms
    assert (subject.job, subject.rank, after.ooms[subject]) == (recording.name, 0, ended_us)
    told_of = [after.tick(ended_us + (400 + second) * SECOND_US, {}) for second in range(1, 202)]
    assert [second for second, one in enumerate(told_of, 1) if one] == [200]
    assert [state for _, _, state, _ in told(told_of[199])] == ["resolved"]


def test_a_restarted_collector_goes_on_with_another_rank_where_the_one_that_led_has_gone(recording, tmp_path):
    process = recorded_process(recording)
    condition = next(c for c in alerts_of(AT_RISK, Subject("n9", process.job, 7, 7, "GPU-7")) if c.rule.cause)
    change = Change(Alert(replace(condition, subject=Subject(job=process.job), first=condition.subject), FIRES))
    repository = open_repository(f"sqlite:///{tmp_path / 'c.db'}")
    one = batch(1, process, [healthy(1)])
    repository.store([one])
    repository.save_alerts([alert_record(change, updated_us=one.received_us)])
    after = fleet()
    again = resume(repository, after, now_us=one.received_us, retire_after_us=5 * MINUTE_US)
    repository.close()
    assert [(c.alert.labels["job"], c.alert.state) for c in again] == [(process.job, AlertState.FIRING)]
    over = after.take(batch(2, process, [Event(PROCESS_ID, 2, 1, EventKind.STOPPED)]))
    assert [(c.alert.labels, c.alert.state) for c in over] == [(change.alert.labels, AlertState.RESOLVED)]


def test_a_rank_that_is_learnt_late_neither_ends_an_alert_nor_begins_it_anew(recording, seen):
    it, process, changes = fleet(), recorded_process(recording, rank=None), []
    cut = list(batches(process, seen, 100))
    known = replace(process, rank=5)
    for number, one in enumerate(cut):
        changes += it.take(one if number < len(cut) - 1 else replace(one, processes=(known,)))
    rehearsed = [(alert.name, alert.severity.value, alert.at_us) for alert in rehearse(recording).alerts]
    assert began(changes) == sorted(rehearsed)
    assert [state for _, _, state, _ in told(changes) if state != "firing"] == []
    it.tick(cut[-1].received_us + 6 * SECOND_US, {})
    assert {alert.condition.first.rank for alert in it.standing() if alert.condition.first} == {5}
    assert {subject.rank for subject in it.ooms} == {5}


def test_a_process_that_stops_takes_what_was_foreseen_of_it_with_it(recording, seen):
    it, process = fleet(), recorded_process(recording)
    for one in batches(process, seen, 100):
        it.take(one)
    firing = {a.condition.rule.name for a in it.standing()}
    changes, _ = stop(it, recording, seen)
    assert "AllocscopeOOM" in firing
    assert {(change.alert.state, change.reason) for change in changes} == {(AlertState.RESOLVED, "its process stopped")}
    assert {change.alert.condition.rule.name for change in changes} == firing - {"AllocscopeOOM"}
    assert it.watched == {}
    assert it.take(batch(1000, process, [seen[-2]])) == []
    assert it.watched == {}


def test_that_a_job_ran_out_of_memory_is_told_for_ten_minutes_though_it_has_ended(recording, seen):
    it, process = fleet(), recorded_process(recording)
    for one in batches(process, seen, 100):
        it.take(one)
    _, ended_us = stop(it, recording, seen)
    [standing] = it.standing()
    assert standing.condition.rule.name == "AllocscopeOOM"
    assert list(it.ooms) == [standing.condition.first]
    told_of = [told(it.tick(ended_us + second * SECOND_US, {})) for second in range(1, 601)]
    over = [second for second, changes in enumerate(told_of, 1) for name, *_ in changes if name == "AllocscopeOOM"]
    assert over == [600]
    assert it.ooms == {}
    assert "AllocscopeOOM" not in {alert.condition.rule.name for alert in it.standing()}


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


AT_RISK = Forecast(1, State.AT_RISK, Cause.LEAK)
FIRES = Progress(AlertState.FIRING, since_us=1, fired_us=1)
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


@pytest.mark.parametrize("by_us", [60 * MINUTE_US, -60 * MINUTE_US], ids=["forward", "back"])
def test_the_collectors_clock_that_is_set_is_nobodys_silence(by_us):
    """And from there on silence counts as ever."""
    it, now_us = fleet(), RECEIVED_US + SECOND_US
    it.take(batch(1, PROCESS, [healthy(1)]))
    assert it.tick(now_us, {"n1": now_us}) == []
    assert it.tick(now_us + by_us + SECOND_US, {"n1": now_us}) == []
    assert set(it.watched) == {REF}
    changes = []
    for second in range(2, 303):
        changes += it.tick(now_us + by_us + second * SECOND_US, {"n1": now_us})
    assert it.watched == {}
    assert [(name, state) for name, _, state, _ in told(changes)] == [("AllocscopeNodeSilent", "firing")]


def test_nobody_is_silent_while_the_database_takes_nothing():
    """Their nodes speak; what these say waits to be stored."""
    it, heard_us = fleet(), RECEIVED_US + SECOND_US
    it.take(batch(1, PROCESS, [healthy(1)]))
    for second in range(600):
        now_us = heard_us + second * SECOND_US
        assert it.tick(now_us, {"n1": now_us}) == []
    assert set(it.watched) == {REF}
    for second in range(600, 610):
        now_us = heard_us + second * SECOND_US
        it.take(batch(second, PROCESS, [healthy(second)], received_us=now_us))
        it.tick(now_us, {"n1": now_us})
    assert it.watched[REF].sample == healthy(609)


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
    assert [(c.alert.labels["node"], c.alert.condition.summary) for c in changes] == [
        (
            "n1",
            (
                "data is lost on the way from n1: an unknown number of batches dropped"
                " (numbers 2 to 3 are missing; its daemon's log says what was lost)"
            ),
        ),
        ("n2", "data is lost on the way from n2: 5 samples, maps or events dropped (refused: out_of_range)"),
    ]


def test_what_there_was_no_time_to_judge_is_the_collectors_loss_not_the_nodes():
    it = fleet()
    it.take(batch(1, PROCESS, [healthy(1)]))
    it.pass_over([batch(2, PROCESS, [healthy(2), healthy(3)]), batch(3, PROCESS, [healthy(4)])])
    it.take(batch(4, PROCESS, [healthy(5)]))
    [change] = it.tick(RECEIVED_US, {})
    assert change.alert.condition.summary == (
        "data is lost on the way from the collector: 3 samples dropped"
        " (they are stored, but were not judged: more came than there was time for)"
    )


def test_numbers_that_a_daemon_never_used_are_no_loss():
    """A crash left a batch unfinished; its daemon passed over the numbers that may have been in it."""
    it = fleet()
    it.take(batch(1, PROCESS, [healthy(1)]))
    it.take(batch(40, PROCESS, [healthy(2)], unused_before=38))
    assert it.tick(RECEIVED_US, {}) == []
    it.take(batch(45, PROCESS, [healthy(3)], unused_before=2))
    [change] = it.tick(RECEIVED_US + SECOND_US, {})
    assert "numbers 41 to 42 are missing" in change.alert.condition.summary


def test_what_a_node_says_that_it_lost_is_told_with_what_and_why_and_once():
    it = fleet()
    lost = (Dropped("block_maps", "spool_full", 300),)
    it.take(batch(1, PROCESS, [healthy(1)], dropped=lost))
    it.take(batch(1, PROCESS, [healthy(1)], dropped=lost))
    [change] = it.tick(RECEIVED_US, {})
    assert change.alert.condition.summary == ("data is lost on the way from n1: 300 block maps dropped (spool full)")


def test_what_was_overtaken_says_nothing_of_how_things_are_now():
    """Neither its numbers nor its readings, nor an older description of the process; and no figure is gone back to."""
    it, uuid = fleet(), REF.device_uuid
    now, then = (DeviceReading(Device(uuid, 0, None, 80 << 30), time_us, True) for time_us in (2, 1))
    it.take(batch(100, PROCESS, [healthy(50)], readings=(now,)))
    it.take(batch(7, replace(PROCESS, job="then"), [healthy(9)], readings=(then,), late=True))
    it.take(batch(90, replace(PROCESS, job="then"), [healthy(40)], late=True))
    assert it.tick(RECEIVED_US, {}) == []
    (watched,) = it.watched.values()
    assert (it.devices[uuid].reading, watched.process, watched.sequence) == (now, PROCESS, 50)


def test_what_came_late_before_the_first_new_batch_is_not_missing():
    it = fleet()
    it.take(batch(1, PROCESS, [healthy(1)]))
    it.take(batch(2, PROCESS, [healthy(2)], late=True))
    it.take(batch(9, PROCESS, [healthy(8)], unused_before=6))
    assert it.tick(RECEIVED_US, {}) == []


def test_a_process_that_began_and_ended_in_an_outage_is_judged_late():
    it = fleet()
    it.take(batch(100, replace(PROCESS, process_id="f" * 32), []))
    it.take(batch(7, PROCESS, [healthy(1), healthy(2)], late=True))
    assert [watched.sequence for watched in it.watched.values()] == [2]


def test_what_a_probe_says_of_what_it_lost_is_one_short_line():
    it = fleet()
    message = "x" * 10_000 + "\nand more"
    it.take(
        batch(1, PROCESS, [healthy(1), Event(PROCESS_ID, 2, 1, EventKind.DROPPED, dropped_count=7, message=message)])
    )
    [change] = it.tick(RECEIVED_US, {})
    assert change.alert.condition.summary == (
        "data is lost on the way from rank 0 of calm on n1: 7 samples, maps or events dropped (" + "x" * 159 + "…)"
    )


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


def minutes_of_batches():
    """A process that grows beside others, is then allowed more, joins another job, stops, and is heard of again."""
    device, gib = Device("GPU-a", 3, "H200", 100 << 30), 1 << 30
    process = replace(PROCESS, devices=(device,))
    for n in range(1, 240):
        time_us = RECEIVED_US + n * SECOND_US
        if n == 100:
            process = replace(process, devices=(replace(device, allowed_bytes=90 * gib),))
        elif n == 170:
            process = replace(process, job="another")
        sample = Sample(
            2 * n, time_us, allocated_bytes=20 * gib + n * gib // 8, reserved_bytes=60 * gib, num_alloc_retries=n // 2
        )
        stopped = [Event(PROCESS_ID, 2 * n + 1, time_us, EventKind.STOPPED)] if n == 200 else []
        reading = DeviceReading(device, time_us, True, free_bytes=40 * gib - n * gib // 10)
        yield batch(n, process, [sample, *stopped], readings=(reading,))


@pytest.mark.parametrize("at_once", [2, 25, 239])
def test_many_batches_at_once_come_to_the_same_as_one_by_one(at_once):
    """Readings, a limit, a new name and an end in the middle are each of their own batch's moment."""
    said = list(minutes_of_batches())
    one_by_one, many = fleet(), fleet()
    changes = [change for one in said for change in one_by_one.take(one)]
    assert {state for _, _, state, _ in told(changes)} == {"firing", "resolved"}
    at_once_changes = []
    for first in range(0, len(said), at_once):
        at_once_changes += many.take(*said[first : first + at_once])
    assert at_once_changes == changes
    assert many.watched[REF].watch.forecast == one_by_one.watched[REF].watch.forecast
    assert many.watched[REF].watch.alerts == one_by_one.watched[REF].watch.alerts
