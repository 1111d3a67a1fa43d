"""The probe in real processes: forks, kills, exits, signals, other Pythons; with a stand-in for torch, and with torch itself."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from allocscope.model import CaptureOrder, EventKind
from tests import needs
from tests.probe.receiver import LONG_S, Receiver

HERE = Path(__file__).parent
FAKE = HERE / "fake"
ALLOCSCOPE = [sys.executable, "-c", "import sys; from allocscope.cli.app import main; sys.exit(main())"]


@pytest.fixture
def socket(tmp_path: Path) -> Path:
    return tmp_path / "d.sock"


def environment(socket: Path, **more: str) -> dict[str, str]:
    """Without what this test's own environment says of the probe, of grpc or of a launcher."""
    kept = {k: os.environ[k] for k in ("PATH", "HOME", "TMPDIR", "LANG") if k in os.environ}
    return {**kept, "PYTHONPATH": str(FAKE), "ALLOCSCOPE_SOCKET": str(socket), "PYTHONWARNINGS": "error", **more}


@contextmanager
def running(command: list[object], environ: dict[str, str], cwd: Path | None = None) -> Iterator[subprocess.Popen]:
    process = subprocess.Popen(
        list(map(str, command)), env=environ, cwd=cwd, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def ended(process: subprocess.Popen, said: str = "") -> tuple[int, str, str]:
    out, err = process.communicate(said, timeout=LONG_S)
    return process.returncode, out, err


def script(tmp_path: Path, text: str, name: str = "job.py") -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


JOB = """
import sys, torch
from allocscope import probe
probe.start(job="j")
torch.cuda.init()
torch.cuda.allocate(1 << 20)
sys.stdin.readline()
"""


# a daemon that dies


@contextmanager
def receiving(socket: Path, log: Path) -> Iterator[None]:
    """A receiver in a process of its own, killed at the end."""
    command = [sys.executable, "-m", "tests.probe.receiver", str(socket), str(log)]
    process = subprocess.Popen(command, cwd=needs.REPO, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "listening\n"
        yield
    finally:
        process.kill()
        process.communicate()


def test_a_daemon_killed_in_the_middle_loses_nothing_and_nothing_comes_out_of_order(tmp_path, socket):
    """Numbers come again where the daemon died before it answered, but none is missing, and each stream ascends."""
    pump = script(
        tmp_path,
        "import sys, threading\n"
        "from allocscope.model import AllocatorRef, Process, Sample\n"
        "from allocscope.probe.uplink import Uplink\n"
        "uplink = Uplink(sys.argv[1], Process('a' * 32, 'j', 1, 'h', 1), capacity=100_000)\n"
        "uplink.start()\n"
        "over = threading.Event()\n"
        "threading.Thread(target=lambda: (sys.stdin.readline(), over.set()), daemon=True).start()\n"
        "while not over.wait(0.0005):\n"
        "    n = uplink.next_sequence()\n"
        "    uplink.sample(AllocatorRef('a' * 32, 'GPU-1'), Sample(n, n, allocated_bytes=n))\n"
        f"print(uplink.next_sequence() - 1, uplink.close({LONG_S}))\n",
    )
    logs = [tmp_path / f"log{n}" for n in range(3)]
    with running([sys.executable, pump, socket], environment(socket)) as job:
        for log in logs[:2]:
            with receiving(socket, log):
                wait_for_lines(log, 100)
        with receiving(socket, logs[2]):
            wait_for_lines(logs[2], 100)
            status, out, err = ended(job, "\n")
    assert (status, err) == (0, "")
    last, left = map(int, out.split())
    assert left == 0
    streams = [log.read_text().split() for log in logs]
    assert all(stream[0] == "hello" and stream.count("hello") == 1 for stream in streams)
    numbers = [[int(n) for n in stream[1:]] for stream in streams]
    assert all(stream == list(range(stream[0], stream[-1] + 1)) for stream in numbers)
    assert sorted({n for stream in numbers for n in stream}) == list(range(1, last + 1))


def wait_for_lines(log: Path, count: int) -> None:
    """Until another process has written so many; there is no event to wait on."""
    deadline = time.monotonic() + LONG_S
    while not log.exists() or log.read_text().count("\n") < count:
        assert time.monotonic() < deadline, f"{log} did not grow"
        os.sched_yield()


# forks

FORKS = """
import gc, os, signal, sys, threading
from allocscope.model import AllocatorRef, Process, Sample
from allocscope.probe.uplink import Uplink
ref = AllocatorRef("a" * 32, "GPU-1")
uplink = Uplink(sys.argv[1], Process("a" * 32, "j", 1, "h", 1))
uplink.start()
over = threading.Event()
def pump():
    while not over.wait(0.0005):
        n = uplink.next_sequence()
        uplink.sample(ref, Sample(n, n, allocated_bytes=n))
thread = threading.Thread(target=pump)
thread.start()
children = []
for number in range(20):
    over.wait(0.01)
    child = os.fork()
    if child == 0:
        signal.alarm(10)
        uplink.sample(ref, Sample(10**9, 1, allocated_bytes=1))
        uplink.close(5)
        if number % 2:
            del uplink
        gc.collect()
        sys.exit(7)  # by the interpreter's whole way out
    children.append(child)
print({os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children})
over.set()
thread.join()
print(uplink.close(10))
"""


def test_children_forked_from_a_sending_process_end_at_once_and_send_nothing(tmp_path, socket):
    forks_that_disturb_nothing(sys.executable, tmp_path, socket)


def forks_that_disturb_nothing(python: str | Path, tmp_path: Path, socket: Path) -> None:
    with Receiver(socket) as receiver:
        with running([python, script(tmp_path, FORKS), socket], environment(socket, PYTHONWARNINGS="")) as job:
            assert ended(job) == (0, "{7}\n0\n", "")
        numbers = receiver.numbers()
        assert len(numbers) > 20
        assert numbers == list(range(1, len(numbers) + 1))
        assert len(receiver.streams) == 1


PROBED_FORKS = """
import logging, os, sys, torch
from allocscope import probe
probe.start(job="j")
torch.cuda.init()
torch.cuda.allocate(1 << 20)
sys.stdin.readline()
def child(in_child):
    pid = os.fork()
    if pid == 0:
        logging.basicConfig(level=logging.INFO, stream=sys.stdout)
        torch.cuda.init()
        probe.start(job="child", in_child=in_child)
        if in_child:
            sys.stdin.readline()
        try:
            torch.cuda.run_out(5)
        except torch.cuda.OutOfMemoryError:
            sys.exit(3)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
print(child(False), flush=True)
print(child(True), flush=True)
"""


def test_a_forked_child_is_silent_unless_it_asks(tmp_path, socket):
    with (
        Receiver(socket) as receiver,
        running([sys.executable, script(tmp_path, PROBED_FORKS)], environment(socket, PYTHONWARNINGS="")) as job,
    ):
        receiver.wait_for(receiver.samples)
        assert job.stdin is not None
        assert job.stdout is not None
        job.stdin.write("\n")
        job.stdin.flush()
        assert job.stdout.readline() == "3\n"
        assert [p.job for p in receiver.hellos() if p.job == "child"] == []
        assert receiver.events() == []
        receiver.wait_for(lambda: [p for p in receiver.hellos() if p.job == "child" and p.devices])
        status, out, err = ended(job, "\n")
    assert (status, err) == (0, "")
    assert out.splitlines()[-1] == "3"
    child = next(p for p in receiver.hellos() if p.job == "child")
    parent = next(p for p in receiver.hellos() if p.job == "j")
    assert child.process_id != parent.process_id
    of_child = [e.kind for e in receiver.events() if e.process_id == child.process_id]
    of_parent = [e.kind for e in receiver.events() if e.process_id == parent.process_id]
    assert (of_child, of_parent) == ([EventKind.OOM, EventKind.STOPPED], [EventKind.STOPPED])


LINGERING = """
import os, signal, sys, torch
from allocscope import probe
probe.start(job="j")
torch.cuda.init()
torch.cuda.allocate(1 << 20)
sys.stdin.readline()
if os.fork() == 0:
    signal.alarm(60)
    sys.stdout.close()
    os.close(1), os.close(2)
    os.read(0, 1)
    os._exit(0)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_daemon_sees_the_end_of_a_job_whose_child_lives_on(tmp_path, socket):
    with (
        Receiver(socket) as receiver,
        running([sys.executable, script(tmp_path, LINGERING)], environment(socket, PYTHONWARNINGS="")) as job,
    ):
        receiver.wait_for(receiver.samples)
        assert job.stdin is not None
        job.stdin.write("\n")
        job.stdin.flush()
        receiver.wait_for(lambda: receiver.ended == 1)


# ends


def test_a_job_that_ends_has_all_it_saw_delivered_and_says_that_it_stopped(tmp_path, socket):
    with Receiver(socket) as receiver, running([sys.executable, script(tmp_path, JOB)], environment(socket)) as job:
        receiver.wait_for(lambda: receiver.samples() and receiver.block_maps())
        assert ended(job, "\n") == (0, "", "")
        receiver.wait_for(receiver.events)
    assert [e.kind for e in receiver.events()] == [EventKind.STOPPED]
    assert receiver.samples()[0].allocated_bytes == 1 << 20
    assert receiver.numbers() == list(range(1, len(receiver.numbers()) + 1))


def test_a_job_that_dies_of_an_error_ends_as_it_would_have(tmp_path, socket):
    text = JOB + "torch.cuda.run_out(20 << 20)\n"
    with Receiver(socket) as receiver, running([sys.executable, script(tmp_path, text)], environment(socket)) as job:
        receiver.wait_for(receiver.samples)
        status, out, err = ended(job, "\n")
    assert (status, out) == (1, "")
    assert err.endswith("torch.cuda.OutOfMemoryError: tried to allocate 20971520\n")
    assert "allocscope" not in err.replace(str(tmp_path), "").replace(str(needs.REPO), "")
    assert [(e.kind, e.requested_bytes) for e in receiver.events()][:1] == [(EventKind.OOM, 20 << 20)]


def test_a_daemon_that_never_answers_does_not_keep_a_job_from_its_end(tmp_path, socket):
    with (
        Receiver(socket, acknowledges=False) as receiver,
        running([sys.executable, script(tmp_path, JOB)], environment(socket)) as job,
    ):
        receiver.wait_for(receiver.samples)
        assert ended(job, "\n") == (0, "", "")


def test_without_a_daemon_a_job_runs_and_ends_in_silence(tmp_path, socket):
    with running([sys.executable, script(tmp_path, JOB)], environment(socket)) as job:
        assert ended(job, "\n") == (0, "", "")


def test_a_terminated_job_dies_of_its_signal(tmp_path, socket):
    with Receiver(socket) as receiver, running([sys.executable, script(tmp_path, JOB)], environment(socket)) as job:
        receiver.wait_for(receiver.samples)
        job.terminate()
        assert ended(job) == (-signal.SIGTERM, "", "")
        receiver.wait_for(lambda: receiver.ended == 1)
    assert receiver.events() == []


def test_grpc_is_not_loaded_into_a_job(tmp_path, socket):
    """Its threads and its handlers of fork() would be the job's."""
    text = JOB + "print([m for m in sys.modules if m.partition('.')[0] == 'grpc'])\n"
    with Receiver(socket) as receiver, running([sys.executable, script(tmp_path, text)], environment(socket)) as job:
        receiver.wait_for(receiver.samples)
        assert ended(job, "\n") == (0, "[]\n", "")


# captures


def test_an_order_is_followed_as_the_first_thing_and_an_error_leaves_a_capture_too(tmp_path, socket):
    """In a process of its own, where nothing that a capture needs has been imported yet."""
    text = JOB + "try: torch.cuda.run_out(5)\nexcept torch.cuda.OutOfMemoryError: pass\n"
    folder = tmp_path / "captures"
    folder.mkdir()
    order = CaptureOrder("0a" * 16)
    with Receiver(socket) as receiver, running([sys.executable, script(tmp_path, text)], environment(socket)) as job:
        receiver.wait_for(receiver.hellos)
        receiver.say(orders=(order,))
        wait_for_files(folder, 2)
        assert sorted(path.name for path in folder.iterdir()) == ["0a" * 16 + ".note", "0a" * 16 + ".snapshot"]
        left_us = time.time_ns() // 1000
        receiver.wait_for(lambda: any(sample.time_us > left_us for sample in receiver.samples()))
        assert ended(job, "\n") == (
            0,
            "",
            "",
        )  # and so the probe was done with the first: within it an error leaves but a note
    assert len(list(folder.glob("*.note"))) == len(list(folder.glob("*.snapshot"))) == 2


def wait_for_files(folder: Path, count: int) -> None:
    """Until another process has left so many; there is no event to wait on."""
    deadline = time.monotonic() + LONG_S
    while len([path for path in folder.iterdir() if not path.name.startswith(".")]) < count:
        assert time.monotonic() < deadline, f"there are: {list(folder.iterdir())}"
        os.sched_yield()


def test_disabled_it_does_nothing(tmp_path, socket):
    text = JOB + "import threading; print([t.name for t in threading.enumerate()], 'google.protobuf' in sys.modules)\n"
    with Receiver(socket) as receiver:
        with running([sys.executable, script(tmp_path, text)], environment(socket, ALLOCSCOPE_DISABLE="1")) as job:
            assert ended(job, "\n") == (0, "['MainThread'] False\n", "")
        assert receiver.requests() == []


def test_started_twice_it_is_one_and_started_after_a_stop_another(tmp_path, socket):
    text = (
        JOB.replace("sys.stdin.readline()\n", "")
        + """
probe.start(job="ignored")
sys.stdin.readline()
probe.stop()
probe.stop()
probe.start(job="again")
sys.stdin.readline()
"""
    )
    with Receiver(socket) as receiver, running([sys.executable, script(tmp_path, text)], environment(socket)) as job:
        receiver.wait_for(receiver.samples)
        assert job.stdin is not None
        job.stdin.write("\n")
        job.stdin.flush()
        receiver.wait_for(lambda: [p for p in receiver.hellos() if p.job == "again" and p.devices])
        assert ended(job, "\n") == (0, "", "")
    assert {p.job for p in receiver.hellos()} == {"j", "again"}
    assert len({p.process_id for p in receiver.hellos()}) == 2


# allocscope run

UNCHANGED = """
import os, sys
print(sys.argv[1:], [os.path.basename(p) for p in sys.path if os.path.basename(p) == "site"])
import torch
torch.cuda.init()
torch.cuda.allocate(1 << 20)
sys.stdin.readline()
sys.exit(5)
"""


def test_run_puts_the_probe_into_an_unchanged_script(tmp_path, socket):
    path = script(tmp_path, UNCHANGED)
    with (
        Receiver(socket) as receiver,
        running(
            [*ALLOCSCOPE, "run", "--job", "mine", path, "--lr", "1"], environment(socket, ALLOCSCOPE_SOCKET=str(socket))
        ) as job,
    ):
        receiver.wait_for(receiver.samples)
        assert ended(job, "\n") == (5, "['--lr', '1'] []\n", "")
        receiver.wait_for(receiver.events)
    process = receiver.hellos()[-1]
    assert (process.job, process.program, process.pid) == ("mine", "job.py", job.pid)


def test_the_jobs_own_sitecustomize_is_run_and_its_path_kept(tmp_path, socket):
    own = tmp_path / "own"
    own.mkdir()
    script(own, "import sys\nprint('own', __name__, sys.modules[__name__].__file__)\nHERE = 1\n", "sitecustomize.py")
    path = script(tmp_path, "import sitecustomize, sys\nprint(sitecustomize.HERE, sys.path[1:2])\n")
    with Receiver(socket), running([*ALLOCSCOPE, "run", path], environment(socket, PYTHONPATH=str(own))) as job:
        status, out, err = ended(job)
    lines = out.splitlines()[-2:]  # the command itself is a Python, and has it too
    assert (status, err) == (0, "")
    assert lines == [f"own sitecustomize {own / 'sitecustomize.py'}", f"1 {[str(own)]}"]


def test_an_error_in_the_jobs_own_sitecustomize_is_told_as_python_tells_it(tmp_path, socket):
    own = tmp_path / "own"
    own.mkdir()
    script(own, "raise ValueError('of its own')\n", "sitecustomize.py")
    path = script(tmp_path, "print('goes on')\n")
    environ = environment(socket, PYTHONPATH=str(own))
    with (
        Receiver(socket),
        running([sys.executable, path], environ) as plain,
        running([*ALLOCSCOPE, "run", path], environ) as job,
    ):
        status, out, err = ended(plain)
        told = ended(job)
    assert (status, out) == (0, "goes on\n")
    assert "ValueError: of its own" in err
    assert told == (0, "goes on\n", err * 2)  # the command itself is a Python, and tells it too


CHILDREN = """
import multiprocessing, subprocess, sys
import torch
def work(queue):
    torch.cuda.init()
    torch.cuda.allocate(1 << 20)
    queue.get()
if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[1])
    queue = context.Queue()
    child = context.Process(target=work, args=(queue,))
    child.start()
    print(child.pid, flush=True)
    sys.stdin.readline()
    queue.put(1)
    child.join()
    sys.exit(child.exitcode)
"""


def test_a_spawned_child_that_uses_cuda_has_its_own_probe(tmp_path, socket):
    with (
        Receiver(socket) as receiver,
        running(
            [*ALLOCSCOPE, "run", script(tmp_path, CHILDREN), "spawn"], environment(socket, PYTHONWARNINGS="")
        ) as job,
    ):
        receiver.wait_for(receiver.samples)
        status, out, err = ended(job, "\n")
    assert (status, err) == (0, "")
    assert [p.pid for p in receiver.hellos()][-1] == int(out)


def test_a_forked_worker_has_none(tmp_path, socket):
    with (
        Receiver(socket) as receiver,
        running(
            [*ALLOCSCOPE, "run", script(tmp_path, CHILDREN), "fork"], environment(socket, PYTHONWARNINGS="")
        ) as job,
    ):
        status, _, err = ended(job, "\n")
    assert (status, err, receiver.requests()) == (0, "", [])


def test_a_process_that_never_imports_torch_has_no_thread_and_nothing_of_ours(tmp_path, socket):
    path = script(
        tmp_path,
        "import sys, threading\n"
        "print(threading.active_count(), sorted(m for m in sys.modules if m.startswith(('allocscope', 'grpc', 'google'))))\n",
    )
    with Receiver(socket), running([*ALLOCSCOPE, "run", path], environment(socket)) as job:
        assert ended(job) == (0, "1 []\n", "")


def test_a_python_without_allocscope_says_so_once_and_runs_the_job(tmp_path, socket):
    bare = Path(getattr(sys, "_base_executable", sys.executable))
    path = script(
        tmp_path,
        "import subprocess, sys\nimport torch\nif sys.argv[1:]: subprocess.run([sys.executable, __file__])\nprint(1)\n",
    )
    with Receiver(socket), running([*ALLOCSCOPE, "run", bare, "-s", path, "again"], environment(socket)) as job:
        status, out, err = ended(job)
    assert (status, out) == (0, "1\n1\n")
    assert err == f"allocscope: {bare} runs without the probe (No module named 'allocscope')\n"


# other Pythons

ROUND_TRIP = """
import importlib, pkgutil, sys
import allocscope.proto.v1
from allocscope.model import AllocatorRef, Event, EventKind, Process, Sample
from allocscope.probe.uplink import Uplink
for module in pkgutil.iter_modules(allocscope.proto.v1.__path__):
    importlib.import_module("allocscope.proto.v1." + module.name)
uplink = Uplink(sys.argv[1], Process("a" * 32, "j", 1, "h", 1))
uplink.start()
for _ in range(3):
    n = uplink.next_sequence()
    uplink.sample(AllocatorRef("a" * 32, "GPU-1"), Sample(n, n, allocated_bytes=n))
uplink.event(Event("a" * 32, uplink.next_sequence(), 9, EventKind.STOPPED))
print(uplink.close(10))
"""


def test_the_oldest_grpcio_and_protobuf_will_do(tmp_path, socket):
    python = needs.oldest_python()
    with (
        Receiver(socket) as receiver,
        running([python, script(tmp_path, ROUND_TRIP), socket], environment(socket)) as job,
    ):
        assert ended(job) == (0, "0\n", "")
    assert receiver.numbers() == [1, 2, 3, 4]


def test_children_forked_with_the_oldest_grpcio_end_at_once_too(tmp_path, socket):
    forks_that_disturb_nothing(needs.oldest_python(), tmp_path, socket)


REAL_TORCH = """
import logging, sys, threading
said = threading.Event()
class Tell(logging.Handler):
    def emit(self, record):
        print(record.levelname, record.getMessage(), flush=True)
        if "CUDA" in record.getMessage():
            said.set()
logging.getLogger("allocscope.probe").addHandler(Tell())
logging.getLogger("allocscope.probe").setLevel(logging.INFO)
import torch
assert said.wait(10)
model = torch.nn.Linear(10, 10)
model(torch.zeros(5, 10)).sum().backward()
print(torch.cuda.is_initialized(), "google.protobuf" in sys.modules)
print(torch.version.cuda is not None)
"""
WITHOUT_A_GPU = {"False": "this torch was built without CUDA", "True": "CUDA is not initialized, yet"}
"""Why nothing is done, by whether torch was built for CUDA: PyPI's is, the one for the CPU is not."""


def test_with_a_real_torch_and_no_gpu_it_does_nothing_and_says_so_once(tmp_path, socket):
    python = needs.torch_python()
    path = script(tmp_path, REAL_TORCH)
    with Receiver(socket) as receiver:
        environ = environment(socket, PYTHONPATH="", PYTHONWARNINGS="")
        with running([python, "-c", ALLOCSCOPE[2], "run", path], environ) as job:
            status, out, err = ended(job)
        assert receiver.requests() == []
    lines = [line for line in out.splitlines() if "not imported" not in line]
    why = WITHOUT_A_GPU[lines.pop()]
    assert (status, lines) == (0, [f"INFO allocscope: does nothing: {why}", "False False"])
    assert "allocscope" not in err.replace(str(needs.REPO), "")
