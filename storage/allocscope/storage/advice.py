"""Advice as it is kept, and who is at work on it. `tests/storage` holds every backend to this.

- **Found in the database.** What there is to do are the captures that are kept, have a history and no advice yet: nothing is lost with
  a collector that ends, however it does.
- **One at a time.** A capture is claimed before anybody works on it, for as long as the claim is renewed; of several collectors one gets it.
- **Never for ever.** A claim says how many there were before it; whoever gets it decides when that is enough. A capture that was
  settled is never claimed again, also after its advice has been pruned.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from allocscope.model import Advice
from allocscope.storage.captures import CaptureRecord
from allocscope.storage.records import Page


@dataclass(frozen=True, slots=True)
class AdviceRecord:
    """What a replay of a capture's history says of one device."""

    capture_id: str
    process_id: str
    device_uuid: str
    job: str
    rank: int | None
    node: str
    made_us: int
    """By the receiver's clock."""
    advice: Advice


@dataclass(frozen=True, slots=True)
class AdviceClaim:
    """A capture that nobody else works on."""

    capture: CaptureRecord
    tries: int
    """How often it was claimed, this time included."""


class AdviceStore(Protocol):
    """Where advice is kept (see the module's promises, and those of `Repository`)."""

    def claim(self, by: str, *, now_us: int, until_us: int, received_since_us: int) -> AdviceClaim | None:
        """A capture to work on until then: of each job the newest that waits, and of those the one that came first; None: none waits.

        `by`: who works, another at each start. `received_since_us`: older captures are nobody's business any more.
        """
        ...

    def renew(self, capture_id: str, by: str, *, until_us: int) -> bool:
        """Work on; False: it is somebody else's by now."""
        ...

    def release(self, capture_id: str, by: str) -> None:
        """Give a claim back as if it had never been made."""
        ...

    def settle(self, capture_id: str, by: str, records: Sequence[AdviceRecord]) -> bool:
        """Keep what came of a claim, all of it or nothing; False: it is somebody else's by now, and nothing was kept."""
        ...

    def waiting(self, *, now_us: int, received_since_us: int) -> int:
        """How many captures wait."""
        ...

    def unsettled(self, job: str, *, received_since_us: int, limit: int = 100) -> tuple[CaptureRecord, ...]:
        """A job's captures that wait, or that somebody works on, the newest first."""
        ...

    def page(
        self,
        *,
        job: str | None = None,
        rank: int | None = None,
        device_uuid: str | None = None,
        process_id: str | None = None,
        capture_id: str | None = None,
        cursor: str | None = None,
        limit: int = 100,
    ) -> Page[AdviceRecord]:
        """Advice, the one that came last first."""
        ...

    def prune(self, *, before_us: int) -> int:
        """Take away advice that was made before then, and claims of snapshots that are gone; how much advice."""
        ...
