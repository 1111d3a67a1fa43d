"""The least room in which all requests are served, found by trying."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from allocscope.allocator.advice.attempt import Attempt
from allocscope.allocator.settings import ROUND_LARGE_BYTES
from allocscope.allocator.simulator.history import Outcome

PRECISION = 1 / 100
"""Of the room that is sought in."""
_STEP_UP = 1.05
_HIGHEST = 3.0
"""How many times the room that there was is tried at most."""

Tried = Callable[[Sequence[Attempt]], Iterable[Outcome]]
"""Makes attempts; fewer outcomes than attempts: there is no time left."""


@dataclass(slots=True)
class _Search:
    """Between what failed and what served."""

    attempt: Attempt
    failed_bytes: int
    served_bytes: int | None
    next_bytes: int
    highest_bytes: int
    step: float = _STEP_UP

    def learn(self, served: bool) -> None:
        """What the next one came to."""
        if served:
            self.served_bytes = self.next_bytes
        else:
            self.failed_bytes = self.next_bytes
        if self.served_bytes is None:
            self.next_bytes = min(int(self.next_bytes * self.step), self.highest_bytes)
            self.step *= self.step
        else:
            self.next_bytes = (self.failed_bytes + self.served_bytes) // 2

    def is_done(self, precision_bytes: int) -> bool:
        """Whether there is nothing more to learn."""
        if self.served_bytes is None:
            return self.failed_bytes >= self.highest_bytes
        return self.served_bytes - self.failed_bytes <= precision_bytes


def needed_bytes(
    starts: Sequence[tuple[Attempt, int]],
    tried: Tried,
    *,
    room_bytes: int,
    live_bytes: int,
    near_bytes: Callable[[int], int] | None = None,
) -> dict[Attempt, int]:
    """By attempt, the least bytes that the allocator must be let reserve, to a hundredth of `room_bytes`.

    Each is first made with the bytes beside it, then with less while that serves and with more while it does not, up to three times
    the room. It is not given for those that need more than that, or more than the best by more than `near_bytes` says of what the
    best needs. What fails in some room may be served in less: found is the border that lies nearest. Raises nothing of its own.
    """
    precision, highest = max(int(PRECISION * room_bytes), ROUND_LARGE_BYTES), int(_HIGHEST * room_bytes)
    searches = [
        _Search(replace(attempt, room_bytes=None), live_bytes - 1, None, start, highest) for attempt, start in starts
    ]
    pending = searches
    while pending:
        made = 0
        for search, outcome in zip(
            pending, tried([replace(each.attempt, room_bytes=each.next_bytes) for each in pending]), strict=False
        ):
            search.learn(outcome.failed_at is None)
            made += 1
        if made < len(pending):
            break
        best = min((each.served_bytes for each in searches if each.served_bytes is not None), default=None)
        pending = [
            each
            for each in pending
            if not each.is_done(precision)
            and (best is None or near_bytes is None or each.failed_bytes < best + near_bytes(best))
        ]
    return {
        each.attempt: each.served_bytes
        for each in searches
        if each.served_bytes is not None and each.is_done(precision)
    }
