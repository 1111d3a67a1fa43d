"""One allocator watched: samples in, alerts out."""

from __future__ import annotations

from dataclasses import replace

from allocscope.alerts.rules import Severity, Subject
from allocscope.alerts.states import AlertState
from allocscope.alerts.watch import Watch
from allocscope.model import Event, EventKind, State
from tests.forecast.streams import GIB, START_US, Job, S, outlook, rising

SUBJECT = Subject(node="n7", job="llama", rank=3)
LEAKING = Job(trough=rising(20 * GIB, 2 * GIB / 60), blocks=rising(1000, 1))


def _watch(seconds: int, job: Job = LEAKING) -> tuple[Watch, list[tuple[int, str, Severity]]]:
    watch, fired = Watch(SUBJECT, outlook()), []
    for sample in job.samples(seconds):
        for alert in watch.sample(sample):
            assert alert.state is AlertState.FIRING
            fired.append((sample.sequence, alert.condition.rule.name, alert.condition.rule.severity))
    return watch, fired


def _state(watch: Watch) -> State | None:
    return watch.forecast.state if watch.forecast else None


def test_a_leak_is_told_once_at_each_severity():
    watch, fired = _watch(1140)
    assert {severity: [name for _, name, s in fired if s is severity] for severity in Severity} == {
        severity: ["AllocscopeMemoryLeak"] for severity in Severity
    }
    assert _state(watch) is State.CRITICAL
    assert {alert.condition.subject for alert in watch.alerts} == {SUBJECT}


def test_a_sample_told_again_changes_nothing():
    watch, _ = _watch(1140)
    before = watch.alerts
    assert watch.sample(next(iter(LEAKING.samples(1)))) == ()
    assert watch.alerts == before


def test_what_is_folded_is_known_when_it_is_judged_next():
    watch = Watch(SUBJECT, outlook())
    for sample in LEAKING.samples(1100):
        assert watch.fold(sample)
        assert not watch.fold(sample)
    assert _state(watch) is None
    watch.sample(list(LEAKING.samples(1101))[-1])
    assert _state(watch) is State.CRITICAL


def test_many_samples_a_second_are_judged_once_a_second():
    watch, judged = Watch(SUBJECT, outlook()), set()
    for sample in Job().samples(200):
        for tenth in range(10):
            number, time_us = sample.sequence * 10 + tenth, sample.time_us + tenth * S // 10
            watch.sample(replace(sample, sequence=number, time_us=time_us))
            assert watch.forecast is not None
            judged.add(watch.forecast.time_us)
    assert judged == {START_US + t * S for t in range(1, 201)}


def test_an_oom_is_told_at_once():
    watch, _ = _watch(200, Job())
    told = watch.event(Event("p", 1000, START_US + 201 * S, EventKind.OOM, requested_bytes=GIB, device_free_bytes=0))
    assert [alert.condition.rule.name for alert in told] == ["AllocscopeOOM"]


def test_the_end_of_a_job_resolves_what_fires():
    watch, _ = _watch(1140)
    ended = watch.end(START_US + 1141 * S)
    assert [(alert.state, alert.resolved_us) for alert in ended] == [(AlertState.RESOLVED, START_US + 1141 * S)] * 3
    assert watch.alerts == ()
    assert watch.forecast is None
