"""After a restart: who was followed is followed again, from what is stored, and what fired still fires."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

import structlog

from allocscope.alerts.rules import Subject
from allocscope.alerts.states import Alert
from allocscope.collector.fleet import Change, Fleet, Told, Watched
from allocscope.collector.records import resolved, standing_alert
from allocscope.model import AllocatorRef
from allocscope.storage.records import AlertRecord, Page, ProcessRecord
from allocscope.storage.repository import Repository

log = structlog.get_logger(__name__)

_Item = TypeVar("_Item")

EVERYTHING = 2**63
REMEMBERED_US = 15 * 60 * 1_000_000
"""Of an allocator's own time: as long as its forecast looks back."""
NODES_SINCE_US = 24 * 3600 * 1_000_000
PAGE = 500
SAMPLES_PAGE = 10_000
AT_MOST = 100_000
"""Items read of any list."""


def resume(repository: Repository, fleet: Fleet, *, now_us: int, retire_after_us: int) -> list[Change]:
    """Fills the fleet; what is to be told: alerts that still fire (anew), and those that nobody follows any more."""
    for node in pages(lambda cursor: repository.nodes(cursor=cursor, limit=PAGE)):
        if now_us - node.last_received_us < NODES_SINCE_US:
            fleet.heard_before[node.node] = node.last_received_us
    for record in pages(lambda cursor: repository.devices(cursor=cursor, limit=PAGE)):
        if now_us - record.received_us < retire_after_us:
            fleet.devices[record.device.uuid] = record
    unjudged: list[tuple[Watched, list[Told]]] = []
    for process in pages(lambda cursor: repository.processes(cursor=cursor, limit=PAGE)):
        if process.last_received_us < now_us - retire_after_us:
            continue
        if process.stopped_us is not None:
            fleet.end(process.process.process_id, EVERYTHING)
        else:
            unjudged += _follow(repository, fleet, process)
    log.info("resumed", allocators=len(fleet.watched), nodes=len(fleet.heard_before))
    changes = list(_alerts(repository, fleet, now_us))
    for watched, items in unjudged:
        changes += fleet.tell(watched, items)
    return changes


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


def _follow(repository: Repository, fleet: Fleet, record: ProcessRecord) -> Iterator[tuple[Watched, list[Told]]]:
    """Takes up a process's allocators; yields what came of each, but was not judged yet."""
    process_id = record.process.process_id
    for ref in pages(lambda cursor: repository.allocators(process_id=process_id, cursor=cursor, limit=PAGE)):
        watched = fleet.watch(ref, record.process, record.node)
        watched.heard_us = record.last_received_us
        latest = next(iter(repository.forecasts(allocator=ref, limit=1).items), None)
        watched.judged_us = latest.forecast.time_us if latest else 0
        judged, unjudged = _since(repository, ref, watched.judged_us)
        fleet.remember(watched, judged)
        yield watched, unjudged


def _since(repository: Repository, ref: AllocatorRef, judged_us: int) -> tuple[list[Told], list[Told]]:
    """What it sent in the time before its latest forecast, and after it."""
    from_us = max(judged_us - REMEMBERED_US, 0)
    told: list[Told] = list(repository.block_maps(ref, from_us=from_us, limit=PAGE))
    after = 0
    while len(told) < AT_MOST:
        chunks = repository.samples(ref, from_us=from_us, after_sequence=after, limit=SAMPLES_PAGE)
        if not chunks:
            break
        told += (sample for chunk in chunks for sample in chunk.samples())
        after = chunks[-1].sequence[-1]
    told.sort(key=lambda item: item.sequence)
    split = next((at for at, item in enumerate(told) if item.time_us > judged_us), len(told))
    return told[:split], told[split:]


def _alerts(repository: Repository, fleet: Fleet, now_us: int) -> Iterator[Change]:
    """Those that stood: each goes on with whom it is about, or is over."""
    by_subject = {watched.watch.subject: watched for watched in fleet.watched.values()}
    for record in list(pages(lambda cursor: repository.alerts(standing=True, cursor=cursor, limit=PAGE))):
        alert = standing_alert(record)
        change = _taken_up(alert, record, by_subject, fleet) if alert else None
        yield change or resolved(record, at_us=now_us, reason="nobody reports it any more")


def _taken_up(alert: Alert, record: AlertRecord, by_subject: dict[Subject, Watched], fleet: Fleet) -> Change | None:
    subject = alert.condition.subject
    watched = by_subject.get(subject)
    if watched is not None:
        watched.watch.alerts = (*watched.watch.alerts, alert)
        return Change(alert, watched.ref)
    if record.labels.get("uuid") is None and subject.node is not None:
        fleet.restore(alert)
        return Change(alert)
    return None
