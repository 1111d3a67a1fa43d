"""`gpuless CMD...` from a shell: CMD with pretend devices, in the rig's Python."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parent / "gpuless"
LOOK = """
import ctypes, os, sys
runtime, free, total, count = ctypes.CDLL(None), ctypes.c_size_t(), ctypes.c_size_t(), ctypes.c_int()
runtime.cudaGetDeviceCount(ctypes.byref(count))
assert runtime.cudaMemGetInfo(ctypes.byref(free), ctypes.byref(total)) == 0
print(count.value, total.value >> 30, (total.value - free.value) >> 20, os.environ.get("PYTORCH_CUDA_ALLOC_CONF"))
"""


def gpuless(*arguments, **environ):
    return subprocess.run(
        [SCRIPT, *arguments],
        env=os.environ | environ,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_command_sees_the_devices_that_were_asked_for():
    done = gpuless("--devices", "2", "--gib", "8", "python", "-c", LOOK, PYTORCH_CUDA_ALLOC_CONF="backend:native")
    assert (done.stdout, done.stderr) == ("2 8 500 backend:native\n", "")


def test_its_exit_status_is_the_commands():
    assert gpuless("sh", "-c", "exit 7").returncode == 7


def test_who_ends_it_ends_the_command():
    said = "import signal, sys; signal.signal(15, lambda *_: sys.exit(5)); print('ready', flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [SCRIPT, "python", "-c", said], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin
        assert process.stdout
        assert process.stdout.readline() == "ready\n"
        process.terminate()
        assert process.wait(60) == 5


def test_a_command_that_is_not_there_is_named():
    done = gpuless("no-such-command")
    assert (done.returncode, done.stderr) == (
        127,
        "gpuless: no-such-command cannot be run: No such file or directory\n",
    )


def test_a_command_imports_the_working_trees_probe():
    done = gpuless("python", "-c", "import allocscope.probe as p, google.protobuf; print(p.__file__)")
    assert Path(done.stdout.strip()) == SCRIPT.parent.parent.parent / "probe" / "allocscope" / "probe" / "__init__.py"


def test_commands_may_share_their_devices(tmp_path):
    shared = ("--directory", tmp_path, "--gib", "8")
    held = f"{LOOK}\nsys.stdout.flush(); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, SCRIPT.parent / "__main__.py", *shared, "python", "-c", held],
        env=os.environ | {"PYTHONPATH": str(SCRIPT.parent.parent.parent)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as first:
        assert first.stdin
        assert first.stdout
        assert first.stdout.readline() == "1 8 500 None\n"
        assert gpuless(*shared, "python", "-c", LOOK).stdout == "1 8 1000 None\n"
        first.stdin.close()
    assert gpuless(*shared, "python", "-c", LOOK).stdout == "1 8 500 None\n"


@pytest.mark.parametrize("wrong", [["--devices", "two", "true"], ["--unknown", "true"]])
def test_what_is_not_understood_is_said(wrong):
    done = gpuless(*wrong)
    assert done.returncode == 2
    assert done.stderr.startswith("usage: gpuless")
