"""After a restart: who was followed is followed again, from what is stored, and what fired still fires.

What an allocator sent of late is gone through once more. Up to where it had been judged that is done in silence, so that what holds, and
for how long, is known as before; alerts that were kept as firing go on as those that they are. From there on what follows is told.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import structlog

from allocscope.alerts.forecast import of_chunks
from allocscope.alerts.rules import OOM, Subject
from allocscope.alerts.states import Alert
from allocscope.collector.fleet import Change, Fleet, Told, Watched
from allocscope.collector.records import resolved, standing_alert, told_of
from allocscope.collector.retrace import Past, retrace
from allocscope.model import AllocatorRef, BlockMap, Event, EventKind, SampleChunk
from allocscope.storage.records import AlertRecord, EventRecord, Page, ProcessRecord
from allocscope.storage.repository import Repository

log = structlog.get_logger(__name__)

_Item = TypeVar("_Item")
_Identity = tuple[tuple[str, str], ...]

EVERYTHING = 2**63
REMEMBERED_US = 15 * 60 * 1_000_000
"""Of an allocator's own time: as long as its forecast looks back."""
NODES_SINCE_US = 24 * 3600 * 1_000_000
TOLD_WITHIN_US = 60_000_000
"""What resolved so shortly before the end may not have been told: it is told again."""
PAGE = 500
SAMPLES_PAGE = 10_000
AT_MOST = 100_000
"""Items read of any list."""
AT_ONCE = 100_000
"""Samples, maps and events of several allocators that are gone through together."""


def resume(
    repository: Repository, fleet: Fleet, *, now_us: int, retire_after_us: int, began_us: int | None = None
) -> list[Change]:
    """Fills the fleet; what is to be told: alerts that still fire (anew), those that nobody follows any more, and what was not judged.

    `began_us`: since when this process listens, where that is before now.
    """
    before = _Before.read(repository, now_us if began_us is None else began_us)
    fleet.absent = before.alive_us, now_us
    fleet.changed_us = max((record.updated_us for record, _ in (*before.standing, *before.ended)), default=0)
    fleet.heard_before.update((node, fleet.heard(heard_us)) for node, heard_us in before.nodes.items())
    for record in pages(lambda cursor: repository.devices(cursor=cursor, limit=PAGE)):
        if before.alive_us - record.received_us < retire_after_us:
            fleet.devices[record.device.uuid] = record
    unjudged, waiting, stopped_us = list[tuple[Watched, list[Told]]](), list[_Followed](), dict[str, int]()
    for process in pages(lambda cursor: repository.processes(cursor=cursor, limit=PAGE)):
        if process.last_received_us < before.alive_us - retire_after_us:
            continue
        if process.stopped_us is not None:
            fleet.end(process.process.process_id, EVERYTHING)
            stopped_us.setdefault(process.process.job, process.stopped_us)
            _ooms_of_ended(repository, fleet, process, before, now_us)
            continue
        for followed in _follow(repository, fleet, process, before):
            waiting.append(followed)
            if sum(len(one.past) for one in waiting) > AT_ONCE:
                unjudged += _judge_again(fleet, waiting)
                waiting = []
    unjudged += _judge_again(fleet, waiting)
    log.info("resumed", allocators=len(fleet.watched), nodes=len(fleet.heard_before))
    changes = [*_ended_lately(before), *_standing(before, fleet, stopped_us, now_us), *_begun(before, fleet)]
    return changes + fleet.tell(unjudged)


def pages(read: Callable[[str | None], Page[_Item]]) -> Iterator[_Item]:
    """All items of a list, within reason."""
    cursor: str | None = None
    seen = 0
    while seen < AT_MOST:
        page = read(cursor)
        yield from page.items
        seen += len(page.items)
        cursor = page.next_cursor
        if cursor is None or not page.items:
            return


