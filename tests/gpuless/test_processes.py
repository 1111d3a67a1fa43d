"""Several processes: forked, spawned, of one program, killed in the midst of it."""

import os
import signal
import subprocess
import sys

import pytest

from tests.gpuless.rig import MIB

CONTEXT = 500 * MIB


@pytest.fixture
def job(rig):
    with rig.shell() as job:
        yield job


FORK = """
import os
def in_child(call):
    theirs, ours = os.pipe()
    if os.fork() == 0:
        try:
            told = repr(call())
        except BaseException as error:
            told = f"{type(error).__name__}: {error}"
        os.write(ours, told.encode())
        os._exit(0)
    os.close(ours)
    told = os.read(theirs, 4096).decode()
    os.close(theirs)
    os.wait()
    return told
"""


def test_a_forked_process_may_use_a_device_only_if_its_parent_did_not(rig, job):
    job(FORK)
    use = "lambda: torch.empty(1 << 20, dtype=torch.uint8, device='cuda').numel()"
    assert job(f"in_child({use})") == "1048576"
    assert rig.holders() == {}
    job("held = torch.empty(1 << 20, dtype=torch.uint8, device='cuda')")
    assert job(f"in_child({use})").startswith("RuntimeError: Cannot re-initialize CUDA in forked subprocess")
    runtime = "ctypes.CDLL(None)"
    assert job(f"import ctypes; in_child(lambda: {runtime}.cudaSetDevice(0))") == "3"  # cudaErrorInitializationError
    assert rig.holders() == {job.pid: CONTEXT + 2 * MIB}


SPAWN = """
import torch.multiprocessing
pool = torch.multiprocessing.get_context("spawn").Pool(1)
sent = pool.apply(torch.full, ((3 << 20,), 7), {"dtype": torch.uint8, "device": "cuda"})
[sent.numel(), sent.device.type]
"""


def test_a_spawned_process_holds_what_it_made_and_who_opens_it_holds_no_more(rig, job):
    assert job(SPAWN) == [3 * MIB, "cuda"]
    holders = rig.holders()
    assert holders.pop(job.pid) == CONTEXT
    assert list(holders.values()) == [CONTEXT + 20 * MIB]
    job("del sent; pool.close(); pool.join()")
    assert rig.holders() == {job.pid: CONTEXT}


RANK = """
import torch.distributed as dist
dist.init_process_group("gloo", init_method={meeting!r}, rank={rank}, world_size=2)
torch.cuda.set_device({rank})
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1000, 1000).cuda(), device_ids=[{rank}])
model(torch.zeros(4, 1000).cuda()).sum().backward()
dist.destroy_process_group()
"""


def test_ranks_of_one_program_have_a_device_each(make_rig, tmp_path):
    """The second one has a context on the first device too: of PyTorch's own making, in a thread of ProcessGroupGloo's."""
    rig = make_rig(devices=2)
    local = {"GLOO_SOCKET_IFNAME": "lo"}
    with rig.shell(local) as first, rig.shell(local) as second:
        for rank, job in enumerate((first, second)):
            job.send(RANK.format(meeting=f"file://{tmp_path / 'meeting'}", rank=rank))
        for job in (first, second):
            job.answer()
        assert rig.holders(0)[first.pid] > CONTEXT
        assert rig.holders(0).get(second.pid, CONTEXT) == CONTEXT
        assert set(rig.holders(1)) == {second.pid}


LOCKED = """
import ctypes, os, signal, sys
libgpuless = ctypes.CDLL(sys.argv[1])
libgpuless.gpuless_open.restype = libgpuless.gpuless_state.restype = ctypes.c_void_p
libgpuless.gpuless_state.argtypes = [ctypes.c_void_p]
state = libgpuless.gpuless_state(libgpuless.gpuless_open(sys.argv[2].encode()))
assert ctypes.CDLL(None).pthread_mutex_lock(ctypes.c_void_p(state + 8)) == 0  # after `layout`
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_process_killed_while_it_holds_the_lock_leaves_it_free(rig):
    rig.make_up(1, 7 * MIB)
    command = [sys.executable, "-c", LOCKED, os.fspath(rig.natives / "libgpuless.so"), os.fspath(rig.directory)]
    assert subprocess.run(command, check=False, timeout=30).returncode == -signal.SIGKILL
    assert rig.used_bytes() == 7 * MIB


def test_a_killed_process_leaves_its_bytes_even_where_nobody_waits_for_it(rig, job):
    """A zombie holds nothing: what the kernel gave up is given up."""
    job("held = torch.empty(1 << 30, dtype=torch.uint8, device='cuda')")
    pid = job.pid
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert rig.holders() == {}
