"""Captures as they are kept: who ordered them, what came of it, and snapshots in pieces. `tests/storage` holds every backend to this.

- **Exactly once.** A capture is known by its id. The first snapshot that is kept stays, whatever comes under its id later, also after
  it was dropped; what was ordered, sent or failed is replaced by what comes.
- **Whole or not at all.** Each piece is on its disk when `add` returns, and the capture there for readers when `keep` returns; before
  that nobody sees any of it. An upload that ends in the middle, by kill -9 too, leaves pieces that `prune` takes away.
- **Bounded.** `keep` and `prune` drop the oldest snapshots until the others are within the limit. The rows stay, and say so.
- **In pieces.** No call has more than one piece in memory, and none holds up others for longer than a few pieces take to write.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from allocscope.model import Capture, CaptureOrder, CaptureReason, Process
from allocscope.storage.records import Page


class CaptureState(Enum):
    """What has become of a capture."""

    ORDERED = "ordered"
    """Its node was not told of it yet."""
    SENT = "sent"
    """Its node was told, and has not answered."""
    KEPT = "kept"
    """Its snapshot is here."""
    FAILED = "failed"
    """There is no snapshot; `problem` says why."""
    DROPPED = "dropped"
    """Its snapshot was here, and went to make room or for its age; `problem` says which."""


OPEN = (CaptureState.ORDERED, CaptureState.SENT)
"""Something is still to come."""


@dataclass(frozen=True, slots=True)
class CaptureRecord:
    """One capture, from its order on; one that nobody ordered (of an OutOfMemoryError) from its arrival on."""

    capture_id: str
    process_id: str
    job: str
    node: str
    reason: CaptureReason
    state: CaptureState
    rank: int | None = None
    device_uuid: str | None = None
    """None: all devices of the process."""
    tensors: bool = False
    """Ordered: whether to tell who holds the live tensors. Kept: whether it does."""
    history_us: int | None = None
    """Ordered: how long to record the history for it; None: not at all."""
    most_history_entries: int | None = None
    """Ordered: at most so many of them."""
    ordered_us: int | None = None
    """By the receiver's clock; None: nobody ordered it. So are the next, and `received_us`."""
    sent_us: int | None = None
    """When the node was last told."""
    time_us: int | None = None
    """When it was taken, by the process's clock; None: it was not yet."""
    received_us: int | None = None
    snapshot_bytes: int | None = None
    """Of the pickle."""
    history_entries: int | None = None
    """In the snapshot."""
    stored_bytes: int | None = None
    """What its pieces take; None: there are none."""
    problem: str | None = None
    """Why there is no snapshot, or what it lacks."""

    @property
    def order(self) -> CaptureOrder:
        """What the probe is to do."""
        return CaptureOrder(
            self.capture_id,
            self.device_uuid,
            self.history_us,
            self.most_history_entries,
            self.tensors,
            self.reason,
        )


@dataclass(frozen=True, slots=True)
class OrderLimits:
    """How many orders of one reason may be open at a time; more are refused."""

    of_process: int
    of_job: int
    of_fleet: int
    not_since_us: int | None = None
    """An allocator that one of this reason was ordered of since then gets no further one; None: that is no matter."""


@dataclass(frozen=True, slots=True)
class CaptureArrival:
    """A capture as its node brings it."""

    capture: Capture
    process: Process
    node: str
    received_us: int
    upload: int | None = None
    """Whose pieces are its snapshot; None: it has none, and `capture.problem` says why."""
    piece_count: int = 0
    stored_bytes: int = 0
    """Of the pieces together."""


@dataclass(frozen=True, slots=True)
class Dropped:
    """How many snapshots went."""

    for_age: int = 0
    for_room: int = 0


@dataclass(frozen=True, slots=True)
class Kept:
    """What came of an arrival."""

    is_new: bool
    """False: it was kept before, and stays as it was."""
    dropped: Dropped = Dropped()
    """What made room for it."""


@dataclass(frozen=True, slots=True)
class CaptureTotals:
    """What the snapshots that are kept come to."""

    captures: int
    stored_bytes: int


class CaptureStore(Protocol):
    """Where captures are kept (see the module's promises, and those of `Repository`)."""

    # orders

    def order(self, records: Sequence[CaptureRecord], limits: OrderLimits) -> None:
        """Keep these orders, all of one reason: all of them, or none. Ids that are there stay as they are.

        TooManyOrders: more would be open than the limits allow. OrderedLately: see `OrderLimits.not_since_us`.
        """
        ...

    def open_orders(self, *, limit: int = 1000) -> tuple[CaptureRecord, ...]:
        """Those that nobody has answered yet, the oldest first."""
        ...

    def sent(self, capture_ids: Sequence[str], *, sent_us: int) -> None:
        """Their nodes were told of them."""
        ...

    def fail(self, problems: Mapping[str, str]) -> int:
        """Give up open orders, by id: why. What was answered meanwhile stays; how many were given up."""
        ...

    # what nodes bring

    def begin(self, capture_id: str, *, received_us: int) -> int:
        """The number of a new upload."""
        ...

    def add(self, upload: int, number: int, piece: bytes, *, received_us: int) -> None:
        """One piece of a gzip stream, numbered from 0. UploadLost: there is no such upload any more."""
        ...

    def discard(self, upload: int) -> None:
        """Take an upload's pieces away; what is kept stays."""
        ...

    def keep(self, arrival: CaptureArrival, *, limit_bytes: int) -> Kept:
        """From here on it is there: its process too, where nobody described that; then as many of the oldest other snapshots are dropped
        as it takes for all to be within the limit. UploadLost: its pieces are not all there, so that it must be sent again.
        """
        ...

    # questions

    def find(self, capture_id: str) -> CaptureRecord | None:
        """One capture."""
        ...

    def page(
        self,
        *,
        job: str | None = None,
        process_id: str | None = None,
        state: CaptureState | None = None,
        cursor: str | None = None,
        limit: int = 100,
    ) -> Page[CaptureRecord]:
        """Captures, the one that came last first."""
        ...

    def piece(self, capture_id: str, number: int) -> bytes | None:
        """One piece of a snapshot; None: there is none of that number, or the snapshot is not here (any more)."""
        ...

    def totals(self) -> CaptureTotals:
        """What the kept ones come to."""
        ...

    # the storage itself

    def prune(self, *, before_us: int, limit_bytes: int, abandoned_before_us: int) -> Dropped:
        """Drop snapshots that were received before then, and the oldest beyond the limit; take away pieces that nobody completes:
        those of uploads that nothing was added to since `abandoned_before_us`. In small transactions.
        """
        ...
