"""Recorded runs of which only the end is known, as of a ring of entries that wrapped: explained from there on, and estimated."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

from allocscope.allocator.simulator.what_if import Source, what_if

CUTS = 3


@dataclass(frozen=True, slots=True)
class Cut:
    """What is known of a run from some entry on."""

    name: str
    entries: int
    explained: int
    peak_ratio: float
    """What is reserved at most in a replay that asks anew for what was there, to what really was."""
    ends_alike: bool
    """Whether a request fails in it where one did, and none where none did."""
    fails_alike: bool
    """Whether it is the same request as well."""

    @property
    def exact(self) -> bool:
        """Whether every entry from there on is explained."""
        return self.explained == self.entries


def cuts_of(name: str, source: Source) -> Iterator[Cut]:
    """At places drawn from the run's name."""
    draw = random.Random(name)
    for _ in range(CUTS):
        at = int(len(source.trace) * draw.uniform(0.05, 0.95))
        found = what_if(replace(source, trace=source.trace[at:]), [])
        history, outcome = found.history, found.outcomes[0][1]
        died = history.failed_at is not None and not history.asked[history.failed_at].survived
        yield Cut(
            name=name,
            entries=history.entries,
            explained=history.explained,
            peak_ratio=outcome.reserved_peak_bytes / found.recorded_peak_bytes,
            ends_alike=(outcome.failed_at is not None) == died,
            fails_alike=outcome.failed_at == (history.failed_at if died else None),
        )
