"""`allocscope doctor` on a driver in trouble, by the real pynvml: each device, what is wrong with it and what to do; it waits for nobody."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.gpuless.node import node
from tests.gpuless.rig import GIB, Device, Instance, Rig

GONE = 4_100_000
"""A pid that no process has (Linux's are below 2^22 = 4,194,304, and this one is not given out here)."""
MODEL = "NVIDIA H100 80GB HBM3 (pretended)"
WAIT_S = 60


def doctor(rig: Rig, folder: Path, *options: str, environ: dict[str, str] | None = None) -> dict[str, Any]:
    """What it finds, with no daemon but the one that the options name."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("ALLOCSCOPE_")}
    places = ("--socket", f"{folder}/none.sock", "--spool", f"{folder}/none", "--collector", "127.0.0.1:1")
    ended = subprocess.run(
        [sys.executable, "-m", "allocscope.cli", "doctor", "--json", "--within-s", "8", *(options or places)],
        env=clean | rig.nvml_settings | (environ or {}),
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    told: dict[str, Any] = json.loads(ended.stdout)
    assert ended.returncode == (0 if told["well"] else 1)
    return told


def nvml(told: dict[str, Any]) -> list[tuple[str, str]]:
    return [(it["state"], it["text"]) for it in told["findings"] if it["about"] == "nvml"]


def test_it_tells_the_driver_and_each_device(tmp_path):
    rig = Rig(tmp_path, 2)
    rig.make_up(GONE, 3 * GIB, device=1)
    told = doctor(rig, tmp_path)
    assert nvml(told) == [
        ("well", "driver 580.95.05, NVML 13.580.95.05: 2 devices"),
        ("well", f"GPU 0, {MODEL} ({rig.uuid(0)}): 24.50 GiB, 24.00 GiB free, 0 processes"),
        ("well", f"GPU 1, {MODEL} ({rig.uuid(1)}): 24.50 GiB, 21.00 GiB free, 1 process"),
    ]
    assert [it["text"] for it in told["findings"] if it["about"] == "jobs"] == [
        f"1 process uses a device (pid {GONE} 3.00 GiB of GPU 1); which of them have a probe is not known"
    ]


@pytest.mark.parametrize(
    ("fault", "state", "text", "remedy"),
    [
        ("nvmlDevice*@1 GPU_IS_LOST", "wrong", "GPU 1, model not told (UUID never told): GPU is lost", "Xid"),
        ("nvmlDeviceGetMemoryInfo@1 RESET_REQUIRED", "wrong", "GPU 1, {name}: GPU requires restart", "--gpu-reset"),
        ("nvmlDeviceGetMemoryInfo@1 NOT_SUPPORTED", "note", "GPU 1, {name}: Not Supported", "what the jobs see"),
        (
            "nvmlDeviceGetMemoryInfo@1 unavailable",
            "note",
            "GPU 1, {name}: the driver does not tell its memory",
            "what the jobs see",
        ),
        (
            "nvmlDeviceGetUUID@1 wait 60",
            "wrong",
            "GPU 1, model not told (UUID never told): NVML has not answered within 5.4 s",
            "dmesg",
        ),
    ],
)
def test_a_device_in_trouble_is_told_with_what_to_do_and_hides_no_other(tmp_path, fault, state, text, remedy):
    rig = Rig(tmp_path, 2)
    rig.fail(fault)
    told = doctor(rig, tmp_path)
    text = text.format(name=f"{MODEL} ({rig.uuid(1)})")
    assert (state, text) in nvml(told)
    assert ("well", f"GPU 0, {MODEL} ({rig.uuid(0)}): 24.50 GiB, 24.00 GiB free, 0 processes") in nvml(told)
    assert next(remedy in it["do"] for it in told["findings"] if it["text"] == text)


@pytest.mark.parametrize(
    ("fault", "text", "remedy"),
    [
        ("nvmlInit LIB_RM_VERSION_MISMATCH", "RM has detected an NVML/RM version mismatch.", "reboot"),
        ("nvmlInit DRIVER_NOT_LOADED", "Driver Not Loaded", "modprobe nvidia"),
        ("nvml* UNKNOWN", "Unknown Error", "daemon-reload"),
        ("nvmlDeviceGetCount wait 60", "NVML has not answered within 5.4 s", "dmesg"),
    ],
)
def test_a_library_in_trouble_is_told_with_what_to_do(tmp_path, fault, text, remedy):
    rig = Rig(tmp_path)
    rig.fail(fault)
    told = doctor(rig, tmp_path)
    assert nvml(told) == [("wrong", f"NVML cannot be used: {text}")]
    assert remedy in next(it["do"] for it in told["findings"] if it["about"] == "nvml")


def test_instances_are_told_with_their_device(tmp_path):
    rig = Rig(tmp_path, [Device(instances=[Instance(5 * GIB), Instance(10 * GIB)])])
    assert nvml(doctor(rig, tmp_path)) == [
        ("well", "driver 580.95.05, NVML 13.580.95.05: 1 device"),
        ("well", f"GPU 0, {MODEL} ({rig.uuid(0)}): in MIG mode, 2 instances"),
        *sorted(
            (
                "well",
                f"instance of GPU 0, {MODEL} MIG {gib}g ({rig.uuid(number)}): {gib}.00 GiB, {gib}.00 GiB free, 0 processes",
            )
            for number, gib in ((1, 5), (2, 10))
        ),
    ]


def test_who_has_no_probe_is_named_by_the_daemon_of_the_node(tmp_path):
    rig = Rig(tmp_path)
    rig.make_up(GONE, 3 * GIB)
    with (
        node(rig, tmp_path) as here,
        rig.shell({"ALLOCSCOPE_SOCKET": str(here.socket), "ALLOCSCOPE_JOB": "train"}) as job,
    ):
        job("from allocscope import probe; probe.start(); held = torch.empty(30 << 20, device='cuda')")
        here.bill_with(rig.uuid(), {("", "other_processes"): 3 * GIB})
        with rig.shell() as foreign:
            foreign("x = torch.empty(1 << 30, dtype=torch.uint8, device='cuda')")
            here.bill_with(rig.uuid(), {("", "other_processes"): 4 * GIB + (500 << 20)})
            places = (
                *("--socket", str(here.socket), "--metrics-listen", here.daemon.addresses["metrics"]),
                *("--spool", f"{tmp_path}/spool-daemon-n1", "--collector", here.collector.addresses["grpc"]),
            )
            told = doctor(rig, tmp_path, *places)
    jobs = [(it["state"], it["text"]) for it in told["findings"] if it["about"] == "jobs"]
    where = f"of GPU 0 ({rig.uuid()}) and has no probe"
    assert jobs[0] == ("well", "train: 1 process reports")
    assert jobs[1] == ("note", f"pid {GONE} holds 3.00 GiB {where}; the daemon sees no such process")
    assert jobs[2][1].startswith(f"pid {foreign.pid} (")
    assert jobs[2][1].endswith(f" holds 1.49 GiB {where}")
    assert told["well"], [it for it in told["findings"] if it["state"] == "wrong"]
