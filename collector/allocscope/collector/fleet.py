"""What is known of the fleet at this moment, and what follows from each batch: alerts that begin and end. Pure, told the time.

An allocator's forecast and alerts go by its samples' times; whether a node or a process is there goes by the collector's clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain

from allocscope.alerts.forecast import Outlook
from allocscope.alerts.rules import Condition, Subject, dropping_alert, node_alerts
from allocscope.alerts.states import Alert, advance
from allocscope.alerts.watch import Watch
from allocscope.model import (
    AllocatorRef,
    BlockMap,
    Device,
    DeviceReading,
    Event,
    EventKind,
    Forecast,
    Process,
    Sample,
)
from allocscope.storage.records import NodeBatch, ReadingRecord

DIED_AFTER_US = 15_000_000
"""An OOM that nothing follows for so long was the end: a program that caught it goes on within seconds."""
NODE_FORGOTTEN_AFTER_US = 24 * 3600 * 1_000_000
"""A node that is silent for so long was taken away."""
JUDGE_WHEN_BEHIND_US = 5_000_000
"""Of an allocator's time, where batches wait and are only folded in between."""
ENDED_REMEMBERED = 10_000
"""Ended processes whose data, sent again after a break, must not bring them back."""


Told = Sample | BlockMap | Event
"""What an allocator is told of."""


@dataclass(frozen=True, slots=True)
class Change:
    """An alert that began to fire, or resolved."""

    alert: Alert
    allocator: AllocatorRef | None = None
    """None: it is not about one."""
    reason: str = ""
    """Why it resolved, where it is not that its condition ceased."""


@dataclass(slots=True)
class Watched:
    """One allocator that is followed."""

    ref: AllocatorRef
    process: Process
    node: str
    watch: Watch
    sample: Sample | None = None
    """The latest."""
    largest_free_block_bytes: int | None = None
    """Of the latest block map."""
    sequence: int = 0
    """The latest thing's."""
    heard_us: int = 0
    """When something came, by the collector's clock."""
    judged_us: int = 0
    """The latest forecast's time."""
    died: str | None = None
    """An OOM that nothing has followed yet."""

    @property
    def time_us(self) -> int:
        """The newest sample's time, by the process's clock."""
        return self.sample.time_us if self.sample else 0


@dataclass(slots=True)
class _Ledger:
    """Alerts of a node, or of what was lost on the way: they go by the collector's clock."""

    alerts: tuple[Alert, ...] = ()
    conditions: list[Condition] = field(default_factory=list)
    """What happened since the last tick."""


