"""Made-up runs that nobody looked at while the rules were thought out: what grows, how it goes on, and whether it stops in time.

Each kind of run is made as often as is wanted, on devices, with lengths of steps, sizes and moments drawn from the seed that its name
ends with; the same name is the same run. Of one and the same job there are two runs: in one it stops growing at some part of the
room, in the other it does not.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from random import Random

from allocscope.allocator.errors import OutOfMemoryError
from allocscope.allocator.player import Player
from allocscope.allocator.recording import Recording
from tests.foresight import jobs
from tests.foresight.machine import OUTSIDE_BYTES, START_US, Machine
from tests.foresight.runs import FORESEEABLE_US, SEED, Run

STOPS, GOES_ON = "stops", "goes_on"
ENDLESS_BYTES = 1 << 42
AFTERWARDS_S = 350.0
"""So long a run is seen after it stopped growing …"""
AT_MOST_S = 1_500.0
"""… and so long one that does not."""
FULL = ((0.7, 0.8), (0.8, 0.9), (0.9, 0.98))
LARGER = 1.04
"""A device on which what stops dies of holes is made so much larger, until it suffices."""
BENDING = ("bend", "root")
"""What goes on along these would take for ever: its device is smaller."""
ROOM_TO_SPARE = 0.95
"""What needs less of the room, with the request that failed, died of holes, too."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A job, and the course along which it, or its neighbour, grows."""

    job: type[jobs.Job]
    course: str = ""
    """Empty: nothing grows."""
    by_neighbour: bool = False

    @property
    def name(self) -> str:
        what = "neighbour" if self.by_neighbour else self.job.__name__.lower()
        return f"{what}-{self.course}" if self.course else what


