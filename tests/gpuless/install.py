"""The rig's PyTorch: made once for all clones of one user, in a folder of its own. `python -m tests.gpuless.install` makes it.

Only pip and the standard library, so that any Python can run this. Several may run it at once: one makes it, the others wait.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

TORCH_VERSION = "2.14.1"
REQUIREMENTS = (f"torch=={TORCH_VERSION}", "numpy")
NEEDED_BYTES = 9 << 30
"""While it is made: the packages as downloaded (3 GB), and unpacked (5.5 GB)."""
COMPLETE = ".complete"

CHECK = f"""
import pathlib, sys, torch, numpy
assert torch.__version__.split("+")[0] == {TORCH_VERSION!r}, torch.__version__
packages = pathlib.Path(torch.__file__).parent.parent
assert list(packages.glob("nvidia/*/lib/libcudart.so.*")), "not a CUDA build"
assert (packages / "triton/backends/nvidia/include/cuda_runtime_api.h").exists(), "no headers"
"""


class InstallError(Exception):
    """The rig's PyTorch cannot be made here; says why."""


def home() -> Path:
    """Where it lies, made or not."""
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    root = Path(os.environ.get("ALLOCSCOPE_CACHE") or caches / "allocscope")
    return root / "gpuless" / f"torch-{TORCH_VERSION}"


def python() -> Path:
    """Its Python."""
    return home() / "bin" / "python"


def is_complete() -> bool:
    """Whether it was made to the end, of what is asked for today."""
    try:
        return (home() / COMPLETE).read_text() == _asked() and os.access(python(), os.X_OK)
    except OSError:
        return False


def make() -> None:
    """Make it where it is not complete. Raises InstallError."""
    if is_complete():
        return
    home().parent.mkdir(parents=True, exist_ok=True)
    with _alone():
        if is_complete():
            return
        _want_room()
        shutil.rmtree(home(), ignore_errors=True)
        _say(f"installing {REQUIREMENTS[0]} with CUDA into {home()} (5.5 GB, some minutes)")
        _fill()
        (home() / COMPLETE).write_text(_asked())


def _asked() -> str:
    return "\n".join(REQUIREMENTS) + "\n"


def _want_room() -> None:
    free_bytes = shutil.disk_usage(home().parent).free
    if free_bytes < NEEDED_BYTES:
        raise InstallError(
            f"{home().parent} has {free_bytes / 2**30:.1f} GiB left, and the rig's PyTorch needs {NEEDED_BYTES >> 30} GiB while it is"
            " made (5.5 GB later); make room, or name another folder: ALLOCSCOPE_CACHE=/path/with/room"
        )


def _fill() -> None:
    downloads = home() / "downloads"  # in the one folder that has the room
    _run([sys.executable, "-m", "venv", os.fspath(home())])
    downloads.mkdir()
    pip = [os.fspath(python()), "-m", "pip", "--disable-pip-version-check", "--no-input", "-q", "--no-cache-dir"]
    _run([*pip, "install", *REQUIREMENTS], TMPDIR=os.fspath(downloads))
    shutil.rmtree(downloads)
    _run([os.fspath(python()), "-c", CHECK])


def _run(command: Sequence[str], **environment: str) -> None:
    done = subprocess.run(command, env=os.environ | environment, stdin=subprocess.DEVNULL, check=False)
    if done.returncode:
        raise InstallError(f"`{' '.join(command)[:200]}` failed ({done.returncode}); what it said is above")


@contextmanager
def _alone() -> Iterator[None]:
    """One at a time; the lock goes with the process."""
    with home().with_suffix(".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say(f"waiting for another one that makes {home()}")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _say(what: str) -> None:
    print(f"gpuless: {what}", file=sys.stderr)


def main() -> int:
    """Make it, or say why not."""
    try:
        make()
    except InstallError as error:
        _say(str(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
