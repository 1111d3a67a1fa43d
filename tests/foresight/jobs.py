"""Made-up jobs: what they ask of an allocator, step by step, while something of them grows along a course.

Each is told the moment's level, 0 at first and 1 where a course that stops has come to its end; what that means is the job's own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from tests.foresight.machine import Machine

MIB = 1 << 20

Course = Callable[[float], float]
"""By the seconds since the start, the level."""


def line(stop_s: float, draw: Random) -> Course:
    """So much each second."""
    del draw
    return lambda t: t / stop_s


def stairs(stop_s: float, draw: Random) -> Course:
    """A few equal stages, one after the other."""
    stages = draw.randint(6, 12)
    return lambda t: math.floor(t / stop_s * stages + 1e-9) / stages


def bend(stop_s: float, draw: Random) -> Course:
    """Ever slower, as a cache that meets less and less that it does not know: at `stop_s` nineteen twentieths are behind it."""
    del draw
    return lambda t: (1 - math.exp(-3 * t / stop_s)) / (1 - math.exp(-3))


def root(stop_s: float, draw: Random) -> Course:
    """Slower, but without an end."""
    del draw
    return lambda t: math.sqrt(t / stop_s)


def bursts(stop_s: float, draw: Random) -> Course:
    """Now faster, now slower, now not at all."""
    pace = [draw.choice((0.0, 0.5, 1.0, 2.5)) for _ in range(40)]
    total = sum(pace[:20])
    reached = [sum(pace[:i]) / total for i in range(len(pace) + 1)]

    def level(t: float) -> float:
        place = t / stop_s * 20
        i = min(int(place), len(pace) - 1)
        return reached[i] + (reached[i + 1] - reached[i]) * (place - i)

    return level


COURSES: dict[str, Callable[[float, Random], Course]] = {
    "line": line,
    "stairs": stairs,
    "bend": bend,
    "root": root,
    "bursts": bursts,
}


@dataclass(frozen=True, slots=True)
class Size:
    """How large a job is."""

    step_s: float
    weights_bytes: int
    activations_bytes: int
    layers: int
    extra_bytes: int
    """What is added to it by the level 1."""

    @classmethod
    def drawn(cls, draw: Random) -> Size:
        """Any."""
        need = draw.uniform(1.0, 6.0) * 1024 * MIB
        weights = draw.uniform(0.25, 0.6) * need
        return cls(
            step_s=draw.choice((2.5, 5.0, 10.0, 10.0, 10.0, 20.0)),
            weights_bytes=int(weights),
            activations_bytes=int(need - weights),
            layers=draw.randint(5, 12),
            extra_bytes=int(draw.uniform(0.35, 1.5) * need),
        )


class Job:
    """A training job: weights and the optimizer's state stay, activations come and go with each step. By itself it does not grow.

    A subclass says what does.
    """

    causes: tuple[str, ...] = ()
    """Of the death that it grows into."""
    jitter: float = 0.0
    """How much lengths differ from step to step."""

    def __init__(self, machine: Machine, size: Size, course: Course, draw: Random) -> None:
        self.machine, self.size, self.course, self.draw = machine, size, course, draw
        self.shares = [draw.uniform(0.4, 1.6) for _ in range(size.layers)]
        self.level = 0.0
        self.kept: list[int] = []

    def run(self, end_s: float) -> None:
        """Until then, or an OutOfMemoryError."""
        self.begin()
        for step in range(int(end_s / self.size.step_s)):
            began_s = step * self.size.step_s
            self.level = self.course(began_s)
            self.step(step, began_s)

    def begin(self) -> None:
        """What is there from the first step on."""
        for share in (0.5, 0.25, 0.25):
            self.hold(share * self.size.weights_bytes)

    def hold(self, size_bytes: float) -> None:
        """Weights, in as many pieces as there are layers."""
        for share in self.shares:
            self.machine.malloc(size_bytes * share / sum(self.shares))

    def length(self, step: int) -> float:
        """Of the step's batch: activations are larger by that."""
        del step
        return self.draw.uniform(1 - self.jitter, 1 + self.jitter) if self.jitter else 1.0

    def step(self, step: int, began_s: float) -> None:
        """Forward and backward."""
        machine, length = self.machine, self.length(step)
        unit = self.size.activations_bytes * length / (sum(self.shares) + max(self.shares))
        pause_s = self.size.step_s / (2 * self.size.layers + 2)
        activations = []
        for i, share in enumerate(self.shares):
            machine.at(began_s + i * pause_s)
            workspace = machine.malloc(0.3 * share * unit)
            activations.append((machine.malloc(0.7 * share * unit), machine.malloc(0.3 * share * unit)))
            machine.free(workspace)
            self.between(i, share * unit)
        for i, (large, little) in enumerate(reversed(activations)):
            machine.at(began_s + (self.size.layers + 1 + i) * pause_s)
            gradient = machine.malloc(self.shares[-1 - i] * unit)
            machine.free(large)
            machine.free(little)
            machine.free(gradient)
        self.after(step)

    def between(self, layer: int, size_bytes: float) -> None:
        """Between two layers of the way forward."""

    def after(self, step: int) -> None:
        """When a step is done."""

    def keep_up(self, wanted_bytes: float, piece_bytes: float) -> None:
        """Have so much in pieces that stay; of what is too much the oldest go, as a cache's do."""
        while len(self.kept) * piece_bytes < wanted_bytes:
            self.kept.append(self.machine.malloc(piece_bytes))


