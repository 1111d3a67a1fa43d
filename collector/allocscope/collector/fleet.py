"""What is known of the fleet at this moment, and what follows from each batch: alerts that begin and end. Pure, told the time.

An allocator's forecast and alerts go by its samples' times; whether a node or a process is there goes by the collector's clock.
Alerts of a job's allocators are told as one of the job (`allocscope.alerts.gather`).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

import numpy as np

from allocscope.alerts.forecast import Outlook, Outlooks, of_samples
from allocscope.alerts.gather import Gathering
from allocscope.alerts.rules import (
    NODE_FORGOTTEN_AFTER_S,
    OOM,
    Condition,
    Subject,
    dropping_alert,
    node_alerts,
    oom_alert,
)
from allocscope.alerts.states import Alert, AlertState, Progress, advance
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
from allocscope.storage.advice import AdviceRecord
from allocscope.storage.records import NodeBatch, ReadingRecord

DIED_AFTER_US = 15_000_000
"""An OOM that nothing follows for so long was the end: a program that caught it goes on within seconds."""
TICKS_WITHIN_US = 30_000_000
"""Ticks that are further apart were held up, or the clock was set between them."""
TAKEN_WITHIN_US = 30_000_000
"""A daemon sends a batch each ten seconds at least, though it be empty."""
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
    reason: str = ""
    """Why it resolved, where it is not that its condition ceased."""
    retold: bool = False
    """It fires as before; only its words are newer."""
    as_kept: bool = False
    """It is as it was kept before a restart; only those who are told need to hear of it."""


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
    """Alerts of a node, of what was lost on the way, or that outlive their job: they go by the collector's clock."""

    alerts: tuple[Alert, ...] = ()
    conditions: list[Condition] = field(default_factory=list)
    """What happened since the last tick."""


