"""The Repository: what every backend promises. `tests/storage` holds each of them to it.

- **Exactly once.** `store` may be given the same thing any number of times, in batches cut differently, by several collectors at once.
  A sample or block map is known by (process_id, device_uuid, sequence), an event by (process_id, sequence); the first one stays.
- **Whole or not at all.** When `store` returns, all its batches survive the end of this process (kill -9 too); when it raises, or the
  process ends in it, none of them is there. What a power loss may cost, the backend says.
  `StorageBusy`, `StorageFull` and `StorageBroken` may pass; `Unstorable` will not: find the batch that it is about, and leave it out.
- **As it came.** What was not known comes back as None (a missing column of a chunk), zero as zero; figures up to 2^63-1.
- **Two clocks, never mixed.** `time_us` is the sender's, `received_us`, `made_us`, `updated_us` and the times of `prune` and
  `register_node` are the receiver's, and come in as arguments: no backend reads a clock.
- **Pages.** A list has an order that does not change; items that come while somebody pages neither repeat nor hide others.
  A `limit` is at least 1; callers bound it.
- **Threads.** Every method may be called from any thread. Calls are blocking.

What names a process that nobody described is kept all the same; it appears once somebody does.
Captures and advice have promises of their own (`captures`, `advice`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from allocscope.model import AllocatorRef, BlockMap, EventKind, Forecast, Line, SampleChunk, State
from allocscope.storage.advice import AdviceClaim, AdviceRecord, AdviceStore
from allocscope.storage.captures import (
    OPEN,
    CaptureArrival,
    CaptureRecord,
    CaptureState,
    CaptureStore,
    CaptureTotals,
    Dropped,
    Kept,
    OrderLimits,
)
from allocscope.storage.errors import (
    BadCursor,
    BadUrl,
    CannotOpen,
    ForeignDatabase,
    NodeNameTaken,
    NotADatabase,
    OrderedLately,
    SchemaTooNew,
    StorageBroken,
    StorageBusy,
    StorageError,
    StorageFull,
    TooManyOrders,
    UnknownMetric,
    Unstorable,
    Unwritable,
    UploadLost,
)
from allocscope.storage.records import (
    AlertRecord,
    Counts,
    EventRecord,
    ForecastRecord,
    JobRecord,
    NodeBatch,
    NodeRecord,
    Page,
    Point,
    ProcessRecord,
    Pruned,
    ReadingRecord,
    Stored,
)

__all__ = [
    "OPEN",
    "AdviceClaim",
    "AdviceRecord",
    "AdviceStore",
    "AlertRecord",
    "BadCursor",
    "BadUrl",
    "CannotOpen",
    "CaptureArrival",
    "CaptureRecord",
    "CaptureState",
    "CaptureStore",
    "CaptureTotals",
    "Counts",
    "Dropped",
    "EventRecord",
    "ForecastRecord",
    "ForeignDatabase",
    "JobRecord",
    "Kept",
    "NodeBatch",
    "NodeNameTaken",
    "NodeRecord",
    "NotADatabase",
    "OrderLimits",
    "OrderedLately",
    "Page",
    "Point",
    "ProcessRecord",
    "Pruned",
    "ReadingRecord",
    "Repository",
    "SchemaTooNew",
    "StorageBroken",
    "StorageBusy",
    "StorageError",
    "StorageFull",
    "Stored",
    "TooManyOrders",
    "UnknownMetric",
    "Unstorable",
    "Unwritable",
    "UploadLost",
]


class Repository(Protocol):
    """Where everything is kept (see the module's promises)."""

    @property
    def captures(self) -> CaptureStore:
        """Where captures are kept."""
        ...

    @property
    def advice(self) -> AdviceStore:
        """Where advice is kept."""
        ...

    # what daemons bring

    def store(self, batches: Sequence[NodeBatch]) -> Stored:
        """Keep all of these in one transaction. A daemon's batches are given in the order of their numbers."""
        ...

    def acknowledged(self, node: str, daemon_id: str) -> int:
        """The highest number of a stored batch of that daemon; 0: none yet."""
        ...

    def register_node(
        self,
        node: str,
        daemon_id: str,
        *,
        version: str,
        metrics_address: str | None,
        received_us: int,
        silent_before_us: int,
    ) -> None:
        """A daemon said hello. Another daemon of that node name that was heard since `silent_before_us` keeps it: NodeNameTaken."""
        ...

    # who is who

    def nodes(self, *, cursor: str | None = None, limit: int = 100) -> Page[NodeRecord]:
        """All nodes, by name."""
        ...

    def devices(self, *, node: str | None = None, cursor: str | None = None, limit: int = 100) -> Page[ReadingRecord]:
        """All devices, or a node's, in the order in which they were first read: each with its latest reading."""
        ...

    def device(self, device_uuid: str) -> ReadingRecord | None:
        """One device with its latest reading."""
        ...

    def jobs(self, *, cursor: str | None = None, limit: int = 100) -> Page[JobRecord]:
        """All jobs, the one that came last first."""
        ...

    def job(self, job: str) -> JobRecord | None:
        """One job, by its id, which is its name."""
        ...

    def processes(
        self, *, job: str | None = None, node: str | None = None, cursor: str | None = None, limit: int = 100
    ) -> Page[ProcessRecord]:
        """All processes, or those of a job, a node, the one that came last first."""
        ...

    def process(self, process_id: str) -> ProcessRecord | None:
        """One process."""
        ...

    def allocators(
        self,
        *,
        job: str | None = None,
        process_id: str | None = None,
        received_since_us: int | None = None,
        cursor: str | None = None,
        limit: int = 100,
    ) -> Page[AllocatorRef]:
        """Allocators of described processes, the one that came last first; `received_since_us`: of processes heard since then."""
        ...

    # what was measured

    def samples(
        self,
        allocator: AllocatorRef,
        *,
        from_us: int | None = None,
        to_us: int | None = None,
        after_sequence: int = 0,
        limit: int = 10_000,
    ) -> tuple[SampleChunk, ...]:
        """The first `limit` samples with from_us ≤ time_us < to_us that are numbered beyond `after_sequence`, by number.

        One chunk for each run of samples that know the same figures. To read on, pass the last sequence.
        """
        ...

    def series(
        self, allocator: AllocatorRef, metric: str | Line, *, from_us: int, to_us: int, step_us: int
    ) -> tuple[Point, ...]:
        """A figure in buckets of `step_us`, those with a known value only, by time.

        `metric` is a sample's column (`allocscope.model.COLUMNS`) or a line of the bill; a device's own lines
        (other_processes, driver, free) are those of AllocatorRef("", device_uuid). A bucket holds what has
        bucket ≤ time_us < bucket + step_us of from_us ≤ time_us < to_us. UnknownMetric: there is no such column.
        """
        ...

    def block_maps(
        self,
        allocator: AllocatorRef,
        *,
        from_us: int | None = None,
        to_us: int | None = None,
        after_sequence: int = 0,
        limit: int = 100,
    ) -> tuple[BlockMap, ...]:
        """Block maps, as `samples`."""
        ...

    def latest_block_map(self, allocator: AllocatorRef) -> BlockMap | None:
        """The one that is numbered last."""
        ...

    def events(
        self,
        *,
        job: str | None = None,
        process_id: str | None = None,
        kind: EventKind | None = None,
        cursor: str | None = None,
        limit: int = 100,
    ) -> Page[EventRecord]:
        """Events, the one that came last first."""
        ...

    # what was judged

    def save_forecasts(self, forecasts: Sequence[tuple[AllocatorRef, Forecast]], *, made_us: int) -> None:
        """Each becomes its allocator's latest, and is kept for long where its state or cause is another than the latest one's."""
        ...

    def forecasts(
        self,
        *,
        job: str | None = None,
        allocator: AllocatorRef | None = None,
        at_least: State = State.OK,
        cursor: str | None = None,
        limit: int = 100,
    ) -> Page[ForecastRecord]:
        """The latest forecast of each allocator, the allocator that came last first."""
        ...

    def forecast_changes(
        self, allocator: AllocatorRef, *, cursor: str | None = None, limit: int = 100
    ) -> Page[ForecastRecord]:
        """The forecasts by which an allocator's state or cause changed, its first one included, the latest first."""
        ...

    def save_alerts(self, alerts: Sequence[AlertRecord]) -> None:
        """Each replaces the alert of its id, unless that one is of a later `updated_us`."""
        ...

    def alerts(
        self,
        *,
        job: str | None = None,
        state: str | None = None,
        standing: bool | None = None,
        cursor: str | None = None,
        limit: int = 100,
    ) -> Page[AlertRecord]:
        """Alerts, the one that came last first; `standing`: pending or firing ones (True), resolved ones (False)."""
        ...

    # the storage itself

    def counts(self) -> Counts:
        """How many of each are kept; reads through the tables."""
        ...

    def prune(self, *, before_us: int) -> Pruned:
        """Take away samples, block maps and bills received before then; everything else stays. In small transactions."""
        ...

    def close(self) -> None:
        """Give everything back; no method may be called after it. A second call does nothing."""
        ...
