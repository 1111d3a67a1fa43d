"""Captures, or parts of them, that are lost or refused: each is counted; of each reason the log tells one a minute."""

from __future__ import annotations

import time
from collections.abc import Callable

import structlog

from allocscope.daemon.observed import Observed

log = structlog.get_logger()

TOLD_EVERY_S = 60.0
LONGEST_NAME = 80


class CaptureLosses:
    """Told by whoever loses something; any thread may."""

    def __init__(self, observed: Observed, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` in seconds, monotonic."""
        self._observed, self._clock = observed, clock
        self._told_s: dict[str, float] = {}

    def add(self, reason: str, capture: str, why: str) -> None:
        """`reason` is a word for the counter, `why` tells people what happened and what to do."""
        self._observed.dropped.add(1, "captures", reason)
        now_s = self._clock()
        if now_s - self._told_s.get(reason, -TOLD_EVERY_S) >= TOLD_EVERY_S:
            self._told_s[reason] = now_s
            name = capture[:LONGEST_NAME]  # a file's, whatever a job made of it
            log.warning("capture lost", capture=name if name.isprintable() else ascii(name), reason=reason, why=why)
