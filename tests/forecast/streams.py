"""Made-up jobs as a probe would see them: live memory that swings with each step, and what one wants to happen beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

from allocscope.alerts.forecast import Outlook
from allocscope.model import Cause, Forecast, Sample, State

MIB = 1 << 20
GIB = 1 << 30
S = 1_000_000
START_US = 1_800_000_000 * S
TOTAL = 80 * GIB
STEP_S = 10
"""A step's live memory rises from its trough to its peak and falls back within ten seconds."""

Figure = Callable[[int], int]
"""Of the second since the start."""


def always(value: int) -> Figure:
    """The same at any time."""
    return lambda _: value


def rising(first: int, per_s: float, *, since_s: int = 0, until_s: int = 10**9) -> Figure:
    """From a moment on, until another, more by so much each second."""
    return lambda t: first + round(per_s * min(max(t - since_s, 0), until_s - since_s))


_LIVE, _LITTLE, _HELD, _NONE, _BLOCKS = (always(n) for n in (20 * GIB, GIB, 60 * GIB, 0, 1000))


@dataclass(frozen=True)
class Job:
    """A job by its figures, each of the second."""

    trough: Figure = _LIVE
    swing: Figure = _LIVE
    """What a step needs on top."""
    stranded: Figure = _LITTLE
    blocks: Figure = _BLOCKS
    """Live blocks at the trough."""
    others: Figure = _LITTLE
    reserves: Figure = _HELD
    """What it holds of the device, where there is room for so much."""
    retries: Figure = _NONE
    total: int = TOTAL

    def samples(self, seconds: int, first_s: int = 1) -> Iterator[Sample]:
        """One a second."""
        peak = 0
        for t in range(1, seconds + 1):
            top = self.trough(t) + self.swing(t)
            peak = max(peak, top)
            if t < first_s:
                continue
            live = self.trough(t) + self.swing(t) * (t % STEP_S) // STEP_S
            reserved = min(max(self.reserves(t), live + self.stranded(t)), self.total - self.others(t))
            yield Sample(
                sequence=t,
                time_us=START_US + t * S,
                allocated_bytes=live,
                active_bytes=live,
                reserved_bytes=reserved,
                inactive_split_bytes=self.stranded(t),
                inactive_split_count=37,
                allocated_peak_bytes=peak,
                allocation_count=self.blocks(t) + t % STEP_S,
                allocations_total=100 * t,
                num_alloc_retries=self.retries(t),
                num_device_alloc=100 + self.retries(t),
                num_device_free=self.retries(t),
                device_total_bytes=self.total,
                device_free_bytes=self.total - self.others(t) - reserved,
            )


def outlook(**given: int | str | None) -> Outlook:
    """One that knows nothing beforehand but what is given."""
    return Outlook(**{"device_total_bytes": None, "allowed_bytes": None, "allocator_conf": "", **given})  # type: ignore[arg-type]


def foretell(samples: Iterable[Sample], into: Outlook | None = None) -> list[tuple[int, Forecast]]:
    """What is foreseen after each sample, by the second."""
    told, into = [], into or outlook()
    for sample in samples:
        into.observe(sample)
        told.append(((sample.time_us - START_US) // S, into.forecast(sample.time_us)))
    return told


def criticals(told: list[tuple[int, Forecast]]) -> list[tuple[int, Cause | None]]:
    """When it was critical, and why."""
    return [(t, forecast.cause) for t, forecast in told if forecast.state is State.CRITICAL]


def worst(told: list[tuple[int, Forecast]]) -> State:
    """The gravest state."""
    return max((forecast.state for _, forecast in told), key=lambda state: state.level)


def entered(told: list[tuple[int, Forecast]], state: State) -> int:
    """How often that state began."""
    states = [State.OK, *(forecast.state for _, forecast in told)]
    return sum(before is not state and now is state for before, now in pairwise(states))
