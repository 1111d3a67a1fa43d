"""Captures from what a job leaves beside its daemon's socket to a file in somebody's folder, over real processes."""

from __future__ import annotations

import json
import os
import pickle
import secrets
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from allocscope.model import Capture, CaptureNote, CaptureReason, Event, EventKind, Process, wire
from allocscope.model.captures import FOLDER, NOTE_SUFFIX, SNAPSHOT_SUFFIX
from tests.e2e.processes import Machine, Service, recording

pytestmark = pytest.mark.end_to_end

SNAPSHOT = pickle.dumps({"segments": [], "device_traces": [], "noise": os.urandom(5 << 20)}, protocol=4)


def captures(collector: Service, **wanted: object) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = collector.get("/api/v1/captures")["items"]
    return [one for one in items if all(one[name] == value for name, value in wanted.items())]


def leave(folder: Path, name: str, content: bytes) -> None:
    """As a probe leaves a file: under another name first."""
    part = folder / f".{name}.part"
    part.write_bytes(content)
    part.rename(folder / name)


def leave_capture(daemon: Service, job: str) -> str:
    """Of a process that ran out of memory, and was killed right after; its id."""
    folder = Path(daemon.addresses["socket"]).parent / FOLDER
    now_us = time.time_ns() // 1000
    process = Process(secrets.token_hex(16), job, os.getpid(), socket.gethostname(), now_us, rank=5)
    capture_id = secrets.token_hex(16)
    reason, event = CaptureReason.OOM, Event(process.process_id, 1, now_us, EventKind.OOM, requested_bytes=1 << 30)
    capture = Capture(capture_id, process.process_id, now_us, reason, None, len(SNAPSHOT), 0)
    note = wire.note_to_wire(CaptureNote(capture, process, event=event))
    leave(folder, capture_id + NOTE_SUFFIX, note.SerializeToString())
    leave(folder, capture_id + SNAPSHOT_SUFFIX, SNAPSHOT)
    return capture_id


def test_what_a_killed_job_left_comes_into_a_file_though_the_collector_was_away(machine: Machine) -> None:
    collector = machine.collector()
    daemon = machine.daemon("n1", collector)
    machine.kill(collector)
    capture_id = leave_capture(daemon, "killed")
    collector = machine.again(collector)
    machine.until(lambda: captures(collector, capture_id=capture_id, state="kept"), "the capture is kept")
    [event] = machine.until(lambda: collector.get("/api/v1/jobs/killed")["events"], "so is the error itself")
    assert (event["kind"], event["requested_bytes"]) == ("oom", 1 << 30)
    url = f"http://{collector.addresses['http']}"
    output = machine.folder / "killed.pickle"
    fetched = machine.run("capture", "--id", capture_id, "--url", url, "--output", str(output), "--json")
    assert fetched.returncode == 0, fetched.stderr
    [said] = json.loads(fetched.stdout)["items"]
    assert (said["job"], said["rank"], said["reason"], said["file"]) == ("killed", 5, "oom", str(output))
    assert output.read_bytes() == SNAPSHOT


def test_whoever_waits_for_a_process_that_was_killed_is_told_so(machine: Machine) -> None:
    collector = machine.collector()
    daemon = machine.daemon("n1", collector)
    job = machine.play(recording("kv_serve-1-4114"), daemon, job="gone", speed=1)
    machine.until(lambda: collector.get("/api/v1/fleet")["jobs_live"] == 1, "the job is seen")
    job.process.kill()
    job.process.wait()
    asked = machine.run("capture", "gone", "--url", f"http://{collector.addresses['http']}")
    assert asked.returncode == 1, asked.stderr
    assert "gone rank 0 on n1: no snapshot\n" in asked.stdout
    assert "the process is not on its node any more" in asked.stdout


def test_a_job_that_turns_at_risk_is_captured_unasked(machine: Machine) -> None:
    collector = machine.collector()
    daemon = machine.daemon("n1", collector)
    job = machine.play(recording("kv_serve-1-4114"), daemon, job="at-risk", speed=60)
    [ordered] = machine.until(lambda: captures(collector, job="at-risk"), "a capture is on order")
    assert (ordered["reason"], ordered["node"], ordered["uuid"]) == ("forecast", "n1", job.uuid)
    assert ordered["most_history_entries"] == 200_000
    machine.until(lambda: captures(collector, job="at-risk")[0]["state"] != "ordered", "its node is told")
    job.end()
