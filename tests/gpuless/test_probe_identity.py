"""The probe in real ranks that really use their devices: whose figures they are, and of which device, as the daemon hears it."""

from __future__ import annotations

import pytest

from allocscope.model import Process
from tests.gpuless.rig import GIB, Device, Instance, Rig
from tests.probe.receiver import Receiver

WITH_MIG = [Device(cuda_rank=1), Device(cuda_rank=0, instances=[Instance(5 * GIB), Instance(10 * GIB)])]
"""By NVML: a whole device, 0, one in MIG mode, 1, and its instances, 2 and 3. CUDA has the one in MIG mode first."""
NAMES = (
    "from allocscope.probe import torch_cuda\n"
    "torch.cuda.init()\n"
    "found = torch_cuda.look()\n"
    "[found.device(index).uuid for index in range(found.device_count)]"
)


@pytest.mark.parametrize(
    ("visible", "numbers"),
    [
        pytest.param(None, [2], id="the first instance, which hides what comes after it"),
        pytest.param("{3:.12}", [3], id="an instance by the beginning of its UUID"),
        pytest.param("1,-1,0", [0], id="CUDA's numbers, up to -1"),
    ],
)
def test_a_device_is_known_to_the_probe_as_to_nvml_however_cuda_was_told_of_it(tmp_path, visible, numbers):
    rig = Rig(tmp_path, WITH_MIG)
    uuids = [rig.uuid(number) for number in range(4)]
    with rig.shell({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible.format(*uuids)}) as job:
        assert job(NAMES) == [uuids[number] for number in numbers]


RANK_AND_HELPER = """
import os, subprocess, sys
from allocscope import probe
probe.start()
import torch
held = torch.empty(1 << 20, device=f"cuda:{os.environ['LOCAL_RANK']}")
if len(sys.argv) == 1:
    helper = subprocess.Popen([sys.executable, __file__, "helper"], stdin=subprocess.PIPE)
    sys.stdin.read()
    helper.communicate()
else:
    sys.stdin.read()
"""
LONG_S = 90
"""For four processes that import the CUDA build of torch, two after the other two."""


@pytest.mark.timeout(240)
def test_ranks_and_what_they_start_are_of_one_job_and_no_rank_is_there_twice(tmp_path):
    """torchrun's two ranks, each with a process of its own that uses the same device and has inherited RANK."""
    rig, script = Rig(tmp_path, 2), tmp_path / "train.py"
    script.write_text(RANK_AND_HELPER)
    with Receiver(tmp_path / "d.sock") as receiver:
        environ = {"ALLOCSCOPE_SOCKET": str(receiver.socket), "OMP_NUM_THREADS": "1"}
        process = rig.start("-m", "torch.distributed.run", "--nproc-per-node", "2", script, environ=environ)
        try:
            with receiver._changed:
                assert receiver._changed.wait_for(lambda: len(using_a_device(receiver)) == 4, LONG_S)
        finally:  # all of them end once there is nothing more to read
            process.communicate(timeout=LONG_S)
    last = using_a_device(receiver).values()
    assert {(p.rank, p.world_size, p.devices[0].uuid) for p in last} == {
        (0, 2, rig.uuid(0)), (1, 2, rig.uuid(1)), (None, 2, rig.uuid(0)), (None, 2, rig.uuid(1)),
    }  # fmt: skip
    assert len({p.job for p in last}) == 1


def using_a_device(receiver: Receiver) -> dict[int, Process]:
    """What each process said last, by pid."""
    return {process.pid: process for process in receiver.hellos() if process.devices}