class Fleet:
    """Everything that is followed. Used by one thread; `watched` and `devices` may be read by others."""

    def __init__(self, *, retire_after_us: int) -> None:
        self.watched: dict[AllocatorRef, Watched] = {}
        self.devices: dict[str, ReadingRecord] = {}
        """By UUID: its latest reading."""
        self._on_device: dict[str, dict[AllocatorRef, Watched]] = {}
        self.heard_before: dict[str, int] = {}
        """Nodes that were there before this process, and when they were heard."""
        self.folded = 0
        """Samples that were not judged though it was time, because others waited."""
        self._retire_after_us = retire_after_us
        self._ended: dict[str, int] = {}
        """By process: the last number of those that ended."""
        self._ledgers: dict[Subject, _Ledger] = {}
        self._sequences: dict[tuple[str, str], int] = {}
        self._forecasts: dict[AllocatorRef, list[Forecast]] = {}

    # what comes

    def take(self, batch: NodeBatch, *, behind: bool = False) -> list[Change]:
        """A batch that was stored. `behind`: others wait, so judge less often."""
        self._count(batch)
        processes = {process.process_id: process for process in batch.processes}
        for reading in batch.readings:
            self.devices[reading.device.uuid] = ReadingRecord(batch.node, reading, batch.received_us)
        changes: list[Change] = []
        for ref, items in _by_allocator(batch, self.watched):
            process = processes.get(ref.process_id)
            if process is None or items[-1].sequence <= self._ended.get(ref.process_id, 0):
                continue
            watched = self.watched.get(ref) or self.watch(ref, process, batch.node)
            watched.heard_us = batch.received_us
            changes += self.tell(watched, items, behind=behind)
        for reading in batch.readings:
            for watched in self._on_device.get(reading.device.uuid, {}).values():
                watched.watch.device(reading)
        for event in batch.events:
            changes += self._process_event(event, batch)
        return changes

    def watch(self, ref: AllocatorRef, process: Process, node: str) -> Watched:
        """Begin to follow an allocator."""
        known = self.devices.get(ref.device_uuid)
        reading = known.reading if known else None
        own = next((device for device in process.devices if device.uuid == ref.device_uuid), None)
        subject = Subject(
            node=node,
            job=process.job,
            rank=process.rank,
            gpu=reading.device.index if reading else None,
            uuid=ref.device_uuid,
            pid=process.pid if process.rank is None else None,
        )
        outlook = Outlook(
            device_total_bytes=_total_bytes(own, reading),
            allowed_bytes=own.allowed_bytes if own else None,
            allocator_conf=process.allocator_conf,
        )
        if reading:
            outlook.observe_device(reading)
        watched = self.watched[ref] = Watched(ref, process, node, Watch(subject, outlook))
        self._on_device.setdefault(ref.device_uuid, {})[ref] = watched
        return watched

    def end(self, process_id: str, last_sequence: int) -> None:
        """A process is over: what it sent so far, if it comes again, changes nothing."""
        self._ended.pop(process_id, None)
        self._ended[process_id] = last_sequence
        while len(self._ended) > ENDED_REMEMBERED:
            del self._ended[next(iter(self._ended))]

    def refused(self, node: str, count: int, reason: str) -> None:
        """Something that a node sent could not be stored."""
        self._lost(Subject(node=node), count, "samples, maps or events", f"refused: {reason}")

    def _lost(self, subject: Subject, count: int | None, what: str, why: str) -> None:
        self._ledgers.setdefault(subject, _Ledger()).conditions.append(dropping_alert(subject, count, what, why))

    def _count(self, batch: NodeBatch) -> None:
        """Numbers that are missing were dropped there, or were never used: a daemon passes over those it is not sure of."""
        key = (batch.node, batch.daemon_id)
        last = self._sequences.get(key)
        if last is not None and batch.sequence > last + 1:
            first, latest = last + 1, batch.sequence - 1
            missing = f"number {first} is" if first == latest else f"numbers {first} to {latest} are"
            why = f"{missing} missing; its daemon's log says what was lost"
            self._lost(Subject(node=batch.node), None, "batches", why)
        self._sequences[key] = max(last or 0, batch.sequence)

    def remember(self, watched: Watched, items: Iterable[Told]) -> None:
        """What an allocator was told, and judged by, before this process."""
        for item in items:
            watched.sequence = item.sequence
            if isinstance(item, Sample):
                watched.sample = item
                watched.watch.fold(item)
            elif isinstance(item, BlockMap):
                watched.largest_free_block_bytes = _largest_free_block(item)
                watched.watch.block_map(item)

    def tell(self, watched: Watched, items: Iterable[Told], *, behind: bool = False) -> list[Change]:
        """What happened to an allocator, in the order of its numbers; what was told before changes nothing."""
        changes: list[Change] = []
        watch = watched.watch
        for item in items:
            if item.sequence <= watched.sequence:
                continue
            watched.sequence = item.sequence
            if isinstance(item, Sample):
                watched.sample, watched.died = item, None
                if behind and 0 <= item.time_us - watched.judged_us < JUDGE_WHEN_BEHIND_US:
                    watch.fold(item)
                    self.folded += 1
                    continue
                alerts = watch.sample(item)
                self._judged(watched)
            elif isinstance(item, BlockMap):
                watched.largest_free_block_bytes = _largest_free_block(item)
                alerts = watch.block_map(item)
            else:
                if item.kind is EventKind.OOM:
                    watched.died = "its process ran out of memory and sent nothing more"
                alerts = watch.event(item)
            changes += (Change(alert, watched.ref) for alert in alerts)
        return changes

    def _judged(self, watched: Watched) -> None:
        forecast = watched.watch.forecast
        if forecast is None or forecast.time_us == watched.judged_us:
            return
        watched.judged_us = forecast.time_us
        kept = self._forecasts.setdefault(watched.ref, [])
        if kept and (kept[-1].state, kept[-1].cause) == (forecast.state, forecast.cause):
            kept[-1] = forecast
        else:
            kept.append(forecast)

    def forecasts(self) -> list[tuple[AllocatorRef, Forecast]]:
        """Since the last call: of each allocator each forecast that changed its state or cause, and the latest."""
        taken, self._forecasts = self._forecasts, {}
        return [(ref, forecast) for ref, kept in taken.items() for forecast in kept]

    def _process_event(self, event: Event, batch: NodeBatch) -> list[Change]:
        process = next((p for p in batch.processes if p.process_id == event.process_id), None)
        if process is None or event.sequence <= self._ended.get(event.process_id, 0):
            return []
        if event.kind is EventKind.DROPPED:
            subject = Subject(node=batch.node, job=process.job, rank=process.rank)
            self._lost(
                subject, event.dropped_count, "samples, maps or events", event.message or "the probe's buffer was full"
            )
        if event.kind is not EventKind.STOPPED:
            return []
        self.end(event.process_id, event.sequence)
        gone = [watched for watched in self.watched.values() if watched.ref.process_id == event.process_id]
        return [change for watched in gone for change in self._retire(watched, "its process stopped")]

    # what time brings

    def tick(self, now_us: int, last_seen_us: dict[str, int]) -> list[Change]:
        """About once a second: who is silent, whose alerts are over. `last_seen_us`: when each node was heard."""
        changes = self._retire_silent(now_us)
        for uuid, known in list(self.devices.items()):
            if now_us - known.received_us > self._retire_after_us:
                del self.devices[uuid]
        for node, seen_us in last_seen_us.items():
            silent_us = now_us - seen_us
            if silent_us > NODE_FORGOTTEN_AFTER_US:
                continue
            conditions = node_alerts(node, silent_us / 1e6)
            if conditions:
                self._ledgers.setdefault(Subject(node=node), _Ledger()).conditions += conditions
        for subject, ledger in list(self._ledgers.items()):
            ledger.alerts, begun_or_over = advance(ledger.alerts, ledger.conditions, now_us)
            ledger.conditions = []
            changes += (Change(alert) for alert in begun_or_over)
            if not ledger.alerts:
                del self._ledgers[subject]
        return changes

    def restore(self, alert: Alert) -> None:
        """An alert that stood when the collector ended, and is not about an allocator."""
        ledger = self._ledgers.setdefault(alert.condition.subject, _Ledger())
        ledger.alerts = (*ledger.alerts, alert)

    def _retire_silent(self, now_us: int) -> list[Change]:
        changes: list[Change] = []
        for watched in list(self.watched.values()):
            silent_us = now_us - watched.heard_us
            if watched.died and silent_us > DIED_AFTER_US:
                changes += self._retire(watched, watched.died)
            elif silent_us > self._retire_after_us:
                changes += self._retire(watched, f"nothing was heard of it for {silent_us // 1_000_000} s")
        return changes

    def _retire(self, watched: Watched, reason: str) -> list[Change]:
        del self.watched[watched.ref]
        neighbours = self._on_device[watched.ref.device_uuid]
        del neighbours[watched.ref]
        if not neighbours:
            del self._on_device[watched.ref.device_uuid]
        self.end(watched.ref.process_id, max(watched.sequence, self._ended.get(watched.ref.process_id, 0)))
        return [Change(alert, watched.ref, reason) for alert in watched.watch.end(watched.time_us)]

    def standing(self) -> Iterator[Alert]:
        """All alerts, pending and firing."""
        for watched in list(self.watched.values()):
            yield from watched.watch.alerts
        for ledger in list(self._ledgers.values()):
            yield from ledger.alerts


