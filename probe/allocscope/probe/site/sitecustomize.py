"""What `allocscope run` puts in front of a Python job: starts the probe when torch is imported, then gives way.

Python imports a module of this name at its start, the first on the path. A job's own one, which this hides, is run after it.
In a Python without allocscope it says so once on stderr, since the user asked for the probe, and the job runs without.
Every Python process of a job pays for this, so it imports next to nothing.
"""

import os
import sys
from importlib.machinery import ModuleSpec, PathFinder

HERE = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 (pathlib is not loaded at a Python's start)
WARNED = "ALLOCSCOPE_RUN_WARNED"
"""Inherited by child processes, so that a job of many of them says it once."""


class StartWithTorch:
    """An import finder that finds nothing, and starts the probe at the first import of torch."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        """Called for each import that is not answered from sys.modules."""
        if name == "torch":
            sys.meta_path.remove(StartWithTorch)
            start_probe()


def start_probe() -> None:
    """Start it, or say why not."""
    try:
        from allocscope import probe
    except Exception as error:  # noqa: BLE001 (never into the job)
        if not os.environ.get(WARNED):
            os.environ[WARNED] = "1"
            sys.stderr.write(f"allocscope: {sys.executable} runs without the probe ({error})\n")
        return
    probe.start()


def is_disabled() -> bool:
    """As `allocscope.probe` has it."""
    return os.environ.get("ALLOCSCOPE_DISABLE", "").strip().lower() not in ("", "0", "false", "no")


def own_spec() -> ModuleSpec | None:
    """The job's own sitecustomize; the job's path is as it would be without this one."""
    sys.path[:] = [folder for folder in sys.path if os.path.abspath(folder) != HERE]  # noqa: PTH100
    return PathFinder.find_spec("sitecustomize", sys.path)


if not is_disabled():
    sys.meta_path.insert(0, StartWithTorch)
_own = own_spec()
if _own is not None and _own.loader is not None:
    from importlib.util import module_from_spec

    sys.modules["sitecustomize"] = _module = module_from_spec(_own)
    _own.loader.exec_module(_module)
