"""Who this process is: its job, its rank, its program, from what launchers leave in the environment.

The environment is other people's: what is garbled or cannot be is unknown, and nothing here raises.
"""

from __future__ import annotations

import os
import re
import socket
import sys
import uuid
from collections.abc import Mapping
from pathlib import PurePath
from typing import NamedTuple

from allocscope.model.identity import Process

LONGEST_NAME = 200
"""A job's name is a label in every metric."""
LARGEST_RANK = 2**31 - 1


class Place(NamedTuple):
    """Where a process stands among the ranks of its job."""

    rank: int | None = None
    world_size: int | None = None
    local_rank: int | None = None


_RANK_VARIABLES = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK"),  # torchrun, and all that imitate it
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
)


def identify(
    environ: Mapping[str, str],
    *,
    started_us: int,
    job: str | None = None,
    place: Place = Place(),  # noqa: B008 (frozen)
    torch_version: str | None = None,
    allocator_conf: str | None = None,
) -> Process:
    """This process; what the caller knows wins over what the environment says."""
    found = place_of(environ)
    name = program()
    host = _host()
    world_size = _natural(place.world_size, found.world_size)
    rank = _natural(place.rank, found.rank)
    if rank is not None and world_size is not None and rank >= world_size:
        rank = world_size = None
    return Process(
        process_id=uuid.UUID(bytes=os.urandom(16)).hex,
        job=(job or job_of(environ, name, host, os.getpid(), os.getppid()))[:LONGEST_NAME],
        pid=os.getpid(),
        host=host,
        started_us=started_us,
        rank=rank,
        world_size=world_size,
        local_rank=_natural(place.local_rank, found.local_rank),
        torch_version=torch_version,
        allocator_conf=allocator_conf,
        program=name,
    )


def place_of(environ: Mapping[str, str]) -> Place:
    """Rank, world size and local rank as the innermost launcher gave them; never mixed from two of them."""
    for names in _RANK_VARIABLES:
        if names[0] in environ:
            rank, world_size, local_rank = (_number(environ.get(name)) for name in names)
            if rank is not None and world_size is not None and rank >= world_size:
                return Place()
            return Place(rank, world_size, local_rank)
    return Place()


def job_of(environ: Mapping[str, str], program: str, host: str, pid: int, parent_pid: int) -> str:
    """The job's name: the same for all ranks of one run, another one for the next run."""
    given = environ.get("ALLOCSCOPE_JOB", "").strip()
    return (
        given
        or _of_slurm(environ)
        or _of_torchrun(environ, program, host, parent_pid)
        or _of_others(environ, program)
        or f"{program}@{host}:{pid}"
    )


def _of_slurm(environ: Mapping[str, str]) -> str | None:
    number, name = environ.get("SLURM_JOB_ID", "").strip(), environ.get("SLURM_JOB_NAME", "").strip()
    return f"{name or 'slurm'}-{number}" if number else None


def _of_torchrun(environ: Mapping[str, str], program: str, host: str, parent_pid: int) -> str | None:
    run = environ.get("TORCHELASTIC_RUN_ID", "").strip()
    if not run:
        return None
    if run == "none":  # torchrun's default, the same for everybody
        address, port = environ.get("MASTER_ADDR", ""), environ.get("MASTER_PORT", "")
        if _number(environ.get("GROUP_WORLD_SIZE")) not in (None, 1) and address and port:
            return f"{program}@{address}:{port}"
        return f"{program}@{host}:{parent_pid}"
    if re.fullmatch(r"[0-9a-f]{8}-?([0-9a-f]{4}-?){3}[0-9a-f]{12}", run):  # drawn by torchrun --standalone
        return f"{program}-{run[:8]}"
    return run


def _of_others(environ: Mapping[str, str], program: str) -> str | None:
    """Open MPI (PMIx), Ray, Kubernetes."""
    if space := environ.get("PMIX_NAMESPACE", "").strip():
        return f"{program}-{space}"
    if number := environ.get("RAY_JOB_ID", "").strip():
        return f"ray-{number}"
    if environ.get("KUBERNETES_SERVICE_HOST"):
        return environ.get("JOB_NAME", "").strip() or environ.get("HOSTNAME", "").strip() or None
    return None


def program() -> str:
    """What is run, without its arguments: a script's name, or the module of `python -m`."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    name = getattr(spec, "name", None)
    if isinstance(name, str) and name and name != "__main__":
        return name.removesuffix(".__main__")
    path = PurePath(sys.argv[0] if getattr(sys, "argv", None) else "")
    if path.name == "__main__.py":
        path = path.parent
    return path.name if path.name not in ("", "-c", "-m", "-") else "python"


def _host() -> str:
    try:
        return socket.gethostname() or "unknown"
    except OSError:
        return "unknown"


def _number(text: str | None) -> int | None:
    """A count or rank; None for what is none."""
    if text is None or not re.fullmatch(r"\s*[0-9]{1,10}\s*", text):
        return None
    return _natural(int(text))


def _natural(*values: object) -> int | None:
    """The first that is a count or rank."""
    return next((v for v in values if type(v) is int and 0 <= v <= LARGEST_RANK), None)