class Fleet:
    """Everything that is followed. Used by one thread; `watched` and `devices` may be read by others."""

    def __init__(self, *, retire_after_us: int) -> None:
        self._retire_after_us = retire_after_us
        self.clear()

    def clear(self) -> None:
        """Nobody is followed."""
        self.watched: dict[AllocatorRef, Watched] = {}
        self.devices: dict[str, ReadingRecord] = {}
        """By UUID: its latest reading."""
        self._on_device: dict[str, dict[AllocatorRef, Watched]] = {}
        self.heard_before: dict[str, int] = {}
        """Nodes that were there before this process, or speak to another collector by now, and since when each is silent."""
        self.absent = 0, 0
        """From when until when nobody listened, or the clock was set: whoever was not heard then was not silent."""
        self.changed_us = 0
        """When an alert last changed, by what was kept before this process."""
        self._ticked_us: int | None = None
        self._taken_us: dict[str, int] = {}
        """By node: when what was taken last of it had come."""
        self.gathering = Gathering()
        self.ooms: dict[Subject, int] = {}
        """Who ran out of memory lately, and when it was heard of, by the collector's clock: as long as the alert of it stands."""
        self.folded = 0
        """Samples that were not judged though it was time, because others waited."""
        self.outlooks = Outlooks()
        self._ended: dict[str, int] = {}
        """By process: the last number of those that ended."""
        self._ooms_heard: dict[tuple[AllocatorRef, int], None] = {}
        """By their numbers, so that none is told twice."""
        self._closed_us: dict[str, int] = {}
        """By node: how late it is there, by what came last."""
        self._ledgers: dict[Subject, _Ledger] = {}
        self._sequences: dict[tuple[str, str], int] = {}
        self._forecasts: dict[AllocatorRef, list[Forecast]] = {}

    # what comes

    def take(self, *batches: NodeBatch, behind: bool = False) -> list[Change]:
        """Batches that were stored, of one node in their order. `behind`: others wait, so judge less often.

        Many come to the same as one by one: what a batch says of a process, of its end or of a device is of that batch's moment.
        """
        return [change for wave in _waves(batches) for change in self._take_wave(wave, behind)]

    def _take_wave(self, batches: Sequence[NodeBatch], behind: bool) -> list[Change]:
        """At most one batch of each node."""
        told: dict[AllocatorRef, tuple[Watched, list[Told]]] = {}
        changes: list[Change] = []
        for batch in batches:
            self._count(batch)
            for reading in _current_readings(batch):
                self.devices[reading.device.uuid] = ReadingRecord(batch.node, reading, batch.received_us)
            processes = {process.process_id: process for process in batch.processes}
            for ref, items in _by_allocator(batch, self.watched):
                process = processes.get(ref.process_id)
                if process is None:
                    continue
                changes += self._overtaken(ref, process, items, batch)
                if items[-1].sequence <= self._ended.get(ref.process_id, 0):
                    continue
                watched = self.watched.get(ref) or self.watch(ref, process, batch.node)
                watched.heard_us = batch.received_us
                if process != watched.process and not batch.late:
                    changes += self._amend(watched, process)
                told.setdefault(ref, (watched, []))[1].extend(items)
        changes += self.tell(told.values(), behind=behind)
        for batch in batches:
            for reading in _current_readings(batch):
                for watched in self._on_device.get(reading.device.uuid, {}).values():
                    watched.watch.device(reading)
            for event in batch.events:
                changes += self._process_event(event, batch)
        return changes

    def watch(self, ref: AllocatorRef, process: Process, node: str) -> Watched:
        """Begin to follow an allocator."""
        known = self.devices.get(ref.device_uuid)
        reading = known.reading if known else None
        own = _own(process, ref)
        outlook = Outlook(
            device_total_bytes=_total_bytes(own, reading),
            allowed_bytes=own.allowed_bytes if own else None,
            allocator_conf=process.allocator_conf,
            among=self.outlooks,
        )
        if reading:
            outlook.observe_device(reading)
        watch = Watch(_subject(ref, process, node, reading), outlook)
        watched = self.watched[ref] = Watched(ref, process, node, watch)
        self._on_device.setdefault(ref.device_uuid, {})[ref] = watched
        return watched

    def _amend(self, watched: Watched, process: Process) -> list[Change]:
        """A process says of itself what it did not know before, as its rank, or what it has changed."""
        watched.process, watch = process, watched.watch
        own = _own(process, watched.ref)
        watch.outlook.amend(allowed_bytes=own.allowed_bytes if own else None, allocator_conf=process.allocator_conf)
        subject = replace(_subject(watched.ref, process, watched.node, None), gpu=watch.subject.gpu)
        if subject == watch.subject:
            return []
        before = watch.subject
        over = self.gather(watch.rename(subject, watched.time_us), watched.heard_us, "it is of another job")
        if subject.job == before.job:
            self.gathering.rename(before, subject)
            if before in self.ooms:
                self.ooms[subject] = self.ooms.pop(before)
        else:
            for alert in watch.alerts:
                self.keep(alert, watched.heard_us)
            watch.alerts = ()
        return over

    def end(self, process_id: str, last_sequence: int) -> None:
        """A process is over: what it sent so far, if it comes again, changes nothing."""
        self._ended.pop(process_id, None)
        self._ended[process_id] = last_sequence
        while len(self._ended) > ENDED_REMEMBERED:
            del self._ended[next(iter(self._ended))]

    def refused(self, node: str, count: int, reason: str) -> None:
        """Something that a node sent could not be stored."""
        self._lost(Subject(node=node), count, "samples, maps or events", f"refused: {reason}")

    def pass_over(self, batches: Sequence[NodeBatch]) -> None:
        """Batches that were stored and came in order, but that there was no time to judge."""
        for batch in batches:
            self._count(batch)
        samples = sum(len(chunk) for batch in batches for chunk in batch.chunks)
        self._lost(
            Subject(), samples, "samples", "they are stored, but were not judged: more came than there was time for"
        )

    def _lost(self, subject: Subject, count: int | None, what: str, why: str) -> None:
        condition = dropping_alert(subject, count, what, why)
        self._ledgers.setdefault(condition.subject, _Ledger()).conditions.append(condition)

    def _count(self, batch: NodeBatch) -> None:
        """Numbers that are missing were dropped there, unless the daemon says that it never used them."""
        if not batch.late:
            self._closed_us[batch.node], self._taken_us[batch.node] = batch.closed_us, batch.received_us
        key = (batch.node, batch.daemon_id)
        last = self._sequences.get(key)
        if batch.late or last is None or batch.sequence > last:  # else it comes again
            for dropped in batch.dropped:
                why = dropped.reason.replace("_", " ")
                self._lost(Subject(node=batch.node), dropped.count, dropped.what.replace("_", " "), why)
        if not batch.late and last is not None and batch.sequence - batch.unused_before > last + 1:
            first, latest = last + 1, batch.sequence - batch.unused_before - 1
            missing = f"number {first} is" if first == latest else f"numbers {first} to {latest} are"
            why = f"{missing} missing; its daemon's log says what was lost"
            self._lost(Subject(node=batch.node), None, "batches", why)
        self._sequences[key] = max(last or 0, batch.sequence)

    def _overtaken(self, ref: AllocatorRef, process: Process, items: Iterable[Told], batch: NodeBatch) -> list[Change]:
        """OOMs that came after newer things of their process, or after its end."""
        watched, changes = self.watched.get(ref), list[Change]()
        last = watched.sequence if watched else self._ended.get(ref.process_id, 0)
        for item in items:
            if isinstance(item, Event) and item.sequence <= last:
                now_us = watched.time_us if watched else self._closed_us.get(batch.node, batch.received_us)
                changes += self.oom_of_before(ref, process, batch.node, item, now_us - item.time_us, batch.received_us)
        return changes

    def oom_of_before(
        self, ref: AllocatorRef, process: Process, node: str, event: Event, ago_us: int, now_us: int
    ) -> list[Change]:
        """An OOM that is heard of late, but once: told while an alert of it would stand, had it been heard of in time."""
        if (ref, event.sequence) in self._ooms_heard:
            return []
        self._hear(ref, event)
        ago_us = max(ago_us, 0)
        if ago_us >= OOM.keep_firing_for_s * 1e6:
            return []
        watched, known = self.watched.get(ref), self.devices.get(ref.device_uuid)
        if watched:
            subject, begun = watched.watch.subject, watched.watch.overtaken(event, ago_us)
        else:
            subject = _subject(ref, process, node, known.reading if known else None)
            progress = Progress(
                AlertState.FIRING, since_us=event.time_us, fired_us=event.time_us, counted_us=ago_us, seen_us=now_us
            )
            begun = (Alert(oom_alert(event, subject), progress),)
        self.ooms.setdefault(subject, now_us - ago_us)
        changes = self.gather(begun, now_us)
        if not watched:
            self.keep(begun[0], now_us)
        return changes

    def forget(self, told: Alert) -> None:
        """A job's alert is over, though by what its allocators sent it is not."""
        self.gathering.forget(told)
        for watched in self.watched.values():
            if watched.process.job == told.condition.subject.job:
                watched.watch.forget(told)

    def _hear(self, ref: AllocatorRef, event: Event) -> None:
        self._ooms_heard[ref, event.sequence] = None
        if len(self._ooms_heard) > ENDED_REMEMBERED:
            del self._ooms_heard[next(iter(self._ooms_heard))]

    def tell(self, told: Iterable[tuple[Watched, Iterable[Told]]], *, behind: bool = False) -> list[Change]:
        """What happened to allocators, to each in the order of its numbers; what was told before changes nothing.

        Samples are gone through in rounds, one of each allocator, since it costs about as much to foresee from one as from many.
        """
        changes: list[Change] = []
        waiting = [(watched, deque(items)) for watched, items in told]
        while waiting:
            samples = []
            for watched, items in waiting:
                while items:
                    item = items.popleft()
                    if item.sequence <= watched.sequence:
                        continue
                    watched.sequence = item.sequence
                    if isinstance(item, Sample):
                        samples.append((watched, item))
                        break
                    changes += self.gather(self.tell_one(watched, item), watched.heard_us)
            changes += self._tell_samples(samples, behind)
            waiting = [(watched, items) for watched, items in waiting if items]
        return changes

    def tell_one(self, watched: Watched, item: BlockMap | Event) -> tuple[Alert, ...]:
        """Something other than a sample; what changes in the allocator's own alerts."""
        if isinstance(item, BlockMap):
            watched.largest_free_block_bytes = largest_free_block(item)
            return watched.watch.block_map(item)
        if item.kind is EventKind.OOM:
            self._hear(watched.ref, item)
            watched.died = "its process ran out of memory and sent nothing more"
            self.ooms[watched.watch.subject] = watched.heard_us
        return watched.watch.event(item)

    def _tell_samples(self, samples: Sequence[tuple[Watched, Sample]], behind: bool) -> list[Change]:
        """One of each allocator."""
        if not samples:
            return []
        rows = np.array([watched.watch.outlook.row for watched, _ in samples])
        new = self.outlooks.observe(rows, of_samples(sample for _, sample in samples))
        due = []
        for (watched, sample), is_new in zip(samples, new.tolist(), strict=True):
            watched.sample, watched.died = sample, None
            if is_new:
                watched.watch.observed(sample)
                if behind and 0 <= sample.time_us - watched.judged_us < JUDGE_WHEN_BEHIND_US:
                    self.folded += 1
                elif watched.watch.is_due(sample):
                    due.append((watched, sample))
        return self._judge(due)

    def _judge(self, due: Sequence[tuple[Watched, Sample]]) -> list[Change]:
        if not due:
            return []
        rows = np.array([watched.watch.outlook.row for watched, _ in due])
        foreseen = self.outlooks.forecast(rows, np.array([sample.time_us for _, sample in due]))
        changes: list[Change] = []
        for (watched, _), forecast in zip(due, foreseen.forecasts(), strict=True):
            alerts = watched.watch.judge(forecast)
            self._judged(watched)
            changes += self.gather(alerts, watched.heard_us)
        return changes

    def gather(self, alerts: Iterable[Alert], now_us: int, reason: str = "") -> list[Change]:
        """What changes in an allocator's alerts, as what changes in its job's."""
        told = []
        for alert in alerts:
            rule, subject = alert.condition.rule, alert.condition.subject
            if rule.outlives_its_job and alert.state is AlertState.FIRING:
                self._ledgers.pop(subject, None)  # of the one before it in this place
            if rule is OOM and alert.state is AlertState.RESOLVED:
                self.ooms.pop(subject, None)
            told.append(self.gathering.take(alert, now_us))
        return [Change(alert, reason) for alert in told if alert]

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
        reason = "its process stopped"
        return [change for watched in gone for change in self._retire(watched, reason, batch.received_us)]

    # what time brings

    def heard(self, heard_us: int) -> int:
        """When somebody was heard, so that the time since then is silence."""
        from_us, until_us = self.absent
        return heard_us + until_us - from_us if heard_us <= from_us else heard_us

    def heard_elsewhere(self, node: str, heard_us: int) -> None:
        """Another collector on this database heard a node."""
        self.heard_before[node] = max(self.heard_before.get(node, 0), self.heard(heard_us))

    def tick(self, now_us: int, last_seen_us: dict[str, int]) -> list[Change]:
        """About once a second: who is silent, whose alerts are over. `last_seen_us`: when each node was heard."""
        self._look_at_the_clock(now_us)
        last_seen_us = {node: self.heard(seen_us) for node, seen_us in last_seen_us.items()}
        changes = self._retire_silent(now_us, last_seen_us)
        for uuid, known in list(self.devices.items()):
            if now_us - known.received_us > self._retire_after_us:
                del self.devices[uuid]
        for node in {**self.heard_before, **last_seen_us}:
            seen_us = max(self.heard_before.get(node, 0), last_seen_us.get(node, 0))
            silent_us = now_us - seen_us
            if silent_us > NODE_FORGOTTEN_AFTER_S * 1e6:
                continue
            conditions = node_alerts(node, silent_us / 1e6)
            if conditions:
                self._ledgers.setdefault(Subject(node=node), _Ledger()).conditions += conditions
        for subject, ledger in list(self._ledgers.items()):
            ledger.alerts, begun_or_over = advance(ledger.alerts, ledger.conditions, now_us)
            ledger.conditions = []
            if not ledger.alerts:
                del self._ledgers[subject]
            for alert in begun_or_over:
                outlives = alert.condition.rule.outlives_its_job
                changes += self.gather([alert], now_us) if outlives else [Change(alert)]
        return changes + self._retold(now_us)

    def _retold(self, now_us: int) -> list[Change]:
        if not self.gathering.standing():
            return []
        watches = {watched.watch.subject: watched.watch for watched in self.watched.values()}
        return [Change(alert, retold=True) for alert in self.gathering.retell(watches, now_us)]

    def keep(self, alert: Alert, now_us: int) -> None:
        """An alert that goes on by this clock: its job has ended, or it stood when the collector ended and is about none."""
        ledger = self._ledgers.setdefault(alert.condition.subject, _Ledger())
        ledger.alerts = (*ledger.alerts, replace(alert, progress=replace(alert.progress, seen_us=now_us)))

    def _look_at_the_clock(self, now_us: int) -> None:
        ticked_us, self._ticked_us = self._ticked_us, now_us
        if ticked_us is None or 0 <= now_us - ticked_us <= TICKS_WITHIN_US:
            return
        self.absent = ticked_us, now_us
        self.heard_before = {node: self.heard(heard_us) for node, heard_us in self.heard_before.items()}
        for watched in self.watched.values():
            watched.heard_us = self.heard(watched.heard_us)

    def _retire_silent(self, now_us: int, last_seen_us: dict[str, int]) -> list[Change]:
        changes: list[Change] = []
        for watched in list(self.watched.values()):
            taken_us = self.heard(self._taken_us.get(watched.node, 0))
            if last_seen_us.get(watched.node, 0) - taken_us > TAKEN_WITHIN_US:
                continue  # its node speaks, but what it says waits for the database
            silent_us = now_us - watched.heard_us
            if watched.died and silent_us > DIED_AFTER_US:
                changes += self._retire(watched, watched.died, now_us)
            elif silent_us > self._retire_after_us:
                changes += self._retire(watched, f"nothing was heard of it for {silent_us // 1_000_000} s", now_us)
        return changes

    def _retire(self, watched: Watched, reason: str, now_us: int) -> list[Change]:
        del self.watched[watched.ref]
        neighbours = self._on_device[watched.ref.device_uuid]
        del neighbours[watched.ref]
        if not neighbours:
            del self._on_device[watched.ref.device_uuid]
        self.end(watched.ref.process_id, max(watched.sequence, self._ended.get(watched.ref.process_id, 0)))
        over = watched.watch.end(watched.time_us)
        for alert in watched.watch.alerts:
            self.keep(alert, now_us)
        watched.watch.outlook.drop()
        return self.gather(over, now_us, reason)

    def advise(self, record: AdviceRecord, words: str) -> None:
        """What would help an allocator, also one that is gone; its alerts say so with the next tick."""
        watched = self.watched.get(AllocatorRef(record.process_id, record.device_uuid))
        if watched is not None:
            watched.watch.advise(words)
            self.gathering.advise(watched.watch.subject, words)
            return
        place = record.node, record.job, record.rank, record.device_uuid
        for subject in self.gathering.members(OOM.name):
            if (subject.node, subject.job, subject.rank, subject.uuid) == place:
                self.gathering.advise(subject, words, over=True)

    def standing(self) -> Iterator[Alert]:
        """All alerts that fire."""
        yield from self.gathering.standing()
        for ledger in list(self._ledgers.values()):
            yield from (a for a in ledger.alerts if not a.condition.rule.outlives_its_job)