_COURSES_OF: dict[type[jobs.Job], tuple[str, ...]] = {
    jobs.Lengths: ("line", "stairs", "bend", "root", "bursts"),
    jobs.MixedLengths: ("line", "bend", "bursts"),
    jobs.Cache: ("line", "bend", "root", "bursts"),
    jobs.Leak: ("line", "stairs"),
    jobs.Crumbs: ("line", "bend"),
    jobs.Islands: ("line", "bend"),
    jobs.Rebuilt: ("line", "stairs", "bend"),
    jobs.Server: ("line", "root", "bend", "bursts"),
}
GROWING = (
    *(Kind(job, course) for job, courses in _COURSES_OF.items() for course in courses),
    *(Kind(jobs.Tidy, course, by_neighbour=True) for course in ("line", "stairs", "bend", "bursts")),
)
LEVEL = tuple(Kind(job) for job in (jobs.Evaluations, jobs.Mixed, jobs.Checkpoints, jobs.Job, jobs.Server))
"""These do not grow; they are as full as the others are in the end."""
HELD_OUT = frozenset(kind.name for kind in GROWING[1::2])
"""Families that no rule was chosen by."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """A run, before it is made."""

    kind: Kind
    fate: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.kind.name}-{self.fate}-{self.seed}"

    def stops_between(self, low: float, high: float) -> bool:
        """Whether it grows until it needs some such part of the room."""
        _, _, full, _ = _drawn(Random(f"{self.kind.name} {self.seed}"))
        return self.fate == STOPS and bool(self.kind.course) and low <= full < high

    @property
    def is_held_out(self) -> bool:
        """Whether no rule was chosen by it: neither by its family nor by its seed."""
        return self.kind.name in HELD_OUT or self.seed % 2 == 1


def wanted(seeds: Iterable[int]) -> Iterator[Wanted]:
    """Each kind, with each seed."""
    for seed in seeds:
        for kind in GROWING:
            yield Wanted(kind, STOPS, seed)
            yield Wanted(kind, GOES_ON, seed)
        for kind in LEVEL:
            yield Wanted(kind, STOPS, seed)


def made(runs: list[Wanted]) -> list[Run]:
    """All of them, in their order."""
    with ProcessPoolExecutor() as pool:
        return [pickle.loads(run) for run in pool.map(_made, runs)]


def _made(run: Wanted) -> bytes:
    return pickle.dumps(make(run))


def make(run: Wanted) -> Run:
    """One of them."""
    draw = Random(f"{run.kind.name} {run.seed}")
    size, stop_s, full, seed = _drawn(draw)
    grows = bool(run.kind.course)
    course = jobs.COURSES[run.kind.course](stop_s, draw) if grows else _level

    def until_full(elapsed_s: float) -> float:
        return min(course(elapsed_s), 1.0)

    followed: jobs.Course = until_full
    end_s = stop_s + AFTERWARDS_S
    suffices = _needed(run.kind, size, 1.0, seed)
    while _run(run.kind, size, until_full, end_s, seed, suffices).died:
        suffices *= LARGER
    room = suffices / full
    if run.fate == GOES_ON:
        if run.kind.course in BENDING:
            at_first = _needed(run.kind, size, 0.0, seed)
            room = at_first + draw.uniform(0.7, 0.95) * (suffices - at_first)
        end_s, followed = AT_MOST_S, course
    machine = _run(run.kind, size, followed, end_s, seed, room)
    return _seen(run, machine.recording(run.name, end_s), stop_s)


def _drawn(draw: Random) -> tuple[jobs.Size, float, float, float]:
    """The same for both fates: its size, when it stops, what part of the room it needs then, and its own seed."""
    size, stop_s = jobs.Size.drawn(draw), draw.uniform(250.0, 700.0)
    return size, stop_s, draw.uniform(FULL[0][0], FULL[-1][1]), draw.random()


def _level(_: float) -> float:
    return 0.0


def _needed(kind: Kind, size: jobs.Size, level: float, seed: float) -> float:
    """The most that it and its neighbour have together at a level, where there is more than enough."""
    machine = _run(kind, size, lambda _: level, 12 * size.step_s, seed, ENDLESS_BYTES)
    return machine.allocated_peak_bytes + (round(level * size.extra_bytes) if kind.by_neighbour else 0)


def _run(kind: Kind, size: jobs.Size, course: jobs.Course, end_s: float, seed: float, room: float) -> Machine:
    def neighbour(elapsed_s: float) -> int:
        return round(course(elapsed_s // 10 * 10) * size.extra_bytes) if kind.by_neighbour else 0

    machine = Machine(OUTSIDE_BYTES + int(room), neighbour)
    own: jobs.Course = _level if kind.by_neighbour else course
    with suppress(OutOfMemoryError):
        kind.job(machine, size, own, Random(seed)).run(end_s)
    return machine


def _seen(run: Wanted, recording: Recording, stop_s: float) -> Run:
    last = recording.trace[-1]
    died = last.action == "oom"
    elapsed_us = last.time_us - START_US
    grew = bool(run.kind.course) and (run.fate == GOES_ON or elapsed_us < stop_s * 1e6)
    return Run(
        name=run.name,
        family=run.kind.name,
        conf=recording.conf,
        device_total_bytes=recording.device_total_bytes,
        seen=tuple(Player(recording, SEED)),
        oom_us=last.time_us if died else None,
        foreseeable=died and grew and elapsed_us >= FORESEEABLE_US,
        healthy=not died and run.fate == STOPS,
        causes=_causes(run.kind, recording) if died else (),
    )


def _causes(kind: Kind, recording: Recording) -> tuple[str, ...]:
    told = ("neighbour",) if kind.by_neighbour else kind.job.causes
    live = 0
    for entry in recording.trace:
        live += {"alloc": entry.size, "free_requested": -entry.size}.get(entry.action, 0)
    last = recording.trace[-1]
    room = recording.device_total_bytes - recording.other_used_at(last.time_us)
    return told if live + last.size > ROOM_TO_SPARE * room else tuple(dict.fromkeys((*told, "fragmentation")))