@dataclass(frozen=True, slots=True)
class _Before:
    """What the process before this one left."""

    alive_us: int
    """Its last sign of life."""
    nodes: dict[str, int]
    """When each was heard."""
    standing: list[tuple[AlertRecord, Alert | None]]
    ended: list[tuple[AlertRecord, Alert | None]]
    """The latest."""
    judged_us: dict[Subject, int]
    """How far allocators had been judged at least, by the alerts that name them: they are kept at once, forecasts once a second."""

    @classmethod
    def read(cls, repository: Repository, began_us: int) -> _Before:
        """From the database, in which what came since this process began may be, too."""
        nodes = {n.node: n.last_received_us for n in pages(lambda cursor: repository.nodes(cursor=cursor, limit=PAGE))}
        standing = list(pages(lambda cursor: repository.alerts(standing=True, cursor=cursor, limit=PAGE)))
        ended = repository.alerts(standing=False, limit=PAGE).items
        signs_us = [
            *nodes.values(),
            *(process.last_received_us for process in repository.processes(limit=PAGE).items),
            *(forecast.made_us for forecast in repository.forecasts(limit=PAGE).items),
            *(record.updated_us for record in (*standing, *ended)),
        ]
        alive_us = max((sign_us for sign_us in signs_us if sign_us <= began_us), default=began_us)
        kept = [(record, standing_alert(record)) for record in (*standing, *ended)]
        judged_us: dict[Subject, int] = {}
        for record, alert in kept:
            if alert:
                told_us = max(record.at_us, record.resolved_us or 0)
                judged_us[_first(alert)] = max(told_us, judged_us.get(_first(alert), 0))
        return cls(
            alive_us,
            {node: heard_us for node, heard_us in nodes.items() if alive_us - heard_us < NODES_SINCE_US},
            kept[: len(standing)],
            kept[len(standing) :],
            judged_us,
        )

    @property
    def stood(self) -> set[_Identity]:
        """Which fired."""
        return {_identity(alert) for _, alert in self.standing if alert}

    def muted(self, record: AlertRecord, alert: Alert) -> bool:
        """Whether a graver one of the same trouble fired all its time, so that nobody was told of it."""
        family, severity, subject = alert.condition.trouble
        return any(
            graver.condition.trouble[::2] == (family, subject)
            and graver.condition.rule.severity.level > severity.level
            and other.at_us <= record.at_us
            and (record.resolved_us or 0) <= (other.resolved_us or EVERYTHING)
            for other, graver in (*self.standing, *self.ended)
            if graver
        )

    def told(self, event: EventRecord, job: str) -> bool:
        """Whether an alert of its job told of an OOM."""
        return any(
            record.name == OOM.name
            and record.job == job
            and record.at_us <= event.event.time_us <= (record.resolved_us or EVERYTHING)
            for record, _ in (*self.standing, *self.ended)
        )


@dataclass(frozen=True, slots=True)
class _Followed:
    """An allocator that is followed again, and what it sent of late."""

    past: Past
    unjudged: list[Told]


def _follow(repository: Repository, fleet: Fleet, record: ProcessRecord, before: _Before) -> Iterator[_Followed]:
    process_id = record.process.process_id
    ooms = [oom.event for oom in _ooms(repository, process_id)]
    for ref in pages(lambda cursor: repository.allocators(process_id=process_id, cursor=cursor, limit=PAGE)):
        watched = fleet.watch(ref, record.process, record.node)
        watched.heard_us = fleet.heard(record.last_received_us)
        latest = next(iter(repository.forecasts(allocator=ref, limit=1).items), None)
        judged_us = max(latest.forecast.time_us if latest else 0, before.judged_us.get(watched.watch.subject, 0))
        from_us = max(judged_us - REMEMBERED_US, 0)
        chunks = _chunks(repository, ref, from_us)
        others: list[BlockMap | Event] = list(repository.block_maps(ref, from_us=from_us, limit=PAGE))
        if chunks or others:
            others += (oom for oom in ooms if oom.device_uuid in (None, ref.device_uuid))
        others.sort(key=lambda item: item.sequence)
        yield _split(watched, chunks, others, judged_us)


def _chunks(repository: Repository, ref: AllocatorRef, from_us: int) -> list[SampleChunk]:
    """Its samples, those of each chunk before those of the next."""
    found: list[SampleChunk] = []
    after = count = 0
    while count < AT_MOST:
        chunks = repository.samples(ref, from_us=from_us, after_sequence=after, limit=SAMPLES_PAGE)
        if not chunks:
            break
        found += chunks
        count += sum(map(len, chunks))
        after = chunks[-1].sequence[-1]
    return found


def _split(
    watched: Watched, chunks: Sequence[SampleChunk], others: Sequence[BlockMap | Event], judged_us: int
) -> _Followed:
    """What comes before the first thing of after `judged_us` was judged."""
    first = min((sequence for sequence, time_us in _numbers(chunks, others) if time_us > judged_us), default=EVERYTHING)
    judged = [part for chunk in chunks if len(part := chunk.part(last=first - 1))]
    left = [part for chunk in chunks if len(part := chunk.part(first=first))]
    unjudged: list[Told] = [sample for part in left for sample in part.samples()]
    unjudged += (item for item in others if item.sequence >= first)
    unjudged.sort(key=lambda item: item.sequence)
    latest = next(judged[-1].part(first=judged[-1].sequence[-1]).samples()) if judged else None
    past = Past(watched, of_chunks(judged), latest, [item for item in others if item.sequence < first])
    return _Followed(past, unjudged)


