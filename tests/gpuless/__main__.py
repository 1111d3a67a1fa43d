"""`python -m tests.gpuless CMD...`: CMD with pretend devices, where `python` is the one with the CUDA build of PyTorch.

Without CMD: make what it needs, and that is all. CUDA_*, PYTORCH_*, TORCH_* and GPULESS_* of the environment reach CMD.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.gpuless import build, install
from tests.gpuless.rig import GIB, Rig


def main(arguments: Sequence[str]) -> int:
    """Run the command; its exit status."""
    asked = _parser().parse_args(arguments)
    try:
        install.make()
        build.natives()
        build.companions()
    except (install.InstallError, build.BuildError) as error:
        print(f"gpuless: {error}", file=sys.stderr)
        return 1
    if not asked.command:
        return 0
    with tempfile.TemporaryDirectory(prefix="gpuless-") as own:
        rig = Rig(asked.directory or Path(own), asked.devices, capacity_bytes=int(asked.gib * GIB))
        return _run(rig, asked.command)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gpuless", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--devices", type=int, default=1, help="how many (1)")
    parser.add_argument("--gib", type=float, default=24, help="what each has, in GiB (24)")
    parser.add_argument("--directory", type=Path, help="where their state lies, for several commands to share")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    return parser


def _run(rig: Rig, command: list[str]) -> int:
    mine = ("CUDA_", "PYTORCH_", "TORCH_", "GPULESS_")
    own = {name: value for name, value in os.environ.items() if name.startswith(mine)}
    path = f"{rig.python.parent}{os.pathsep}{os.environ.get('PATH', '')}"
    try:
        with subprocess.Popen(command, env=own | rig.environ | {"PATH": path}) as process:
            signal.signal(signal.SIGTERM, lambda number, _: process.send_signal(number))
            status = process.wait()
    except OSError as error:  # the words of sh, and its status
        print(f"gpuless: {command[0]} cannot be run: {error.strerror or error}", file=sys.stderr)
        return 127
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
