"""What the probe costs a job, on the real CUDA caching allocator: in the rig, which has no GPU, or with one (tests/gpu_smoke.py)."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.bench.figures import Figure
from tests.e2e.processes import Machine
from tests.gpuless.rig import Rig

ROUNDS = 20
JOB = Path(__file__).with_name("probe_job.py")
WORKLOADS = Path(__file__).parents[1] / "gpuless" / "workloads.py"


def figures(rounds: int = ROUNDS) -> Iterator[Figure]:
    """In the rig, with a daemon that takes what comes."""
    with tempfile.TemporaryDirectory(prefix="as-") as folder:
        machine = Machine(Path(folder))
        try:
            collector = machine.collector()
            daemon = machine.daemon("n1", collector)
            rig = Rig(Path(folder))
            done = rig.run(JOB, str(daemon.addresses["socket"]), str(WORKLOADS), str(rounds), timeout_s=1800)
        finally:
            machine.close()
    if done.returncode:
        raise SystemExit(f"the job in the rig failed:\n{done.stderr[-2000:]}")
    yield from figures_of(json.loads(done.stdout.splitlines()[-1]))


def figures_of(told: Mapping[str, Any]) -> Iterator[Figure]:
    """What the job told, as ratios of each round."""
    calls = told["calls"]
    yield Figure("a sample / one raw _cuda_memoryStats", _ratios(calls["sample_s"], calls["raw_s"]), "", "≤ 3")
    yield Figure("  of it cudaMemGetInfo / the same", _ratios(calls["driver_s"], calls["raw_s"]), "")
    yield Figure("  one raw _cuda_memoryStats", [s * 1e6 for s in calls["raw_s"]], "µs")
    yield Figure(
        "a block map / memory_snapshot(include_traces=False)",
        _ratios(calls["map_s"], calls["snapshot_s"]),
        "",
        "≤ 1.5",
    )
    yield Figure("  one memory_snapshot, 1,335 blocks live", [s * 1e3 for s in calls["snapshot_s"]], "ms")
    for name in ("allocating", "training"):
        loop = told[name]
        slower = [100 * (1 - ratio) for ratio in _ratios(loop["with"], loop["without"])]
        yield Figure(f"{name}: slower with the probe", slower, "%", "under 0.1 at the median")
        yield Figure(f"{name}: CPU of the probe's threads", [100 * part for part in loop["probe_cpu"]], "% of a core")
        yield Figure(f"  {name}: rounds a second", loop["without"], "1/s")


def _ratios(over: list[float], under: list[float]) -> list[float]:
    return [o / u for o, u in zip(over, under, strict=True)]
