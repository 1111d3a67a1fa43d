"""Who this process is: its job, its rank, its program.

The job is what the launcher named (`allocscope.probe.launchers`), else the process that began the run (`allocscope.probe.ancestry`).

The rank is what the caller of `probe.start` says; else torch.distributed's, unless its world is only a part of the launcher's; else
the launcher's. It is no two processes' at once: one that inherited RANK from a rank that started it is of the same job, but has no
rank, and of several on a node that call themselves the same one only the first has it (`allocscope.probe.rank_claim`). A rank that
is not known yet is looked for as long as the process lives.
"""

from __future__ import annotations

import os
import socket
import sys
import uuid
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any, NamedTuple

from allocscope.model.identity import Process
from allocscope.probe.ancestry import Ancestor, is_inherited, root_of
from allocscope.probe.launchers import Place, is_possible, launcher_of, natural, place_of, run_name
from allocscope.probe.rank_claim import RankClaim
from allocscope.probe.texts import printable
from allocscope.probe.torch_world import world_of_torch

__all__ = ["Place", "Standing", "Who", "program"]

LOOKED_AT = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
"""What programs set in their own environment after they began."""


class Standing(NamedTuple):
    """What may be learnt late of a process: fields of `Process`."""

    job: str
    rank: int | None = None
    world_size: int | None = None
    local_rank: int | None = None


class Who:
    """This process, as far as it is known by now. What its caller said wins over what is found."""

    def __init__(
        self,
        environ: Mapping[str, str],
        *,
        daemon: str,
        job: str | None = None,
        place: Place = Place(),  # noqa: B008 (frozen)
        modules: Mapping[str, Any] | None = None,
    ) -> None:
        self._environ, self._modules = environ, modules
        self._job, self._given = (job or environ.get("ALLOCSCOPE_JOB", "")).strip(), place
        self._claim = RankClaim(daemon)
        self._seen: object = None
        self._found = self.standing = Standing("")

    def process(self, started_us: int, torch_version: str | None = None, allocator_conf: str | None = None) -> Process:
        """All of it, under a new id."""
        self.look()
        return Process(
            process_id=uuid.UUID(bytes=os.urandom(16)).hex,
            pid=os.getpid(),
            host=printable(_host()),
            started_us=started_us,
            torch_version=torch_version,
            allocator_conf=allocator_conf,
            program=printable(program()),
            **self.standing._asdict(),
        )

    def look(self) -> bool:
        """Look again; whether anything new was learnt. Costs some microseconds where there is nothing new."""
        world = world_of_torch(self._modules)
        seen = (world, *map(self._environ.get, LOOKED_AT))
        if seen != self._seen:
            self._seen = seen
            self._learn(self._find(world))
        before, self.standing = self.standing, self._claimed(self._found)
        return before != self.standing

    def close(self) -> None:
        """Another one may have the rank."""
        self._claim.release()

    def _learn(self, found: Standing) -> None:
        """A group that is ended takes no rank away, and a job has another name only once its ranks know each other."""
        if found.rank is not None or not self._found.job:
            self._found = found
        elif self._found.rank is None:
            self._found = found._replace(job=self._found.job)

    def _find(self, world: Place | None) -> Standing:
        place = _given_first(self._given, self._place(world))
        return Standing(printable(self._job or self._run()), *place)

    def _place(self, world: Place | None) -> Place:
        """torch.distributed's where its world is at least the launcher's; else the launcher's, where that was meant for us."""
        told, launcher = place_of(self._environ), launcher_of(self._environ)
        if launcher is not None and is_inherited(os.getpid(), launcher.rank, self._environ.get(launcher.rank, "")):
            told = Place(world_size=told.world_size)
        if world is None or (world.world_size or 0) < (told.world_size or 0):
            return told
        return world._replace(local_rank=told.local_rank)

    def _run(self) -> str:
        name, launcher = program(), launcher_of(self._environ)
        called = run_name(self._environ, name, getattr(sys, "argv", ()))
        return called or _by_root(name, root_of(os.getpid(), launcher.rank if launcher else None))

    def _claimed(self, found: Standing) -> Standing:
        if found.rank is None or self._claim.take(found.job, found.rank):
            return found
        return found._replace(rank=None, local_rank=None)


def _given_first(given: Place, found: Place) -> Place:
    """A caller who lies is not believed."""
    place = Place(*(natural(told, otherwise) for told, otherwise in zip(given, found, strict=True)))
    return place if is_possible(place) else Place(local_rank=place.local_rank)


def _by_root(name: str, root: Ancestor) -> str:
    """MPICH's proxies, one a node, all know where the one `mpiexec` listens; any other root is a process of this host."""
    arguments = root.arguments
    if "--control-port" in arguments[:-1]:
        return f"{name}@{arguments[arguments.index('--control-port') + 1]}"
    return f"{name}@{_host()}:{root.pid}"


def program() -> str:
    """What is run, without its arguments: a script's name, or the module of `python -m`."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    name = getattr(spec, "name", None)
    if isinstance(name, str) and name and name != "__main__":
        return name.removesuffix(".__main__")
    first: object = sys.argv[0] if getattr(sys, "argv", None) else ""
    path = PurePath(first if isinstance(first, (str, os.PathLike)) else "")  # programs set what they like there
    if path.name == "__main__.py":
        path = path.parent
    return path.name if path.name not in ("", "-c", "-m", "-") else "python"


def _host() -> str:
    try:
        return socket.gethostname() or "unknown"
    except OSError:
        return "unknown"