def _by_allocator(batch: NodeBatch, watched: Iterable[AllocatorRef]) -> Iterator[tuple[AllocatorRef, list[Told]]]:
    """What a batch says of each allocator, in the order in which it happened."""
    found: dict[AllocatorRef, list[Told]] = {}
    for chunk in batch.chunks:
        if len(chunk):
            found.setdefault(chunk.allocator, []).extend(chunk.samples())
    for ref, block_map in batch.block_maps:
        found.setdefault(ref, []).append(block_map)
    for event in batch.events:
        if event.kind is not EventKind.OOM:
            continue
        refs = [ref for ref in chain(found, watched) if ref.process_id == event.process_id]
        for ref in dict.fromkeys(refs):
            if event.device_uuid in (None, ref.device_uuid):
                found.setdefault(ref, []).append(event)
    for ref, items in found.items():
        items.sort(key=lambda item: item.sequence)
        yield ref, items


def _largest_free_block(block_map: BlockMap) -> int | None:
    return max(
        (g.largest_free_block_bytes for g in block_map.groups if g.largest_free_block_bytes is not None), default=None
    )


def _total_bytes(own: Device | None, reading: DeviceReading | None) -> int | None:
    if own and own.total_bytes is not None:
        return own.total_bytes
    return reading.device.total_bytes if reading else None
