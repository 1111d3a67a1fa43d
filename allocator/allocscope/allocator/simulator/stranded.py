"""How much is stranded while requests are served, at most."""

from __future__ import annotations

from allocscope.allocator.simulator.simulator import Simulator

LEAST_APART = 16
"""Requests from one look to the next; with more free blocks than that it is as many requests as there are blocks."""


class StrandedPeak:
    """The most that was free in holes that cannot be given back; private pools' free bytes are not in it.

    To the byte where segments are not expandable and no private pool was used: then a counter tells it. Otherwise it is the most of
    what it was at the looks, so that between two of them it may have been more.
    """

    __slots__ = ("_left", "_simulator", "bytes")

    def __init__(self, simulator: Simulator) -> None:
        self._simulator = simulator
        self._left = 0
        self.bytes = 0

    def begin(self) -> None:
        """What was before does not count."""
        self.bytes = self._left = 0

    def served(self) -> None:
        """One request more; now and then that is a look."""
        self._left -= 1
        if self._left < 0:
            self.look()

    def look(self) -> None:
        """How much it is now."""
        simulator = self._simulator
        self._left = LEAST_APART
        if simulator.counts_stranded:
            self.bytes = max(self.bytes, simulator.split_bytes_peak)
            return
        free = list(simulator.free_blocks())
        self.bytes = max(self.bytes, sum(map(simulator.kept_bytes, free)))
        self._left = max(len(free), LEAST_APART)
