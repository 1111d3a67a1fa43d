"""/status: who is on which device and which of them has a probe, told to this machine alone."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from allocscope.daemon.exposition import NodeView
from allocscope.daemon.metrics_server import MetricsServer
from allocscope.daemon.nvml import NvmlRound
from allocscope.daemon.nvml_problems import NvmlProblem, ProblemKind
from allocscope.daemon.status import status, with_status
from allocscope.model import Device, DeviceProcess, DeviceReading, Process
from allocscope.model.node import Owner

WAIT_S = 20
READING = DeviceReading(
    Device("GPU-1", 3, "NVIDIA H200", 100),
    1,
    from_nvml=True,
    free_bytes=30,
    processes=(
        DeviceProcess(70, "a" * 32, "train.py", 50),
        DeviceProcess(71, None, None, None, Owner(user="ann", pod="p")),
    ),
    problem="Not Supported",
    problem_kind="not_supported",
)
VIEW = NodeView(readings=(READING,), processes=(Process("a" * 32, "train", 7, "host", 1, rank=2),), nvml=NvmlRound())


def test_it_names_the_processes_of_each_device_with_and_without_a_probe():
    told = status(VIEW, node="n1", version="1", socket=Path("/run/d.sock"))
    assert {key: told[key] for key in ("node", "version", "pid", "socket", "connected", "nvml")} == {
        "node": "n1",
        "version": "1",
        "pid": os.getpid(),
        "socket": "/run/d.sock",
        "connected": False,
        "nvml": None,
    }
    assert told["jobs"] == [{"job": "train", "rank": 2, "program": None, "pid": 7}]
    (device,) = told["devices"]
    with_probe, without = device.pop("processes")
    assert device == {
        "gpu": 3,
        "uuid": "GPU-1",
        "parent_uuid": None,
        "model": "NVIDIA H200",
        "total_bytes": 100,
        "free_bytes": 30,
        "problem_kind": "not_supported",
        "problem": "Not Supported",
    }
    assert with_probe == {
        "pid": 70, "name": "train.py", "used_bytes": 50, "job": "train", "rank": 2, "owner": None,
    }  # fmt: skip
    assert (without["pid"], without["job"], without["used_bytes"], without["owner"]["user"]) == (71, None, None, "ann")


def test_a_problem_of_nvml_is_told_with_its_kind():
    view = NodeView(nvml=NvmlRound(problem=NvmlProblem(ProblemKind.NO_DRIVER, "Driver Not Loaded")))
    told = status(view, node="n1", version="1", socket=Path("/s"))
    assert told["nvml"] == {"kind": "no_driver", "problem": "Driver Not Loaded"}


def test_it_is_served_beside_the_metrics():
    server = MetricsServer("127.0.0.1:0", CollectorRegistry(), lambda app: with_status(lambda: {"node": "n1"}, app))
    server.start()
    try:
        with urllib.request.urlopen(f"http://{server.address}/status", timeout=WAIT_S) as response:
            assert json.load(response) == {"node": "n1"}
        with urllib.request.urlopen(f"http://{server.address}/metrics", timeout=WAIT_S) as response:
            assert response.status == 200
    finally:
        server.close()


@pytest.mark.parametrize(
    ("address", "answer"),
    [
        ("127.0.0.1", "200 OK"),
        ("127.8.8.8", "200 OK"),
        ("::1", "200 OK"),
        ("::ffff:127.0.0.1", "200 OK"),
        ("10.0.0.7", "403 Forbidden"),
        ("::ffff:10.0.0.7", "403 Forbidden"),
        ("", "403 Forbidden"),
    ],
)
def test_other_machines_are_told_nothing(address, answer):
    said = []

    def start_response(line, headers, exc_info=None):
        said.append(line)
        return said.append

    def never(environ, start):
        raise AssertionError

    body = b"".join(
        with_status(lambda: {"secret": 1}, never)({"PATH_INFO": "/status", "REMOTE_ADDR": address}, start_response)
    )
    assert said == [answer]
    assert (b"secret" in body) == (answer == "200 OK")
