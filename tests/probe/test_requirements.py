"""What the probe needs of a job's Python: protobuf alone; and where that is missing or too old, the job does not notice."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import needs
from tests.probe.receiver import LONG_S, Receiver

FAKE = Path(__file__).parent / "fake"
BARE = Path(getattr(sys, "_base_executable", sys.executable))
"""A Python with nothing installed that the test does not hand it."""

JOB = """
import importlib.util, logging, sys, threading, torch
samples = threading.Event()
class Tell(logging.Handler):
    def emit(self, record):
        print(record.levelname, record.getMessage(), flush=True)
        if "samples as process" in record.getMessage():
            samples.set()
logging.getLogger("allocscope.probe").addHandler(Tell())
logging.getLogger("allocscope.probe").setLevel(logging.INFO)
print([name for name in ("grpc", "google") if importlib.util.find_spec(name)], flush=True)
from allocscope import probe
probe.start(job="j")
torch.cuda.init()
torch.cuda.allocate(1 << 20)
assert samples.wait(10)
for _ in range(2):
    try:
        torch.cuda.run_out(5)
    except torch.cuda.OutOfMemoryError:
        print("caught", flush=True)
probe.stop(5)
print("done")
"""


@pytest.fixture
def socket(tmp_path: Path) -> Path:
    return tmp_path / "d.sock"


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    """What the job's Python has, beside Allocscope's probe and a stand-in for torch."""
    folder = tmp_path / "packages"
    folder.mkdir()
    return folder


def protobuf(packages: Path, *, without: str | None = None) -> None:
    """The protobuf of this test's Python, or one that lacks a module, as an older one does."""
    google = Path(__import__("google.protobuf").__path__[0])
    shutil.copytree(google, packages / "google", ignore=shutil.ignore_patterns("__pycache__"))
    if without:
        (packages / "google" / "protobuf" / f"{without}.py").unlink()


def run(socket: Path, packages: Path) -> tuple[list[str], str]:
    roots = [needs.REPO / "proto", needs.REPO / "probe", FAKE, packages]
    environ = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": os.pathsep.join(map(str, roots)),
        "ALLOCSCOPE_SOCKET": str(socket),
    }
    done = subprocess.run(
        [BARE, "-s", "-W", "error", "-c", JOB], env=environ, capture_output=True, text=True, timeout=LONG_S * 2, check=True
    )  # fmt: skip
    return done.stdout.splitlines(), done.stderr


def test_without_grpcio_all_arrives(socket, packages):
    protobuf(packages)
    with Receiver(socket) as receiver:
        out, err = run(socket, packages)
        receiver.wait_for(lambda: len(receiver.events()) == 3)
    assert (out[0], out[-1], err) == ("['google']", "done", "")
    assert [process.job for process in receiver.hellos()][:1] == ["j"]
    assert receiver.numbers() == list(range(1, len(receiver.numbers()) + 1))
    assert receiver.samples()[0].allocated_bytes == 1 << 20


@pytest.mark.parametrize("is_daemon_there", [True, False])
def test_without_protobuf_the_job_goes_on_and_it_is_said_once(socket, packages, is_daemon_there):
    inert(socket, packages, "[]", "No module named 'google'", is_daemon_there=is_daemon_there)


@pytest.mark.parametrize("is_daemon_there", [True, False])
def test_with_a_protobuf_that_is_too_old_likewise(socket, packages, is_daemon_there):
    """It has no `runtime_version`, which came with 5.27."""
    protobuf(packages, without="runtime_version")
    why = "cannot import name 'runtime_version' from 'google.protobuf'"
    inert(socket, packages, "['google']", why, is_daemon_there=is_daemon_there)


def test_with_a_protobuf_that_cannot_even_be_imported_likewise(socket, packages):
    (packages / "google" / "protobuf").mkdir(parents=True)
    (packages / "google" / "protobuf" / "__init__.py").write_text("raise SystemError('built for another Python')\n")
    inert(socket, packages, "['google']", "built for another Python", is_daemon_there=True)


def inert(socket: Path, packages: Path, found: str, why: str, *, is_daemon_there: bool) -> None:
    receiver = Receiver(socket)
    if is_daemon_there:
        receiver.start()
    try:
        out, err = run(socket, packages)
    finally:
        receiver.stop()
    told = [line for line in out if "protobuf (" in line]
    assert len(told) == 1
    assert told[0].startswith(f"INFO allocscope: sends nothing: cannot use protobuf ({why}")
    assert (out[0], out.count("caught"), out[-1], err) == (found, 2, "done", "")
    assert receiver.requests() == []
