"""Whose the processes on a device are, from a daemon's /proc by the collector's database to whoever asks."""

from __future__ import annotations

import json
import os

import pytest

from allocscope.daemon.owners import user_name
from tests.e2e.processes import Machine, recording

pytestmark = pytest.mark.end_to_end


def test_whose_a_job_is_comes_to_who_asks(machine: Machine) -> None:
    """Without NVML the daemon knows the job's pid from its probe alone; that the job runs as the user of this test it finds out."""
    collector = machine.collector()
    daemon = machine.daemon("n1", collector)
    job = machine.play(recording("kv_serve-1-4114"), daemon, job="serve", speed=1)
    whose = ("devices", "--node", "n1", "--url", f"http://{collector.addresses['http']}")

    def told() -> dict | None:
        items = json.loads(machine.run(*whose, "--json").stdout)["items"]
        return next((p for item in items for p in item["processes"] if p["owner"]), None)

    process = machine.until(told, "the job's owner is told")
    assert process["job"] == "serve"
    assert process["owner"]["user"] == user_name(os.geteuid())
    row = machine.run(*whose).stdout.splitlines()[1]
    assert row.split()[:2] == ["n1", "0"]
    assert f"user {user_name(os.geteuid())}" in row
    job.process.kill()
