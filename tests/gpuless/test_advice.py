"""From holes in a real allocator to advice in the hands of people: forecast, history, replay, alert, page and command."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.alerts.conftest import Post, Receiver
from tests.alerts.test_alertmanager import Server
from tests.e2e.processes import until
from tests.gpuless.node import Node, node
from tests.gpuless.rig import GIB, Rig

FRAGMENTS = """
import threading, torch
from allocscope import probe
probe.start()
MIB, kept, stop = 1 << 20, [], threading.Event()

def some(mib):
    return torch.empty(mib * MIB, dtype=torch.uint8, device="cuda")

def free_mib():
    return torch.cuda.mem_get_info()[0] // MIB

while free_mib() > 1000:
    some(400)  # freed at once; what is kept then lies in its place, and leaves a hole
    kept.append(some(210))
kept.append(some((free_mib() - 480) // 2 * 2))
other = torch.cuda.Stream()

def work():
    while not stop.wait(0.5):
        with torch.cuda.stream(other):
            some(250)
        some(400)  # each only fits once the other has been given back

threading.Thread(target=work, daemon=True).start()
"""
"""Half of what it reserved are holes of 190 MiB, and each step only just finds room, after flushes of the cache. It never runs out."""


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    """A webhook of somebody's."""
    receiver = Receiver()
    receiver.start()
    yield receiver
    receiver.stop()


def advised(posts: list[Post], name: str) -> dict[str, Any] | None:
    """The first telling of an alert of that name that has advice."""
    told = (post.content for post in posts if post.path == "/hook" and isinstance(post.content, dict))
    return next((one for one in told if one["name"] == name and one["advice"]), None)


@pytest.mark.timeout(400)  # a forecast looks on for 100 s before it says anything, and an alert holds for 30 s
def test_a_job_at_risk_gets_advice_into_its_alert_and_whoever_asks(tmp_path: Path, receiver: Receiver) -> None:
    alertmanager = Server(tmp_path, receiver)
    rig = Rig(tmp_path, capacity_bytes=6 * GIB)
    options = ("--webhook", f"{receiver.address}/hook", "--alertmanager", alertmanager.address)
    try:
        until(alertmanager.ready, "Alertmanager is ready")
        with node(rig, tmp_path, collector_options=options) as there:
            environ = {"ALLOCSCOPE_SOCKET": str(there.socket), "ALLOCSCOPE_JOB": "holes"}
            with rig.shell(environ) as job:
                job(FRAGMENTS)
                assert_advised(there, alertmanager, receiver)
    finally:
        alertmanager.stop()


def assert_advised(there: Node, alertmanager: Server, receiver: Receiver) -> None:
    """A forecast, a history, a replay, and everybody is told."""
    [kept] = until(lambda: there.get("/api/v1/advice")["items"], "a replay advises", within_s=200)
    [capture] = there.get("/api/v1/captures")["items"]
    assert (capture["reason"], capture["state"], capture["capture_id"]) == ("forecast", "kept", kept["capture_id"])
    assert kept["kind"] == "setting", kept
    assert not kept["is_exact"], "what was there before lies as it did, but that is not known for sure"
    assert "the history begins in the middle of the run" in kept["exactness"]
    assert kept["conf"].startswith("expandable_segments:True")
    recorded, *others = kept["trials"]
    taken = next(trial for trial in others if trial["conf"] == kept["conf"])
    assert (recorded["conf"], recorded["failed_at"], taken["failed_at"]) == ("", None, None)
    assert recorded["num_alloc_retries"] > 10 > taken["num_alloc_retries"], "each step flushed the cache, and need not"
    assert taken["needed_bytes"] < recorded["needed_bytes"] - GIB, "the holes are gone"

    name = "AllocscopeFragmentationOOMRisk"
    told = until(lambda: advised(receiver.posts, name), "the webhook is told once more", within_s=120)
    assert (told["state"], told["severity"], told["labels"]["job"]) == ("firing", "warning", "holes")
    words = kept["summary"].removesuffix("This is an estimate.")
    assert told["advice"].startswith(f"{words}This is an estimate: ")
    assert told["description"].endswith(told["advice"])

    def standing() -> list[dict[str, Any]]:
        told_of = (alert for alert in alertmanager.alerts() if alert["labels"]["alertname"] == name)
        return [alert for alert in told_of if alert["annotations"].get("advice") == told["advice"]]

    until(standing, "Alertmanager has it as an annotation")
    alerts = there.get("/api/v1/alerts?job=holes&state=firing")["items"]
    assert told["advice"] in [alert["advice"] for alert in alerts if alert["name"] == name]


WHOLE = "import torch; torch.cuda.memory._record_memory_history(context=None, max_entries=100_000)"


def test_of_a_job_that_records_its_history_from_the_start_everything_is_exact(tmp_path: Path) -> None:
    """To the byte, by the real allocator; whoever wants to know has it recorded anew, at any time."""
    rig = Rig(tmp_path, capacity_bytes=6 * GIB)
    with node(rig, tmp_path) as there:
        url = f"http://{there.collector.addresses['http']}"
        with rig.shell({"ALLOCSCOPE_SOCKET": str(there.socket), "ALLOCSCOPE_JOB": "holes"}) as job:
            job(WHOLE)
            job(FRAGMENTS)
            until(lambda: there.get("/api/v1/jobs")["items"], "the job is known")
            asked = there.machine.run("advise", "holes", "--fresh", "--history", "3s", "--url", url, "--json")
        assert asked.returncode == 0, asked.stderr
        [fresh] = json.loads(asked.stdout)["items"]
        recorded, *_ = fresh["trials"]
        assert (fresh["is_exact"], recorded["failed_at"]) == (True, None), fresh["exactness"]
        assert recorded["num_alloc_retries"] > 0
        assert recorded["stranded_peak_bytes"] > 2 * GIB
        said = there.machine.run("advise", "holes", "--url", url)
        assert said.returncode == 0, said.stderr
        assert fresh["summary"] in said.stdout
        assert "entries of the history are explained to the byte" in said.stdout
