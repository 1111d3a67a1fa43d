"""Attempts made as long as there is time, and what they came to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from allocscope.allocator.advice.attempt import Attempt, Replay
from allocscope.allocator.advice.case import Case
from allocscope.allocator.advice.choice import best_of, burden, near_bytes, serves
from allocscope.allocator.advice.hazards import blocked_by
from allocscope.allocator.advice.room import needed_bytes
from allocscope.allocator.simulator.history import Outcome
from allocscope.model import Trial

_FEW = 4
"""Of how many that serve, the simplest, the room that they need is measured at first."""
_TIGHT = 0.95
"""From which share of the room on that is too much to leave it there."""


@dataclass(slots=True)
class Trials:
    """All that was tried of a case."""

    case: Case
    replay: Replay
    time_left: Callable[[], bool]
    made: dict[Attempt, Trial] = field(default_factory=dict)
    """In order; the settings in force first."""
    untried: list[Attempt] = field(default_factory=list)
    """What there was no time for."""
    own: Outcome | None = None
    """Of the settings in force."""
    is_cut: bool = False
    """Whether there was no time for all that would have been tried and measured."""

    def make(self, attempts: Sequence[Attempt]) -> None:
        """Those that were not made yet."""
        fresh = [each for each in attempts if each not in self.made]
        for attempt, outcome in zip(fresh, self._outcomes(fresh), strict=False):
            self.made[attempt] = self._trial(attempt, outcome)
            self.own = self.own or outcome
        self.untried += [each for each in fresh if each not in self.made]

    def best(self, attempts: Iterable[Attempt]) -> Trial | None:
        """The one to take, once the room that the simplest few need is measured, and that of all if these leave little."""
        room = self.case.room_bytes
        serving = sorted(
            (each for each in attempts if each in self.made and serves(self.made[each])),
            key=lambda each: burden(self.made[each]),
        )
        self.measure(serving[:_FEW], room)
        best = best_of((self.made[each] for each in serving[:_FEW]), room)
        if room is not None and (best is None or best.needed_bytes is None or best.needed_bytes > _TIGHT * room):
            self.measure(serving[_FEW:], room)
            best = best_of((self.made[each] for each in serving), room)
        return best

    def measure(self, attempts: Iterable[Attempt], room_bytes: int | None = None) -> None:
        """The room that they need; with `room_bytes`, of those that are near-equal to the best in that much."""
        starts = [(each, self._start(self.made[each])) for each in attempts]
        if not starts:
            return
        found = needed_bytes(
            starts,
            self._outcomes,
            room_bytes=self.case.room_bytes or max(start for _, start in starts),
            live_bytes=self.case.demand.live_peak_bytes,
            near_bytes=None if room_bytes is None else partial(near_bytes, room_bytes),
        )
        for attempt, needed in found.items():
            self.made[attempt] = replace(self.made[attempt], needed_bytes=needed)

    def _start(self, trial: Trial) -> int:
        """Where the search for it begins: at what sufficed, or at what did not."""
        room = self.case.room_bytes
        if room is None:
            return trial.reserved_peak_bytes
        return room if trial.failed_at is not None else min(room, trial.reserved_peak_bytes)

    def _outcomes(self, attempts: Sequence[Attempt]) -> Iterator[Outcome]:
        """As many as there is time for."""
        if not attempts:
            return
        outcomes = iter(self.replay(attempts))
        for _ in attempts:
            if not self.time_left():
                self.is_cut = True
                return
            yield next(outcomes)

    def _trial(self, attempt: Attempt, outcome: Outcome) -> Trial:
        case = self.case
        blocked = None
        if attempt.conf != case.conf:
            blocked = blocked_by(attempt.conf, case.circumstances, case.release, has_limit=case.has_limit)
        return Trial(
            conf=attempt.conf,
            change=attempt.change,
            failed_at=outcome.failed_at,
            failed_us=outcome.failed_us,
            reserved_peak_bytes=outcome.reserved_peak_bytes,
            stranded_peak_bytes=outcome.stranded_peak_bytes,
            allocated_peak_bytes=outcome.allocated_peak_bytes,
            num_alloc_retries=outcome.num_alloc_retries,
            num_device_alloc=outcome.num_device_alloc,
            num_device_free=outcome.num_device_free,
            blocked=blocked or outcome.undefined,
        )