class Lengths(Job):
    """What a step needs grows, as in a curriculum, or while batches warm up."""

    causes = ("growth", "capacity", "fragmentation")

    def length(self, step: int) -> float:
        """Longer and longer."""
        del step
        return 1.0 + self.level * self.size.extra_bytes / self.size.activations_bytes


class MixedLengths(Lengths):
    """The same with batches that differ from step to step."""

    def length(self, step: int) -> float:
        """Longer and longer, on average."""
        return super().length(step) * self.draw.uniform(0.75, 1.0)


class Cache(Job):
    """Something is kept, step by step; at its cap one goes for each that comes."""

    causes = ("leak", "growth")

    def after(self, step: int) -> None:
        """More of it."""
        piece = self.size.extra_bytes / 60
        self.keep_up(self.level * self.size.extra_bytes, piece)
        if self.kept:
            self.machine.free(self.kept.pop(self.draw.randrange(len(self.kept))))
            self.kept.append(self.machine.malloc(piece))


class Leak(Job):
    """Memory that nothing frees: as much each step."""

    causes = ("leak",)

    def after(self, step: int) -> None:
        """More of it."""
        self.keep_up(self.level * self.size.extra_bytes, self.size.extra_bytes / 100)


class Crumbs(Job):
    """The same in many small tensors."""

    causes = ("leak",)

    def after(self, step: int) -> None:
        """More of it."""
        self.keep_up(self.level * self.size.extra_bytes, 0.9 * MIB)


class Islands(Job):
    """What stays is born between activations, whose lengths differ, and so breaks up large segments."""

    causes = ("fragmentation", "growth", "capacity")
    jitter = 0.35

    def between(self, layer: int, size_bytes: float) -> None:
        """A little that stays."""
        wanted = self.level * self.size.extra_bytes / 4
        if layer % 3 == 1 and len(self.kept) * 4 * MIB < wanted:
            self.kept.append(self.machine.malloc(4 * MIB))


class Rebuilt(Job):
    """State that is made anew a little larger, again and again."""

    causes = ("growth", "capacity", "fragmentation")

    def begin(self) -> None:
        """The state's first form."""
        super().begin()
        self.kept = [self.machine.malloc(self._piece_bytes()) for _ in range(8)]

    def _piece_bytes(self) -> float:
        return (0.3 + self.level) * self.size.extra_bytes / 8

    def after(self, step: int) -> None:
        """Each piece is copied into a new one."""
        for i, old in enumerate(self.kept):
            self.kept[i] = self.machine.malloc(self._piece_bytes())
            self.machine.free(old)


class Server(Job):
    """Sequences that grow and end; more and more at a time."""

    causes = ("growth", "capacity", "fragmentation")
    AT_FIRST, STEPS = 12, 16

    def begin(self) -> None:
        """Its weights, and nobody yet."""
        super().begin()
        self.sequences: list[tuple[int, int, int]] = []
        """Address, length so far, length in the end."""

    def step(self, step: int, began_s: float) -> None:
        """Sixteen times: each sequence gets a little longer, or ends."""
        at_first = self.size.activations_bytes / self.AT_FIRST / 12
        more = self.size.extra_bytes / self.size.activations_bytes
        for turn in range(self.STEPS):
            self.machine.at(began_s + turn * self.size.step_s / self.STEPS)
            while len(self.sequences) < self.AT_FIRST * (1 + self.level * more):
                self.sequences.append((self.machine.malloc(at_first), 1, self.draw.randint(4, 20)))
            for i in range(turn % 4, len(self.sequences), 4):
                address, length, end = self.sequences[i]
                if length < end:
                    longer = self.machine.malloc(at_first * (length + 1))
                    self.machine.free(address)
                    self.sequences[i] = (longer, length + 1, end)
                else:
                    self.machine.free(address)
                    self.sequences[i] = (self.machine.malloc(at_first), 1, self.draw.randint(4, 20))


class Evaluations(Job):
    """Now and then a step that needs more, always as much."""

    causes = ("capacity", "growth", "fragmentation")

    def length(self, step: int) -> float:
        """Each sixth is an evaluation's."""
        return 1.0 + self.size.extra_bytes / self.size.activations_bytes if step % 6 == 5 else 1.0


class Mixed(Job):
    """Lengths drawn anew each step."""

    causes = ("fragmentation", "capacity", "growth")
    jitter = 0.3


class Tidy(Mixed):
    """The same, with an empty_cache after each step: what it gives back, others may take."""

    def after(self, step: int) -> None:
        """Gives its cache back."""
        self.machine.empty_cache()


class Checkpoints(Job):
    """Now and then a copy of the weights."""

    causes = ("capacity", "growth", "fragmentation")

    def after(self, step: int) -> None:
        """Each ninth step."""
        if step % 9 == 8:
            copies = [self.machine.malloc(self.size.weights_bytes / 16) for _ in range(8)]
            for copy in copies:
                self.machine.free(copy)
