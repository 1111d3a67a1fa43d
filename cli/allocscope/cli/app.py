"""The one command, `allocscope`: each subcommand is a module of the same name, imported only when it is asked for.

A subcommand's module has `HELP` (one line) and `main(arguments: list[str]) -> int`, which returns the exit status.
`run` needs nothing beyond the probe's own dependencies; the others say which extra brings what they need.
"""

from __future__ import annotations

import io
import os
import sys
from importlib import import_module
from typing import TextIO

COMMANDS: dict[str, tuple[str, str]] = {
    "demo": ("a fleet on this machine, from recordings of real jobs", "all"),
    "collector": ("the service that stores, foresees and alerts; one a fleet", "collector"),
    "daemon": ("the service that gathers from the jobs of its node; one a node", "daemon"),
    "doctor": ("what works on this node, what does not, and what to do about it", "daemon"),
    "jobs": ("the fleet's jobs, with state, cause, headroom and time left", "cli"),
    "risks": ("the allocators that are not well, and why", "cli"),
    "bill": ("where every byte of a job's devices is", "cli"),
    "devices": ("the fleet's devices, and whose the processes on them are", "cli"),
    "alerts": ("alerts, the latest first", "cli"),
    "capture": ("a whole snapshot of a job that runs, and who holds its tensors", "cli"),
    "advise": ("what would help a job, from replays of its own requests", "cli"),
    "run": ("run a Python job with the probe in it, no line of it changed", ""),
    "play": ("behave, toward a daemon, as a recorded job did", ""),
    "replay": ("a recording's requests once more, under other settings; advice", ""),
    "oom": ("explain the out-of-memory texts in a log", ""),
    "log": ("what PyTorch's allocator did, event by event, and what it came to", ""),
    "inspect": ("the bill and the holes of a PyTorch snapshot, and why it ran out", ""),
    "rules": ("the alert rules for Prometheus, or for its operator", ""),
    "rehearse": ("what the forecast would have said over a recorded run", "cli"),
}
"""Name: what it does, and the extra (`pip install '.[…]'` in a clone) that brings what it needs beyond the probe's dependencies."""


INTERRUPTED = 130
"""Exit status after Ctrl-C, as a shell's, where a command does not say otherwise."""


def usage() -> str:
    """The text of `allocscope help`."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {does}" for name, (does, _) in COMMANDS.items()]
    return "\n".join(["usage: allocscope COMMAND [ARGUMENT…]   (allocscope COMMAND --help tells more)", "", *lines])


def main(arguments: list[str] | None = None) -> int:
    """Entry point of the console script."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # where the locale's letters are few, a ? is better than no answer
    try:
        try:
            return _run(arguments)
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # as of `| head`; what is still buffered must go somewhere when Python ends
        _discard(sys.stdout)
        return 0
    except OSError as error:
        if not _is_stuck(sys.stdout):
            raise
        print(f"allocscope: the answer cannot be written: {error.strerror or error}", file=sys.stderr)
        _discard(sys.stdout)
        return 1


def _discard(out: TextIO | None) -> None:
    """What is still buffered goes nowhere."""
    if out is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), out.fileno())


def _is_stuck(out: TextIO | None) -> bool:
    """Can nothing be written to it, as on a full disk? Unbuffered, it keeps nothing that a flush could fail on."""
    try:
        if out is not None:
            out.write("\n")
            out.flush()
    except OSError:
        return True
    return False


def _run(arguments: list[str] | None) -> int:
    given = sys.argv[1:] if arguments is None else arguments
    if not given or given[0] in ("help", "--help", "-h"):
        print(usage())
        return 0 if given else 2
    name, rest = given[0], given[1:]
    if name in ("--version", "version"):
        from importlib.metadata import version

        print(version("allocscope"))
        return 0
    if name not in COMMANDS:
        from difflib import get_close_matches

        near = get_close_matches(name, COMMANDS, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        print(f"allocscope: there is no command {name!r}{hint}\n\n{usage()}", file=sys.stderr)
        return 2
    try:
        return int(import_module(f"allocscope.cli.{name}").main(rest))
    except ModuleNotFoundError as error:
        extra = COMMANDS[name][1]
        if not extra or (error.name or "").startswith("allocscope"):
            raise
        remedy = f"in a clone of Allocscope: pip install '.[{extra}]'"
        print(f"allocscope {name}: {error.name} is not installed; {remedy}", file=sys.stderr)
        return 1
