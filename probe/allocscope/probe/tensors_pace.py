"""How long a report may take, how often it lets the job run, and what it had to leave out."""

from __future__ import annotations

import time
from collections.abc import Callable

WORK_S = 0.001
"""Between two rests."""
GIVE_WAY_S = 0.001
"""A wait for something that the job does."""


class Pace:
    """Asked between two slices of work. What is left out is told, once each."""

    def __init__(
        self,
        limit_s: float,
        rest_s: float = 0.0,
        seconds: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.limit_s = limit_s
        self.can_wait = rest_s > 0
        """Whether the job goes on meanwhile, so that waiting for it makes sense."""
        self._rest_s, self._seconds, self._sleep = rest_s, seconds, sleep
        self._began_s = self._rested_s = seconds()
        self._until_s = self._began_s + limit_s
        self._is_ended = False
        self.complete = True
        self._left_out: dict[str, None] = {}

    @property
    def left_out(self) -> tuple[str, ...]:
        return tuple(self._left_out)

    @property
    def took_us(self) -> int:
        return round((self._seconds() - self._began_s) * 1e6)

    def until(self, part: float) -> None:
        """The next part of the work may last until that part of the whole time is over."""
        self._until_s = self._began_s + part * self.limit_s

    def end(self) -> None:
        """No time is left any more, for nothing. Any thread may say so."""
        self._is_ended = True

    def is_over(self) -> bool:
        """Whether this part's time is up. Rests first, where that is due."""
        now_s = self._seconds()
        if self._rest_s and now_s - self._rested_s >= WORK_S and not self._is_ended:
            self._sleep(self._rest_s)
            now_s = self._rested_s = self._seconds()
        return self._is_ended or now_s > self._until_s

    def wait(self) -> bool:
        """Let the job run a little; False where that is no use, or no time is left for it."""
        if not self.can_wait or self._is_ended or self._seconds() > self._until_s:
            return False
        self._sleep(GIVE_WAY_S)
        self._rested_s = self._seconds()
        return True

    def leave_out(self, what: str, *, complete: bool = False) -> None:
        """Say that something is missing; `complete`: all the same everything was looked at."""
        self._left_out[what] = None
        self.complete = self.complete and complete
