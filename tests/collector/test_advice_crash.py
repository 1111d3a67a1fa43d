"""A real collector, and real workers: whoever of them is killed, and whatever lies in the database."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from allocscope.model import CaptureReason
from tests.collector.harness import CollectorProcess, batch, collector, sample, stream
from tests.collector.replayed import holey, pickled
from tests.collector.uploads import bring, new_id
from tests.e2e.processes import until

LONG = pickled(holey(steps=5_000))
"""Takes some seconds."""


def workers(of: CollectorProcess) -> list[int]:
    """The processes that a collector has started."""
    found = []
    for task in Path(f"/proc/{of.process.pid}/task").iterdir():
        found += [int(pid) for pid in (task / "children").read_text().split()]
    return found


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def advice(of: CollectorProcess, job: str = "train") -> list[dict]:
    items: list[dict] = of.get(f"/api/v1/jobs/{job}/advice").json()["items"]
    return items


def reported(of: CollectorProcess, number: int = 1, job: str = "train") -> None:
    with stream(of.grpc, f"node-{job}") as it:
        it.batch(batch(1, sample(1), number=number, job=job))
        it.until(1)


def bring_long(to: CollectorProcess, capture_id: str) -> int:
    """Its worker, once there is one."""
    reported(to)
    bring(to.grpc, capture_id, snapshot=LONG, reason=CaptureReason.FORECAST)
    return until(lambda: workers(to), "a worker runs")[0]


def test_a_worker_that_is_killed_is_told_of_and_nothing_else_is_lost(tmp_path):
    with collector(tmp_path) as it:
        os.kill(bring_long(it, new_id()), signal.SIGKILL)
        [one] = until(lambda: advice(it), "there is an answer")
        assert (one["kind"], one["summary"]) == ("unknown", "the replay was ended by SIGKILL")
        bring(it.grpc, new_id(), snapshot=pickled(holey()), reason=CaptureReason.FORECAST)
        until(lambda: [one["kind"] for one in advice(it)] == ["setting", "unknown"], "the next one is replayed")
        assert 'allocscope_advice_failed_total{reason="killed"} 1.0' in it.get("/metrics").text


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="Linux tells a child of its parent's death")
def test_a_collector_that_is_killed_leaves_no_worker_and_the_next_one_does_the_work(tmp_path):
    with collector(tmp_path) as it:
        worker = bring_long(it, new_id())
        it.process.kill()
        it.process.wait()
        until(lambda: not lives(worker), "the worker is gone, too")
    with collector(tmp_path) as again:
        reported(again)
        [one] = until(lambda: advice(again), "the next one replays it, once the claim has run out")
        assert one["kind"] == "setting"


def test_a_collector_that_ends_waits_for_no_replay_and_the_next_one_does_the_work(tmp_path):
    with collector(tmp_path) as it:
        worker = bring_long(it, new_id())
        it.process.terminate()
        assert it.process.wait(timeout=30) == 0
        assert not lives(worker)
        assert [line for line in it.said if "Traceback" in line] == []
    with collector(tmp_path) as again:
        assert until(lambda: advice(again), "the next one replays it")[0]["kind"] == "setting"


def test_samples_and_questions_go_on_while_it_is_replayed(tmp_path):
    with collector(tmp_path) as it:
        worker = bring_long(it, new_id())
        reported(it, 2, "other")
        assert it.get("/api/v1/jobs").status_code == 200
        assert lives(worker), "all that did not wait for it"
        own = os.getpriority(os.PRIO_PROCESS, it.process.pid)
        until(lambda: os.getpriority(os.PRIO_PROCESS, worker) > own, "it goes behind whatever else is to be done")


def test_a_setting_switches_it_off(tmp_path):
    with collector(tmp_path, "--advice=false") as it:
        reported(it)
        bring(it.grpc, new_id(), snapshot=pickled(holey()), reason=CaptureReason.FORECAST)
        said = it.get("/api/v1/jobs/train/advice").json()
        assert (said["is_made_here"], said["items"], len(said["under_way"])) == (False, [], 1)
        assert workers(it) == []
