"""`python -m tests.gpu_smoke [--python PYTHON]`: the rig's tests of truth against a real GPU, its driver and NVML, and what the probe costs there.

For a machine that has one, in five minutes; PYTHON (this one, where it is not named) has torch with CUDA. Prints what held and what
did not, then one JSON object; the exit status is 1 where something did not hold. In the rig it runs too, which proves only this script.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pynvml
import pytest

from tests.bench import probe_cost
from tests.e2e.processes import Machine, until
from tests.gpuless import build, test_probe_truth
from tests.gpuless.node import node
from tests.gpuless.rig import Rig
from tests.gpuless.watched import START, WORKLOADS, watched

ROUNDS = 5
SETTLED_S = 30.0
"""Within that the node's bill shows what a job holds that does nothing more."""


class RealDevices(Rig):
    """What the rig's tests use of a rig, of the GPUs that there are."""

    def __init__(self, python: Path) -> None:
        self._python = python

    @property
    def python(self) -> Path:
        return self._python

    @property
    def settings(self) -> dict[str, str]:
        """As it is outside, but for the working tree."""
        return {**self.nvml_settings, "PYTHONPATH": build.python_path()}

    @property
    def nvml_settings(self) -> dict[str, str]:
        """NVML as it is."""
        return {
            name: os.environ[name] for name in ("LD_LIBRARY_PATH", "LD_PRELOAD", "GPULESS_DIR") if name in os.environ
        }

    def uuid(self, device: int = 0) -> str:
        """As NVML tells it."""
        return str(pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByIndex(device)))


def truths(real: RealDevices, folder: Path) -> dict[str, Callable[[], None]]:
    """What must hold, by name."""
    shared = ("training_with_lengths_that_vary", "serving_with_caches_that_grow", "peaks_that_the_job_resets_are_its_own",
              "a_cuda_graph_keeps_a_pool_of_its_own", "a_graph_is_captured_while_the_probe_asks_the_driver",
              "a_pool_of_the_programs_own")  # fmt: skip
    alone = ("expandable_segments", "the_drivers_allocator_tells_three_figures_and_no_blocks")
    setattr(test_probe_truth, "Rig", lambda *_, **__: real)  # noqa: B010 (it is that module's import)

    def in_one_job() -> None:
        with watched(real, _new(folder)) as job:
            job("train(1)")
            job.look_often()
            for name in shared:
                _said(name, lambda name=name: getattr(test_probe_truth, f"test_{name}")(job))  # type: ignore[misc]

    return {
        "in one job": in_one_job,
        **{name: lambda name=name: getattr(test_probe_truth, f"test_{name}")(_new(folder)) for name in alone},  # type: ignore[misc]
        "the bill's lines add up to what NVML says": lambda: bill_adds_up(real, _new(folder)),
        "an OutOfMemoryError leaves a capture": lambda: capture_arrives(real, _new(folder)),
    }


def bill_adds_up(real: RealDevices, folder: Path) -> None:
    """A job that does nothing meanwhile: its lines are what NVML says that its process holds, all lines the device's memory."""
    with (
        node(real, folder) as here,
        real.shell({"ALLOCSCOPE_SOCKET": str(here.socket), "ALLOCSCOPE_JOB": "smoke"}) as job,
    ):
        job(WORKLOADS + START.replace('job="watched"', ""))
        job("train(5); serve(300); torch.cuda.synchronize()")
        reserved, uuid = job("torch.cuda.memory_reserved()"), real.uuid()
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)

        def settled() -> bool:
            bill = here.bill(uuid)
            mine = {line: size for (of, line), size in bill.items() if of == "smoke"}
            total = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2).total
            held = {p.pid: p.usedGpuMemory for p in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)}
            used = held.get(job.pid)
            allocator = sum(mine.values()) - mine.get("outside", 0)
            return allocator == reserved and sum(bill.values()) == total and used in (None, sum(mine.values()))

        until(settled, "the bill is NVML's", SETTLED_S)


def capture_arrives(real: RealDevices, folder: Path) -> None:
    """Of an error that the program survives."""
    with (
        node(real, folder) as here,
        real.shell({"ALLOCSCOPE_SOCKET": str(here.socket), "ALLOCSCOPE_JOB": "smoke"}) as job,
    ):
        job(WORKLOADS + START.replace('job="watched"', ""))
        job("train(1)")
        assert "out of memory" in job("run_out()")
        until(lambda: [c for c in here.get("/api/v1/captures")["items"] if c["state"] == "kept"], "a capture is kept")


def cost(real: RealDevices, folder: Path, rounds: int) -> Mapping[str, Any]:
    """As `./dev bench probe` has it."""
    machine = Machine(folder)
    try:
        socket = machine.daemon("n1", machine.collector()).addresses["socket"]
        done = real.run(probe_cost.JOB, str(socket), str(probe_cost.WORKLOADS), str(rounds), timeout_s=280)
    finally:
        machine.close()
    if done.returncode:
        raise subprocess.CalledProcessError(done.returncode, "the cost job", done.stdout, done.stderr)
    told: Mapping[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return told


_results: dict[str, str] = {}


def _said(name: str, check: Callable[[], None]) -> None:
    began = time.monotonic()
    try:
        check()
        _results[name] = "holds"
    except (
        Exception,
        pytest.fail.Exception,
    ) as error:  # (one that does not hold must not keep the others from being tried)
        _results[name] = f"{type(error).__name__}: {error}"
        traceback.print_exc()
    print(f"{_results[name][:60]:<60} {time.monotonic() - began:5.1f} s  {name}", flush=True)


def _new(folder: Path) -> Path:
    return Path(tempfile.mkdtemp(dir=folder))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", type=Path, default=Path(sys.executable), help="one that has torch with CUDA")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="of each measurement of cost; 0: none")
    options = parser.parse_args()
    pynvml.nvmlInit()
    real = RealDevices(options.python)
    told: dict[str, Any] = {
        "device": pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(0)),
        "driver": pynvml.nvmlSystemGetDriverVersion(),
    }
    with tempfile.TemporaryDirectory(prefix="as-") as folder:
        for name, check in truths(real, Path(folder)).items():
            _said(name, check)
        if options.rounds:
            figures = list(probe_cost.figures_of(cost(real, _new(Path(folder)), options.rounds)))
            print(*figures, sep="\n")
            told["cost"] = [figure.to_json() for figure in figures]
    print(json.dumps({**told, "truth": _results}))
    return int(any(result != "holds" for result in _results.values()))


if __name__ == "__main__":
    raise SystemExit(main())
