"""The probe in real jobs that fork, load data, compile, stall and die, with daemons that come, go and hang: never in the way."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from allocscope.model import CaptureOrder, EventKind
from allocscope.probe import app
from tests import needs
from tests.e2e.processes import LAUNCH, Machine, Service, until
from tests.gpuless.rig import Rig
from tests.gpuless.test_captures import notes, snapshots
from tests.gpuless.watched import WORKLOADS, Watched, watched
from tests.probe.receiver import LONG_S, Receiver

HOOK = os.fspath(Path(app.__file__).with_name("site"))
"""What `allocscope run` puts first on a job's path, so that its children have a probe, too."""


@pytest.fixture(scope="module")
def job(tmp_path_factory) -> Iterator[Watched]:
    """A job that uses CUDA, and that these tests use one after the other."""
    folder = tmp_path_factory.mktemp("job")
    rig = Rig(folder)
    with watched(rig, folder, {"PYTHONPATH": f"{HOOK}:{rig.environ['PYTHONPATH']}"}) as job:
        job("import gc, os, subprocess, sys, threading, time\nx = torch.zeros(1, device='cuda')")
        job.look_often()
        job.receiver.wait_for(job.receiver.block_maps)
        yield job


def is_undisturbed(job: Watched) -> None:
    """It is sampled on, on the one stream that it had, and nobody else reports."""
    job.sample()
    assert len(job.receiver.streams) == 1
    assert {process.pid for process in job.receiver.hellos()} == {job.job.pid}
    numbers = job.receiver.numbers()
    assert numbers == list(range(1, len(numbers) + 1))


CHILDREN = """
def children(count):
    ended = []
    for number in range(count):
        child = os.fork()
        if child == 0:
            import signal; signal.alarm(30)
            probe.start()
            gc.collect()
            if number == 0:
                sys.exit(7)  # by the interpreter's whole way out
            os._exit(7)
        ended.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    return ended
"""
"""The job has not used autograd: PyTorch's own way out hangs in a child of one that has, for want of its threads."""


def test_forked_children_end_at_once_though_the_parent_uses_cuda(job):
    job(CHILDREN)
    assert job("children(5)") == [7] * 5
    is_undisturbed(job)


def test_forked_children_end_at_once_though_the_allocators_lock_was_held(job):
    """By a thread that waits for cudaMalloc, which is not in the child; the probe's may wait for that lock at the time."""
    job(CHILDREN)
    job.rig.fail("cudaMalloc wait 0.5")
    job("slow = threading.Thread(target=lambda: torch.empty(1 << 28, dtype=torch.uint8, device='cuda')); slow.start()")
    assert job("children(5)") == [7] * 5
    job.rig.fail()
    job("slow.join()")
    is_undisturbed(job)


def test_a_call_that_waits_for_the_allocators_lock_is_told_as_slow(job):
    job.rig.fail("cudaMalloc wait 0.4")
    job("for size in range(28, 31): torch.empty(1 << size, dtype=torch.uint8, device='cuda'); torch.cuda.empty_cache()")
    job.rig.fail()
    job.receiver.wait_for(lambda: max(sample.call_us or 0 for sample in job.receiver.samples()) > 100_000)


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_workers_that_load_data_are_left_alone(job, start):
    loader = f"torch.utils.data.DataLoader(range(64), 8, num_workers=2, multiprocessing_context={start!r})"
    assert job(f"[len(batch.cuda()) for batch in {loader}]") == [8] * 8
    is_undisturbed(job)


def test_a_subprocess_that_imports_torch_and_uses_no_gpu_reports_nothing(job):
    told = job(
        "subprocess.run([sys.executable, '-c', 'import torch; print(5)'], capture_output=True, text=True)\n"
    ).strip()
    assert told.endswith("returncode=0, stdout='5\\n', stderr='')")
    is_undisturbed(job)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_code_runs_as_one_graph(job, backend):
    job("torch._dynamo.reset(); f = lambda x: (x * 2 + 1).relu()")
    job(f"compiled = torch.compile(f, backend={backend!r}, fullgraph=True)")
    assert job("[list(compiled(torch.zeros(n, 64, device='cuda')).shape) for n in (8, 8, 8)]") == [[8, 64]] * 3
    job("[compiled(torch.zeros(8, 64, device='cuda')) for _ in range(200)] and None")
    is_undisturbed(job)


# ends


