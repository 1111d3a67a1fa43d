"""What goes into storage and what comes out, beside the words of `allocscope.model`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from allocscope.model import (
    AllocatorRef,
    BlockMap,
    Cause,
    Device,
    DeviceReading,
    Event,
    Forecast,
    Process,
    SampleChunk,
)

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Dropped:
    """What a node lost before it could be sent."""

    what: str
    reason: str
    """A fixed word."""
    count: int


@dataclass(frozen=True, slots=True)
class NodeBatch:
    """One batch of one daemon, as it was received."""

    node: str
    daemon_id: str
    sequence: int
    """The daemon's numbering, from 1."""
    closed_us: int
    """By the daemon's clock."""
    received_us: int
    """By the receiver's clock."""
    processes: tuple[Process, ...] = ()
    """Those that the rest names."""
    chunks: tuple[SampleChunk, ...] = ()
    block_maps: tuple[tuple[AllocatorRef, BlockMap], ...] = ()
    events: tuple[Event, ...] = ()
    readings: tuple[DeviceReading, ...] = ()
    unused_before: int = 0
    """So many numbers directly before this one do not come, or come late: nothing is missing there."""
    dropped: tuple[Dropped, ...] = ()
    """Told, not stored."""
    late: bool = False
    """Newer ones were sent before: it says nothing of how things are now."""


@dataclass(frozen=True, slots=True)
class Stored:
    """What a store call added."""

    samples: int
    block_maps: int
    events: int
    duplicates: int
    """Samples, maps and events that were there already."""


@dataclass(frozen=True, slots=True)
class Page(Generic[Item]):
    """A part of a list."""

    items: tuple[Item, ...]
    next_cursor: str | None
    """Asks for what follows; None: nothing does by now."""


@dataclass(frozen=True, slots=True)
class NodeRecord:
    """A node, as its daemon introduced itself."""

    node: str
    daemon_id: str
    version: str
    metrics_address: str | None
    """Where Prometheus finds the daemon's /metrics, "host:port"; None: nowhere."""
    first_received_us: int
    last_received_us: int
    """By the receiver's clock: its hello or its last batch."""


@dataclass(frozen=True, slots=True)
class ReadingRecord:
    """A device's latest reading, and so the device as its node knows it."""

    node: str
    reading: DeviceReading
    received_us: int

    @property
    def device(self) -> Device:
        """The device, with its node's ordinal."""
        return self.reading.device


@dataclass(frozen=True, slots=True)
class JobRecord:
    """A job: all processes of one name, those of former runs too. Its id is its name."""

    job: str
    process_count: int
    nodes: tuple[str, ...]
    """By name."""
    first_received_us: int
    last_received_us: int


@dataclass(frozen=True, slots=True)
class ProcessRecord:
    """A process as it last described itself."""

    process: Process
    node: str
    first_received_us: int
    last_received_us: int
    stopped_us: int | None
    """When it said that it stops, by its own clock; None: it never did."""


@dataclass(frozen=True, slots=True)
class EventRecord:
    """An event, and when it came."""

    event: Event
    received_us: int


@dataclass(frozen=True, slots=True)
class Point:
    """What is known of one bucket of a series: at least one value is."""

    time_us: int
    """The bucket's start: a multiple of the step."""
    count: int
    """Samples that know the figure."""
    minimum: int
    maximum: int
    mean: float
    last: int
    """Of the sample that was numbered (a bill's: taken) last."""


@dataclass(frozen=True, slots=True)
class ForecastRecord:
    """An allocator's forecast, and when it was made by the receiver's clock."""

    allocator: AllocatorRef
    forecast: Forecast
    made_us: int


@dataclass(frozen=True, slots=True)
class AlertRecord:
    """One alert from its beginning to its end; the same condition later is another alert."""

    alert_id: str
    """Unique for ever: whoever raises it makes it, so that saving twice changes nothing."""
    name: str
    severity: str
    state: str
    """"pending", "firing" or "resolved"."""
    at_us: int
    """When it began, by the clock of the samples that it speaks of."""
    updated_us: int
    """When it last changed, by the receiver's clock."""
    cause: Cause | None = None
    job: str | None = None
    """None: it is not about a job."""
    resolved_us: int | None = None
    """None: it stands."""
    labels: Mapping[str, str] = field(default_factory=dict)
    summary: str = ""
    description: str = ""
    advice: str | None = None
    """What would help, from a replay of the job's own requests; None: nothing is known of that."""


@dataclass(frozen=True, slots=True)
class Counts:
    """How many are kept by now."""

    nodes: int
    devices: int
    jobs: int
    processes: int
    samples: int
    block_maps: int
    events: int
    alerts: int


@dataclass(frozen=True, slots=True)
class Pruned:
    """What a prune took away."""

    samples: int
    block_maps: int
    bills: int
