"""The bill of a device that several processes share: its lines add up to what NVML says, to the byte."""

from __future__ import annotations

import pytest

from tests.gpuless.node import node
from tests.gpuless.rig import GIB, MIB, Device, Rig
from tests.gpuless.watched import START, WORKLOADS

CONTEXT = 500 * MIB
SUMS = """
def lines():
    stats, blocks = torch.cuda.memory_stats(), [(s, b) for s in torch.cuda.memory_snapshot(include_traces=False) for b in s["blocks"]]
    live = [b for s, b in blocks if b["state"] == "active_allocated"]
    free = [(s, b) for s, b in blocks if b["state"] == "inactive"]
    releasable = sum(b["size"] for s, b in free if len(s["blocks"]) == 1 and s["segment_pool_id"] == (0, 0))
    private = sum(b["size"] for s, b in free if s["segment_pool_id"] != (0, 0))
    return {
        "requested": sum(b["requested_size"] for b in live),
        "rounding": sum(b["size"] - b["requested_size"] for b in live),
        "releasable": releasable, "private": private,
        "stranded": sum(b["size"] for s, b in free) - releasable - private,
        "awaiting_free": stats["active_bytes.all.current"] - stats["allocated_bytes.all.current"],
    }
"""


@pytest.fixture
def rig(tmp_path):
    return Rig(tmp_path, [Device(capacity_bytes=24 * GIB, driver_bytes=600 * MIB)])


def test_the_lines_of_a_shared_device_add_up_to_what_nvml_says(tmp_path, rig):
    """A job that trains, one that serves, one whose allocator tells nothing, and a program without a probe."""
    with node(rig, tmp_path) as here:
        told = {"ALLOCSCOPE_SOCKET": str(here.socket)}
        with (
            rig.shell({**told, "ALLOCSCOPE_JOB": "trains"}) as trains,
            rig.shell({**told, "ALLOCSCOPE_JOB": "serves"}) as serves,
            rig.shell({**told, "ALLOCSCOPE_JOB": "dark", "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}) as dark,
            rig.shell() as foreign,
        ):
            for job in (trains, serves, dark):
                job(WORKLOADS + START.replace('job="watched"', "") + SUMS)
            trains("train(5)")
            serves("serve(300); capture_graph()")
            dark("x = torch.empty(1 << 30, dtype=torch.uint8, device='cuda')")
            foreign("x = torch.empty(2 << 30, dtype=torch.uint8, device='cuda')")
            expected = {
                (name, line): amount
                for name, job in (("trains", trains), ("serves", serves))
                for line, amount in {**job("lines()"), "outside": CONTEXT}.items()
            }
            expected["dark", "outside"] = CONTEXT + GIB
            expected["", "other_processes"] = CONTEXT + 2 * GIB
            expected["", "driver"] = 600 * MIB
            bill = here.bill_with(rig.uuid(), expected)
            assert expected["serves", "stranded"] > 0
            assert expected["serves", "private"] > 0
            assert set(bill) - set(expected) == {("", "free")}
            assert sum(bill.values()) == 24 * GIB + 600 * MIB
            assert bill["", "free"] == 24 * GIB - rig.used_bytes()
            held = rig.holders()
            for name, job in (("trains", trains), ("serves", serves), ("dark", dark)):
                assert sum(amount for (of, _), amount in bill.items() if of == name) == held[job.pid]