def _numbers(chunks: Iterable[SampleChunk], others: Iterable[BlockMap | Event]) -> Iterator[tuple[int, int]]:
    """Of all of them, each with its moment."""
    for chunk in chunks:
        yield from zip(chunk.sequence, chunk.time_us, strict=True)
    yield from ((item.sequence, item.time_us) for item in others)


def _ooms(repository: Repository, process_id: str) -> tuple[EventRecord, ...]:
    """The latest."""
    return repository.events(process_id=process_id, kind=EventKind.OOM, limit=PAGE).items


def _judge_again(fleet: Fleet, followed: Sequence[_Followed]) -> list[tuple[Watched, list[Told]]]:
    """In silence; what is left is what was not judged."""
    retrace(fleet, [one.past for one in followed])
    return [(one.past.watched, one.unjudged) for one in followed if one.unjudged]


def _ooms_of_ended(repository: Repository, fleet: Fleet, record: ProcessRecord, before: _Before, now_us: int) -> None:
    """They were stored, but perhaps not told."""
    process = record.process
    ahead_us = record.first_received_us - process.started_us
    for oom in _ooms(repository, process.process_id):
        happened_us = min(oom.received_us, oom.event.time_us + ahead_us)  # by our clock; it may have come late
        ago_us = EVERYTHING if before.told(oom, process.job) else now_us - happened_us
        for device in process.devices:
            if oom.event.device_uuid in (None, device.uuid):
                ref = AllocatorRef(process.process_id, device.uuid)
                fleet.oom_of_before(ref, process, record.node, oom.event, ago_us, now_us)


def _first(alert: Alert) -> Subject:
    """The allocator that it names."""
    return alert.condition.first or alert.condition.subject


def _ended_lately(before: _Before) -> Iterator[Change]:
    """They may not have been told of; of each the latest, unless it fires again."""
    stood = before.stood
    lately = {
        _identity(alert): Change(told_of(record, alert), as_kept=True)
        for record, alert in reversed(before.ended)
        if alert and before.alive_us - record.updated_us < TOLD_WITHIN_US and not before.muted(record, alert)
    }
    return (change for identity, change in lately.items() if identity not in stood)


def _standing(before: _Before, fleet: Fleet, stopped_us: dict[str, int], now_us: int) -> Iterator[Change]:
    """Those that stood: each goes on with whom it is about, or is over. `stopped_us`: when jobs ended, by their own clocks."""
    followed = {w.watch.subject: w for w in fleet.watched.values()} | {
        Subject(job=w.process.job): w for w in fleet.watched.values()
    }
    for record, alert in before.standing:
        if alert is not None and (fleet.gathering.goes_on(alert) or _taken_up(alert, record, followed, fleet, now_us)):
            yield Change(alert, as_kept=True)
        elif record.job in stopped_us:
            yield resolved(record, at_us=stopped_us[record.job], reason="its process stopped")
        else:
            yield resolved(record, at_us=now_us, reason="nobody reports it any more")


def _taken_up(alert: Alert, record: AlertRecord, followed: dict[Subject, Watched], fleet: Fleet, now_us: int) -> bool:
    """With the rank that it named, or another of its job; without either where it goes on by itself."""
    condition = alert.condition
    first = _first(alert)
    if condition.subject.job is None:
        fleet.keep(alert, now_us)
        return True
    watched = followed.get(first) or followed.get(condition.subject)
    if watched is None and not condition.rule.outlives_its_job:
        return False
    member = replace(
        alert, condition=replace(condition, subject=watched.watch.subject if watched else first, first=None)
    )
    if condition.rule is OOM:
        fleet.ooms[member.condition.subject] = record.updated_us
    if watched:
        watched.watch.alerts = (*watched.watch.alerts, member)
    else:
        elapsed_us = max(now_us - record.updated_us, 0)
        fleet.keep(replace(member, progress=replace(member.progress, counted_us=elapsed_us)), now_us)
    fleet.gathering.restore(alert, member, now_us)
    return True


def _begun(before: _Before, fleet: Fleet) -> Iterator[Change]:
    """What fires by what was judged, and is not among those that stood: it was over already, or not kept before the end."""
    stood = before.stood
    over_us = {_identity(alert): record.resolved_us or 0 for record, alert in reversed(before.ended) if alert}
    for alert in fleet.gathering.standing():
        if _identity(alert) in stood:
            continue
        if over_us.get(_identity(alert), -1) >= (alert.fired_us or 0):
            fleet.forget(alert)
        else:
            yield Change(alert)


def _identity(alert: Alert) -> _Identity:
    return tuple(sorted(alert.labels.items()))
