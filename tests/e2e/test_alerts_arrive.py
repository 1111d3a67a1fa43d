"""An alert reaches people before the job dies, and says what a rehearsal of the same run says."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from allocscope.alerts.rehearsal import RehearsedAlert, rehearse
from allocscope.allocator.recording import read_recording
from tests.alerts.conftest import Post, Receiver
from tests.alerts.test_alertmanager import Server
from tests.e2e.processes import Job, Machine, Service, recording

pytestmark = pytest.mark.end_to_end

HOLES = "varlen-1-2985"
"""Dies of fragmentation after 945 s."""
LEAK = "leak-1-3771"
"""Dies of a leak after 605 s."""
FRAGMENTATION = "AllocscopeFragmentationOOMRisk"


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    """A webhook of somebody's."""
    receiver = Receiver()
    receiver.start()
    yield receiver
    receiver.stop()


def contents(posts: list[Post]) -> list[dict[str, Any]]:
    """What was told, in order."""
    return [post.content for post in posts if isinstance(post.content, dict)]


def critical(posts: list[Post], job: str) -> dict[str, Any] | None:
    """The first critical alert about a job."""
    told = contents(posts)
    return next((one for one in told if one["severity"] == "critical" and one["labels"].get("job") == job), None)


def test_the_alert_comes_before_the_death_and_says_the_same_at_any_speed(machine: Machine, receiver: Receiver) -> None:
    collector = machine.collector("--webhook", f"{receiver.address}/hook")
    daemon = machine.daemon("n1", collector)
    jobs = {
        name: machine.play(recording(run), daemon, job=name, speed=speed)
        for name, run, speed in (("fast", HOLES, 100), ("leaks", LEAK, 60), ("slow", HOLES, 60))  # as they die
    }
    for name, job in jobs.items():
        told = machine.until(partial(critical, receiver.posts, name), f"a critical alert about {name}")
        assert job.runs, f"{name} was dead when the alert about it came"
        expected = ("leak", "AllocscopeMemoryLeak") if name == "leaks" else ("fragmentation", FRAGMENTATION)
        if name != "leaks":  # a leak is called growth until it has shown what it is
            assert (told["cause"], told["name"]) == expected
        assert told["state"] == "firing"
        assert told["labels"]["node"] == "n1"
        assert told["labels"]["uuid"] == job.uuid
    for name, job in jobs.items():
        assert_as_rehearsed(machine, collector, name, job)


def assert_as_rehearsed(machine: Machine, collector: Service, name: str, job: Job) -> None:
    """The same alerts, for the same causes, at the same moments of the recording."""
    summary = job.end()
    assert summary["ended"] == "died"
    expected = rehearsed(job, summary)
    assert any(alert.severity.value == "critical" for alert in expected)

    def found() -> list[dict[str, Any]] | None:
        listed: list[dict[str, Any]] = collector.get(f"/api/v1/alerts?job={name}&limit=500")["items"]
        fired = [alert for alert in listed if alert["state"] != "pending"]
        return fired if any(alert["name"] == "AllocscopeOOM" for alert in fired) else None

    alerts = machine.until(found, f"the death of {name} is known")
    alerts = sorted(alerts, key=lambda alert: (alert["name"], alert["severity"], alert["at_us"]))
    wanted = sorted(expected, key=lambda alert: (alert.name, alert.severity.value, alert.at_us))
    said = [(alert["name"], alert["severity"], alert["cause"]) for alert in alerts]
    assert said == [(a.name, a.severity.value, a.cause.value if a.cause else None) for a in wanted]
    for alert, foreseen in zip(alerts, wanted, strict=True):
        assert alert["at_us"] == pytest.approx(foreseen.at_us, abs=1_000_000), alert["name"]


def rehearsed(job: Job, summary: dict[str, Any]) -> tuple[RehearsedAlert, ...]:
    """What a rehearsal says, if the job had run by the clock that it was played by."""
    run = read_recording(job.recording)
    shift_us = summary["start_us"] - run.start_us
    moved = replace(
        run,
        start_us=run.start_us + shift_us,
        end_us=run.end_us + shift_us,
        other_used=tuple((since_us + shift_us, used) for since_us, used in run.other_used),
        trace=tuple(entry._replace(time_us=entry.time_us + shift_us) for entry in run.trace),
    )
    return rehearse(moved, seed=int(summary["process_id"], 16)).alerts


