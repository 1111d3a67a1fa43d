"""What this node lost of samples, block maps and events: counted, logged, and told to the collector with the next batch."""

from __future__ import annotations

from dataclasses import asdict

import structlog

from allocscope.daemon.intake import Intake
from allocscope.daemon.observed import Observed
from allocscope.daemon.spool_frames import Counts

log = structlog.get_logger()


class Losses:
    """Told by whoever loses something."""

    def __init__(self, observed: Observed, intake: Intake) -> None:
        self._observed, self._intake = observed, intake

    def add(self, reason: str, counts: Counts, *, batches: int = 0) -> None:
        """`reason` is a fixed word; `batches`: how many of them are lost whole, or of unknown content."""
        told = {what: count for what, count in {"batches": batches, **asdict(counts)}.items() if count}
        log.warning("lost", reason=reason, **told)
        for what, count in told.items():
            self.count(reason, what, count)

    def count(self, reason: str, what: str, count: int) -> None:
        """The same, of one kind of thing, and not logged."""
        self._observed.dropped.add(count, what, reason)
        self._intake.add_dropped(what, reason, count)
