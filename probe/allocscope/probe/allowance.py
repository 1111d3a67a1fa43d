"""So many at once, and one more every so often: what may cost something, bounded over any length of time. Told the time."""

from __future__ import annotations


class Allowance:
    """`most` at once; each is made up for in `every_s`."""

    def __init__(self, most: int, every_s: float) -> None:
        self._most, self._every_s = most, every_s
        self._left, self._at_s = float(most), 0.0

    def take(self, now_s: float) -> bool:
        """Whether there is one more."""
        since_s = max(now_s - self._at_s, 0.0)
        self._left, self._at_s = min(self._left + since_s / self._every_s, self._most), now_s
        if self._left < 1:
            return False
        self._left -= 1
        return True

    def give_back(self) -> None:
        """One that was taken came to nothing."""
        self._left = min(self._left + 1, self._most)