def test_a_collector_that_is_killed_tells_what_fires_once_more_and_no_oftener(
    machine: Machine, receiver: Receiver
) -> None:
    first, second = f"{receiver.address}/first", f"{receiver.address}/second"
    collector = machine.collector("--webhook", first)
    daemon = machine.daemon("n1", collector)
    job = machine.play(recording(LEAK), daemon, job="leaks", speed=60)
    machine.until(lambda: critical(receiver.posts, "leaks"), "a critical alert")
    machine.kill(collector)
    assert job.runs
    command = tuple(second if part == first else part for part in collector.command)
    collector = machine.again(replace(collector, command=command))
    assert_as_rehearsed(machine, collector, "leaks", job)

    def dead() -> bool:
        return any(told["name"] == "AllocscopeOOM" for told in contents(receiver.posts))

    machine.until(dead, "the death is told")
    lives = tuple([post for post in receiver.posts if post.path == path] for path in ("/first", "/second"))
    assert critical(lives[1], "leaks"), "what fires is told anew after a restart"
    for posts in lives:
        for alert, told in _by_alert(posts).items():
            changes = [state for state, _ in groupby(told)]
            assert told == changes, f"{alert} was told {told} by one collector"


def test_a_batch_that_a_crash_left_unfinished_alarms_nobody(machine: Machine, receiver: Receiver) -> None:
    """It was never acknowledged, so the job sends it again; the numbers that it may have had stay unused."""
    collector = machine.collector("--webhook", receiver.address)
    daemon = machine.daemon("n1", collector)
    job = machine.play(recording("steady-1-2216"), daemon, job="calm", speed=40)
    machine.until(lambda: collector.get("/api/v1/jobs")["items"], "the collector has a batch")
    machine.kill(daemon)
    torn = max((machine.folder / "spool-daemon-n1").glob("*.spool"))
    with torn.open("ab") as spool:
        spool.write((100_000).to_bytes(4, "little") + b"CRC!" + bytes(range(256)) * 100)
    daemon = machine.again(daemon)
    machine.until(lambda: daemon.said("cut off what a crash left unfinished"), "the daemon found it")
    summary = job.end()
    assert (summary["ended"], summary["unacknowledged"]) == ("finished", 0)
    assert "allocscope_dropped_total{" not in daemon.get("/metrics")
    assert collector.get("/api/v1/alerts?limit=500")["items"] == []
    assert receiver.posts == []


def _by_alert(posts: list[Post]) -> dict[tuple[tuple[str, str], ...], list[str]]:
    found: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for told in contents(posts):
        found.setdefault(tuple(sorted(told["labels"].items())), []).append(told["state"])
    return found


def test_a_real_alertmanager_has_the_alert_while_the_job_still_runs(
    machine: Machine, receiver: Receiver, tmp_path: Path
) -> None:
    alertmanager = Server(tmp_path, receiver)
    try:
        machine.until(alertmanager.ready, "Alertmanager is ready")
        collector = machine.collector("--alertmanager", alertmanager.address)
        job = machine.play(recording(LEAK), machine.daemon("n1", collector), job="leaks", speed=60)

        def told() -> dict[str, Any] | None:
            standing = alertmanager.alerts()
            who = ("critical", "leaks")
            return next((a for a in standing if (a["labels"]["severity"], a["labels"].get("job")) == who), None)

        alert = machine.until(told, "Alertmanager has the critical alert")
        assert job.runs
        assert alert["labels"]["cause"] in ("leak", "growth")
        assert {"node", "rank", "uuid"}.isdisjoint(alert["labels"]), "it is its job's, whichever rank leads"
        assert (alert["annotations"]["node"], alert["annotations"]["uuid"]) == ("n1", job.uuid)
    finally:
        alertmanager.stop()