def test_a_job_that_ends_gives_its_history_back_answers_its_orders_and_says_that_it_stopped(tmp_path):
    text = """
import sys, torch
from allocscope import probe
probe.start(job="ends")
x = torch.zeros(1, device="cuda")
sys.stdin.readline()
print(torch._C._cuda_isHistoryEnabled(), flush=True)
sys.exit(5)
"""
    script, folder = tmp_path / "job.py", tmp_path / "captures"
    script.write_text(text)
    folder.mkdir()
    rig = Rig(tmp_path)
    with Receiver(tmp_path / "d.sock") as receiver:
        receiver.say(orders=(CaptureOrder("0a" * 16, history_us=60_000_000),))
        environ = {"ALLOCSCOPE_SOCKET": str(receiver.socket)}
        with rig.start(script, environ=environ, stderr=subprocess.PIPE) as process:
            receiver.wait_for(lambda: len(receiver.samples()) > 2)
            out, err = process.communicate("\n", timeout=LONG_S)
            assert (out, err) == ("True\n", ""), err
        assert process.returncode == 5
        receiver.wait_for(receiver.events)
    assert [event.kind for event in receiver.events()] == [EventKind.STOPPED]
    [note] = notes(folder).values()
    assert note.capture.problem == "the process ended, or stopped its probe, before it was due"
    assert snapshots(folder) == {}


def test_a_terminated_job_dies_of_its_signal(tmp_path):
    with watched(Rig(tmp_path), tmp_path) as job:
        job("train(1)")
        job.receiver.wait_for(job.receiver.samples)
        job.job.process.terminate()
        assert job.job.process.wait(LONG_S) == -signal.SIGTERM
        job.receiver.wait_for(lambda: job.receiver.ended == 1)
        assert job.receiver.events() == []


LAST = """
import os, sys, threading, time

class Last:
    '''Ends while Python does, and keeps it until the probe's thread, which wants to go on, has ended, too.'''

    def __init__(self, *, lift_faults):
        [self.thread] = [each for each in threading.enumerate() if each.name == "allocscope-probe"]
        self.task, self.faults = f"/proc/self/task/{self.thread.native_id}", os.environ["GPULESS_DIR"] + "/faults"
        self.lift_faults = lift_faults
        self.lift, self.say, self.is_there, self.sleep = os.truncate, os.write, os.path.exists, time.sleep

    def __del__(self):
        self.say(1, b"ends")
        if self.lift_faults:
            self.lift(self.faults, 0)
        while self.is_there(self.task):
            self.sleep(0.01)
"""
ENDS_WHILE_THE_DRIVER_IS_ASKED = """
import torch
from allocscope import probe
probe.start(job="ends")
x = torch.zeros(1, device="cuda")
last = Last(lift_faults=True)
while sys._current_frames()[last.thread.ident].f_code.co_name != "memory_info":
    pass
"""


def test_a_job_ends_as_ever_while_the_driver_keeps_the_probe_waiting(tmp_path):
    script, rig = tmp_path / "job.py", Rig(tmp_path)
    script.write_text(LAST + ENDS_WHILE_THE_DRIVER_IS_ASKED)
    rig.fail("cudaMemGetInfo wait 600")
    done = rig.run(script, environ={"ALLOCSCOPE_SOCKET": str(tmp_path / "d.sock")})
    assert (done.returncode, done.stdout, done.stderr) == (0, "ends", "")


ENDS_AMID_A_SNAPSHOT = """
import torch
from allocscope import probe
from allocscope.probe import app
app.LONGEST_CALL_S = 600
torch.cuda.memory._record_memory_history(max_entries=5000)  # with stacks, for whose words PyTorch imports its compiler
probe.start(job="ends")
held = [torch.zeros(1 << 20, device="cuda") for _ in range(10)]
last = Last(lift_faults=False)
while app._probe._blocks is None or not app._probe._blocks._running:
    pass
"""


def test_a_job_ends_as_ever_while_a_snapshot_is_taken(tmp_path):
    script, folder = tmp_path / "job.py", tmp_path / "captures"
    script.write_text(LAST + ENDS_AMID_A_SNAPSHOT)
    folder.mkdir()
    with Receiver(tmp_path / "d.sock") as receiver:
        receiver.say(orders=(CaptureOrder("0a" * 16),))
        done = Rig(tmp_path).run(script, environ={"ALLOCSCOPE_SOCKET": str(receiver.socket)})
    assert (done.returncode, done.stdout, done.stderr) == (0, "ends", "")
    assert set(notes(folder)) == {"0a" * 16}


