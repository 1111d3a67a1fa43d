"""Where a process comes from, as /proc tells: which process began the run, and whether a rank was inherited.

A process that a rank starts has its RANK, too; it must not pass for it. /proc tells an environment as it was when a program began,
and only of this user's processes: what cannot be read is another's, and so not of this run. Nothing here raises.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path, PurePath

PROC = Path("/proc")
MOST_ANCESTORS = 64
OPTIONS_WITH_VALUE = ("-W", "-X", "--check-hash-based-pycs")
"""Of Python's command line."""
MULTIPROCESSING = ("--multiprocessing-fork", "from multiprocessing.forkserver")
"""What stands in the command line of a child of multiprocessing, instead of a program."""


class Ancestor:
    """One process of the line, this one first; read when asked."""

    def __init__(self, pid: int, proc: Path = PROC) -> None:
        self.pid, self._proc = pid, proc

    @cached_property
    def parent(self) -> Ancestor | None:
        """The process that started it, or that took it over."""
        fields = self._read("stat").rpartition(b")")[2].split()
        pid = int(fields[1]) if len(fields) > 1 and fields[1].isdigit() else 0
        return Ancestor(pid, self._proc) if pid > 0 else None

    @cached_property
    def environ(self) -> Mapping[str, str]:
        """As it was when its program began; empty where it cannot be read."""
        pairs = (pair.partition(b"=") for pair in self._read("environ").split(b"\0"))
        return {name.decode(errors="replace"): value.decode(errors="replace") for name, _, value in pairs}

    @cached_property
    def arguments(self) -> tuple[str, ...]:
        """Its command line; empty where it cannot be read."""
        return tuple(each.decode(errors="replace") for each in self._read("cmdline").rstrip(b"\0").split(b"\0"))

    @property
    def has_torch(self) -> bool:
        """Whether torch is loaded in it."""
        return b"/libtorch" in self._read("maps")

    @property
    def program(self) -> str | None:
        """The script or module that it runs, where it is a Python that runs one."""
        if not PurePath(self.arguments[0]).name.startswith("python"):
            return None
        return _program_of(self.arguments[1:])

    @property
    def is_multiprocessing(self) -> bool:
        """Whether it is a child that multiprocessing made of its parent."""
        return any(mark in argument for argument in self.arguments for mark in MULTIPROCESSING)

    def line(self) -> Iterator[Ancestor]:
        """Its ancestors, the nearest first."""
        ancestor = self.parent
        for _ in range(MOST_ANCESTORS):
            if ancestor is None:
                return
            yield ancestor
            ancestor = ancestor.parent

    def _read(self, name: str) -> bytes:
        try:
            return (self._proc / str(self.pid) / name).read_bytes()
        except OSError:
            return b""


def _program_of(arguments: tuple[str, ...]) -> str | None:
    """What a Python with these arguments runs."""
    rest = iter(arguments)
    for argument in rest:
        if argument in OPTIONS_WITH_VALUE:
            next(rest, None)
        elif argument == "-m":
            return next(rest, None)
        elif argument.startswith("-"):
            if argument.lstrip("-").startswith("c"):
                return None
        else:
            return PurePath(argument).name
    return None


def root_of(pid: int, variable: str | None, proc: Path = PROC) -> Ancestor:
    """The process that stands for the whole run on this host.

    Where a launcher set `variable`: the launcher, past shells and the like that handed it down. Else the first process of the
    same program: the one that spawned its ranks by multiprocessing, or ran its own script again for each (Lightning).
    """
    own = Ancestor(pid, proc)
    if variable is not None and variable in own.environ:
        return _launcher(own, variable)
    return _first_of_program(own)


def _launcher(own: Ancestor, variable: str) -> Ancestor:
    last = own
    for ancestor in own.line():
        if ancestor.environ.get(variable) != own.environ[variable]:
            return ancestor
        last = ancestor
    return last


def _first_of_program(own: Ancestor) -> Ancestor:
    first = own
    for ancestor in own.line():
        if not (first.is_multiprocessing or (first.program is not None and ancestor.program == first.program)):
            break
        first = ancestor
    return first


def is_inherited(pid: int, variable: str, value: str, proc: Path = PROC) -> bool:
    """Whether `variable` came down from a process that has torch loaded, which is then the one that was meant by it.

    A shell or a tool in between has none. A value that the process set itself since it began is its own.
    """
    own = Ancestor(pid, proc)
    if own.environ.get(variable) != value:
        return False
    for ancestor in own.line():
        if ancestor.environ.get(variable) != value:
            return False
        if ancestor.has_torch:
            return True
    return False