def _waves(batches: Iterable[NodeBatch]) -> Iterator[list[NodeBatch]]:
    """The first of each node, then the second of each, and so on."""
    waves: list[list[NodeBatch]] = []
    count = Counter[str]()
    for batch in batches:
        if count[batch.node] == len(waves):
            waves.append([])
        waves[count[batch.node]].append(batch)
        count[batch.node] += 1
    yield from waves


def _current_readings(batch: NodeBatch) -> tuple[DeviceReading, ...]:
    return () if batch.late else batch.readings


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


def largest_free_block(block_map: BlockMap) -> int | None:
    """Over all its groups; None: not known."""
    return max(
        (g.largest_free_block_bytes for g in block_map.groups if g.largest_free_block_bytes is not None), default=None
    )


def _own(process: Process, ref: AllocatorRef) -> Device | None:
    """The device as the process knows it."""
    return next((device for device in process.devices if device.uuid == ref.device_uuid), None)


def _subject(ref: AllocatorRef, process: Process, node: str, reading: DeviceReading | None) -> Subject:
    return Subject(
        node=node,
        job=process.job,
        rank=process.rank,
        gpu=reading.device.index if reading else None,
        uuid=ref.device_uuid,
        pid=process.pid if process.rank is None else None,
    )


def _total_bytes(own: Device | None, reading: DeviceReading | None) -> int | None:
    if own and own.total_bytes is not None:
        return own.total_bytes
    return reading.device.total_bytes if reading else None