# daemons


def receiver_process(socket: Path, log: Path) -> subprocess.Popen[str]:
    """A daemon's side in a process of its own, which can be stopped."""
    command = [sys.executable, "-m", "tests.probe.receiver", str(socket), str(log)]
    process = subprocess.Popen(command, cwd=needs.REPO, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "listening\n"
    return process


def test_daemons_that_are_absent_late_gone_again_and_hang_are_no_matter_to_a_job(tmp_path):
    """One after the other, to one job, which runs out of memory under each of them."""
    socket, rig = tmp_path / "d.sock", Rig(tmp_path)
    with rig.shell({"ALLOCSCOPE_SOCKET": str(socket)}) as job:
        job(
            "from allocscope import probe; probe.start(); x = torch.zeros(1, device='cuda'); from allocscope.probe import app"
        )
        until(lambda: job("app._probe._sampler is not None"), "the probe has found it")
        job(
            "def run_out():\n try: torch.empty(1 << 40, dtype=torch.uint8, device='cuda')\n except torch.OutOfMemoryError as e: return str(e)"
        )
        assert job("run_out()").startswith("CUDA out of memory")
        with Receiver(socket) as late:
            late.wait_for(lambda: EventKind.OOM in [event.kind for event in late.events()])
            assert job("run_out()").startswith("CUDA out of memory")
            late.wait_for(lambda: len(late.events()) == 2)
        assert job("run_out()").startswith("CUDA out of memory")
        with Receiver(socket) as again:
            again.wait_for(again.events)
            told = sorted({*late.numbers(), *again.numbers()})
            assert told == list(
                range(1, told[-1] + 1)
            )  # what was not acknowledged comes again, and nothing is left out
        log = tmp_path / "log"
        stopped = receiver_process(socket, log)
        try:
            until(lambda: log.exists() and log.read_text().count("\n") > 2, "it receives")
            stopped.send_signal(signal.SIGSTOP)
            assert job("run_out()").startswith("CUDA out of memory")
            assert job.process.stdin is not None
            job.process.stdin.close()
            assert job.process.wait(LONG_S) == 0
        finally:
            stopped.kill()
            stopped.communicate()


def test_a_daemon_whose_disk_is_full_is_no_matter_to_a_job_and_loses_nothing(tmp_path):
    rig, machine = Rig(tmp_path), Machine(tmp_path)
    try:
        collector = machine.collector()
        with unlogged_daemon(tmp_path, collector) as (pid, addresses), rig.shell() as job:
            job(WORKLOADS)
            job(f"from allocscope import probe; probe.start(job='full', socket={addresses['socket']!r})")
            job("x = torch.zeros(1, device='cuda')")
            until(lambda: collector.get("/api/v1/jobs")["items"], "the job is known")
            limits = resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
            assert [job("run_out()")[:18] for _ in range(2)] == ["CUDA out of memory"] * 2
            until(lambda: has_failed(addresses["metrics"]), "the daemon cannot write")
            resource.prlimit(pid, resource.RLIMIT_FSIZE, limits)
            kept = "/api/v1/captures?job=full&state=kept"
            until(lambda: len(collector.get(kept)["items"]) == 2, "both captures are kept")
            assert {capture["reason"] for capture in collector.get(kept)["items"]} == {"oom"}
    finally:
        machine.close()


@contextmanager
def unlogged_daemon(folder: Path, collector: Service) -> Iterator[tuple[int, dict[str, str]]]:
    """One whose log is not on the disk that fills up."""
    addresses, places = folder / "addresses.json", ("--socket", folder / "d.sock", "--spool", folder / "spool")
    to = ("--collector", collector.addresses["grpc"], "--metrics-listen", "127.0.0.1:0", "--nvml", "false")
    command = ("daemon", "--node", "n1", *places, *to, "--addresses-file", addresses)
    with subprocess.Popen(
        [sys.executable, "-P", LAUNCH, "0", *command], stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        try:
            until(addresses.exists, "the daemon is ready")
            yield process.pid, json.loads(addresses.read_text())
        finally:
            process.kill()


def has_failed(address: str) -> bool:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
        return (
            re.search(r"^allocscope_spool_write_failures_total [1-9]", answer.read().decode(), re.MULTILINE) is not None
        )
