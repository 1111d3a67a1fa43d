"""How much of the daemon's time somebody may take: it comes back at a rate, and who took more must wait. Pure, but for its clock."""

from __future__ import annotations

import time
from collections.abc import Callable


class Allowance:
    """Of one connection, or of one user."""

    def __init__(self, ratio: float, most_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`ratio` seconds come back each second, until there are `most_s`, as at the beginning."""
        self._ratio, self._most_s, self._clock = ratio, most_s, clock
        self._left_s, self._at_s = most_s, clock()

    def spend(self, seconds: float) -> float:
        """So much was taken; for how long, in seconds, nothing more may be. 0: there is some left."""
        now_s = self._clock()
        self._left_s = min(self._left_s + (now_s - self._at_s) * self._ratio, self._most_s) - seconds
        self._at_s = now_s
        return max(-self._left_s / self._ratio, 0.0)
