"""`allocscope run`: a Python job with the probe in it, no line of it changed."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

HELP = "run a Python job with the probe in it, no line of it changed"

USAGE = """\
usage: allocscope run [--job NAME] [--socket PATH] [--] COMMAND [ARGUMENT…]

Runs the command with Allocscope's probe in every Python process of it that
imports torch.

  allocscope run train.py --lr 3e-4
  allocscope run python -m trainer
  allocscope run --job nightly -- torchrun --nproc-per-node 8 train.py

  --job NAME      the job's name (else the launcher's: torchrun, Slurm, Open
                  MPI, Ray, Kubernetes)
  --socket PATH   where the node's daemon listens (else $ALLOCSCOPE_SOCKET, or
                  its usual place)

A first word that ends in .py is run by this Python. The exit status is the
command's own. The probe comes in by PYTHONPATH: `python -I`, `-E` and `-S` keep
it out. Each Python that the command starts must have allocscope installed; one
that has not says so, and runs without the probe. ALLOCSCOPE_DISABLE=1 keeps it
out, too."""

NOT_FOUND, NOT_EXECUTABLE, MISUSED = 127, 126, 2
"""As a shell's."""
OPTIONS = {"--job": "ALLOCSCOPE_JOB", "--socket": "ALLOCSCOPE_SOCKET"}


class UsageError(ValueError):
    """The arguments cannot be meant so."""


def main(arguments: list[str]) -> int:
    """Become the command; returns only where that cannot be."""
    if arguments[:1] in (["--help"], ["-h"]):
        print(USAGE)
        return 0
    try:
        settings, command = parse(arguments)
    except UsageError as error:
        print(f"allocscope run: {error}\n\n{USAGE}", file=sys.stderr)
        return MISUSED
    command = with_interpreter(command)
    environ = with_probe({**os.environ, **settings})
    if warning := without_daemon(environ):
        print(f"allocscope run: {warning}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execvpe(command[0], command, environ)
    except FileNotFoundError:
        what = "file" if command[0].endswith(".py") else "command"
        return _cannot(command[0], f"there is no such {what}", NOT_FOUND)
    except OSError as error:
        return _cannot(command[0], error.strerror or str(error), NOT_EXECUTABLE)


def parse(arguments: list[str]) -> tuple[dict[str, str], list[str]]:
    """Our options, as environment variables, and the command, whose own options are left alone."""
    settings: dict[str, str] = {}
    rest = list(arguments)
    while rest and rest[0].startswith("-"):
        word = rest.pop(0)
        if word == "--":
            break
        name, is_joined, value = word.partition("=")
        if name not in OPTIONS:
            raise UsageError(f"there is no option {name} (options of the command's own come after it)")
        if not is_joined:
            if not rest:
                raise UsageError(f"{name} wants a value")
            value = rest.pop(0)
        if not value:
            raise UsageError(f"{name} wants a value")
        settings[OPTIONS[name]] = value
    if not rest:
        raise UsageError("no command was given")
    return settings, rest


def with_interpreter(command: list[str]) -> list[str]:
    """A script that is not a program of its own is run by this Python."""
    script = command[0]
    if script.endswith(".py") and not shutil.which(script):
        return [sys.executable, *command] if Path(script).exists() else command
    return command


def with_probe(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment with the probe's hook in front of the job's own PYTHONPATH."""
    from allocscope import probe

    hook = str(Path(probe.__file__).parent / "site")
    folders = [folder for folder in environ.get("PYTHONPATH", "").split(os.pathsep) if folder != hook]
    return {**environ, "PYTHONPATH": os.pathsep.join([hook, *folders]) if any(folders) else hook}


def without_daemon(environ: Mapping[str, str]) -> str | None:
    """What there is to say where the probe, which is silent in a job, has nobody to report to."""
    from allocscope.probe.app import is_disabled, socket_of

    socket = socket_of(environ)
    if is_disabled(environ) or os.access(socket, os.W_OK):
        return None
    if os.access(socket, os.F_OK):
        return f"the socket {socket} is closed to this user: the job runs, its memory is not reported"
    return f"no daemon at {socket}: the job runs, its memory is not reported until one is there"


def _cannot(command: str, why: str, status: int) -> int:
    print(f"allocscope run: {command}: {why}", file=sys.stderr)
    return status
