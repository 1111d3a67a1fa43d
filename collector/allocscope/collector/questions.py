"""The questions that the API answers, put to a Repository. Answers are JSON-ready (`views`); nothing here knows HTTP."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from allocscope.collector import views
from allocscope.collector.nodes import NodeState
from allocscope.collector.resume import pages
from allocscope.collector.views import Json
from allocscope.model import AllocatorRef, Event, EventKind, Forecast, Line, Process, State
from allocscope.storage.records import JobRecord, ProcessRecord, ReadingRecord
from allocscope.storage.repository import Repository

PAGE = 500
MOST_RANKS = 2_000
"""Processes of one job that are looked at, the newest ones."""
DIED_AFTER_US = 15_000_000
"""A process that ran out of memory and said nothing more for so long is gone."""
SCRAPED_SINCE_US = 24 * 3600 * 1_000_000
"""Nodes that Prometheus is told of: those heard of so lately; `up` says of them that they are away."""
MOST_SERIES = 64
"""Allocators in one answer of series."""


class UnknownJob(LookupError):  # noqa: N818  (an error is named for what is wrong)
    """Nobody reported a job of that name."""

    def __init__(self, job_id: str) -> None:
        super().__init__(
            f"no reports of job {job_id[:100]!r}: it never reported, or aged out of retention (allocscope jobs, or /api/v1/jobs, lists those that there are)"
        )
        self.job_id = job_id


class Questions:
    """What people ask of a fleet."""

    def __init__(
        self,
        repository: Repository,
        *,
        nodes: Callable[[], Sequence[NodeState]],
        now_us: Callable[[], int],
        live_for_us: int,
    ) -> None:
        self._repository, self._nodes, self._now_us, self._live_for_us = repository, nodes, now_us, live_for_us

    # lists

    def nodes(self, cursor: str | None, limit: int) -> Json:
        """By name."""
        known = {state.hello.node: state for state in self._nodes()}
        page = self._repository.nodes(cursor=cursor, limit=limit)
        items = []
        for record in page.items:
            state = known.get(record.node)
            connected = state is not None and state.connected
            offset_us = state.clock_offset_us if state else None
            items.append(views.node(record, connected=connected, clock_offset_us=offset_us))
        return {"items": items, "next_cursor": page.next_cursor}

    def devices(self, node: str | None, cursor: str | None, limit: int) -> Json:
        """In the order in which they were first read; who used one that was not read lately is not known any more."""
        page = self._repository.devices(node=node, cursor=cursor, limit=limit)
        records = [record if self._is_fresh(record) else _without_processes(record) for record in page.items]
        return {
            "items": [views.device(record, self._owners(record)) for record in records],
            "next_cursor": page.next_cursor,
        }

    def jobs(self, cursor: str | None, limit: int) -> Json:
        """The one that came last first."""
        page = self._repository.jobs(cursor=cursor, limit=limit)
        readings = self._readings()
        items = [views.job(record, self._allocators(record.job, readings)) for record in page.items]
        return {"items": items, "next_cursor": page.next_cursor}

    def risks(self, at_least: State, cursor: str | None, limit: int) -> Json:
        """Allocators that live and are not well; a page may hold fewer than asked for, those of ended processes left out."""
        page = self._repository.forecasts(at_least=at_least, cursor=cursor, limit=limit)
        items = []
        for record in page.items:
            owner = self._repository.process(record.allocator.process_id)
            if owner and self._live(owner):
                known = self._repository.device(record.allocator.device_uuid)
                items.append(views.risk(record, owner, known.reading if known else None))
        items.sort(key=lambda item: -State(item["forecast"]["state"]).level)
        return {"items": items, "next_cursor": page.next_cursor}

    def alerts(self, job: str | None, state: str | None, cursor: str | None, limit: int) -> Json:
        """The one that came last first."""
        page = self._repository.alerts(job=job, state=state, cursor=cursor, limit=limit)
        return {"items": [views.alert(record) for record in page.items], "next_cursor": page.next_cursor}

    # one job

    def job(self, job_id: str) -> Json:
        """A job with its processes, allocators and latest events."""
        record = self.known_job(job_id)
        allocators = self._allocators(job_id, self._readings())
        processes = self._repository.processes(job=job_id, limit=PAGE).items
        events = self._repository.events(job=job_id, limit=20).items
        return {
            **views.job(record, allocators),
            "allocators": allocators[:PAGE],
            "processes": [views.process(process, live=self._live(process)) for process in processes],
            "events": [views.event(event) for event in events],
        }

    def bill(self, job_id: str) -> Json:
        """The bills of the devices that a job uses now."""
        self.known_job(job_id)
        uuids = {one["uuid"] for one in self._allocators(job_id, {}) if one["live"]}
        records = (self._repository.device(uuid) for uuid in sorted(uuids)[:PAGE])
        return {
            "job": job_id,
            "devices": [views.device_bill(record, self._owners(record)) for record in records if record],
        }

    def series(
        self, job_id: str, metric: str | Line, from_us: int | None, to_us: int | None, step_us: int | None
    ) -> Json:
        """A figure over time, of each of a job's allocators; by default the last quarter of an hour of its own time."""
        self.known_job(job_id)
        refs = self._repository.allocators(job=job_id, limit=MOST_SERIES).items
        if to_us is None:
            times = [
                record.forecast.time_us for record in self._repository.forecasts(job=job_id, limit=MOST_SERIES).items
            ]
            to_us = max(times, default=self._now_us()) + 1
        from_us = to_us - 900_000_000 if from_us is None else from_us
        step_us = max((to_us - from_us) // 300, 1_000_000) if step_us is None else step_us
        series = []
        for ref in refs:
            owner = self._repository.process(ref.process_id)
            points = self._repository.series(ref, metric, from_us=from_us, to_us=to_us, step_us=step_us)
            series.append(
                {
                    "process_id": ref.process_id,
                    "uuid": ref.device_uuid,
                    "rank": owner.process.rank if owner else None,
                    "node": owner.node if owner else None,
                    "points": [views.point(point) for point in points],
                }
            )
        name = metric.value if isinstance(metric, Line) else metric
        return {"job": job_id, "metric": name, "from_us": from_us, "to_us": to_us, "step_us": step_us, "series": series}

    # the fleet

    def fleet(self) -> Json:
        """Everything in a few figures."""
        now_us = self._now_us()
        states, jobs_live, jobs = Counter[str](), 0, 0
        readings = self._readings()
        for record in pages(lambda cursor: self._repository.jobs(cursor=cursor, limit=PAGE)):
            jobs += 1
            if now_us - record.last_received_us > self._live_for_us:
                continue
            view = views.job(record, self._allocators(record.job, readings))
            jobs_live += view["live"]
            states[view["state"] or "unknown"] += view["live"]
        bills = [r.reading.bill for r in readings.values() if r.reading.bill and self._is_fresh(r)]
        lines = Counter[Line]()
        for bill in bills:
            for entry in bill.entries:
                lines[entry.line] += entry.bytes
        known = self._nodes()
        firing = Counter(
            record.severity
            for record in pages(lambda cursor: self._repository.alerts(state="firing", cursor=cursor, limit=PAGE))
        )
        return {
            "time_us": now_us,
            "nodes": len(known),
            "nodes_connected": sum(state.connected for state in known),
            "devices": len(readings),
            "jobs": jobs,
            "jobs_live": jobs_live,
            "jobs_by_state": {state.value: states[state.value] for state in State},
            "device_total_bytes": sum(bill.total_bytes for bill in bills),
            "bill": {line.value: lines[line] for line in Line if line in lines},
            "alerts_firing": {severity: firing[severity] for severity in ("info", "warning", "critical")},
        }

    def scrape_targets(self) -> list[Json]:
        """Prometheus's HTTP service discovery: one group a daemon."""
        since_us = self._now_us() - SCRAPED_SINCE_US
        return [
            {"targets": [record.metrics_address], "labels": {"__meta_allocscope_node": record.node}}
            for record in pages(lambda cursor: self._repository.nodes(cursor=cursor, limit=PAGE))
            if record.metrics_address and record.last_received_us >= since_us
        ]

    # what several need

    def live_processes(self, job: str) -> list[ProcessRecord]:
        """Those of a job that live, the one that came last first."""
        records = self._repository.processes(job=job, limit=MOST_RANKS).items
        return [record for record in records if self._live(record)]

    def known_job(self, job_id: str) -> JobRecord:
        """A job that somebody reported; UnknownJob."""
        record = self._repository.job(job_id)
        if record is None:
            raise UnknownJob(job_id)
        return record

    def _readings(self) -> dict[str, ReadingRecord]:
        records = pages(lambda cursor: self._repository.devices(cursor=cursor, limit=PAGE))
        return {record.device.uuid: record for record in records}

    def _is_fresh(self, record: ReadingRecord) -> bool:
        return self._now_us() - record.received_us <= self._live_for_us

    def _owners(self, record: ReadingRecord) -> dict[str, Process]:
        """Of the processes that a bill or a list of processes names."""
        entries = record.reading.bill.entries if record.reading.bill else ()
        ids = {entry.process_id for entry in entries} | {process.process_id for process in record.reading.processes}
        owners = (self._repository.process(id_) for id_ in sorted(id_ for id_ in ids if id_))
        return {owner.process.process_id: owner.process for owner in owners if owner}

    def _allocators(self, job: str, readings: dict[str, ReadingRecord]) -> list[Json]:
        """A job's allocators: those that live, or where none does, those of the process that came last."""
        records = self._repository.processes(job=job, limit=MOST_RANKS).items
        live = {record.process.process_id for record in records if self._live(record)}
        shown = [record for record in records if record.process.process_id in live] or list(records[:1])
        owners = {record.process.process_id: record for record in shown}
        forecasts: dict[AllocatorRef, Forecast | None] = {}
        for ref in self._repository.allocators(job=job, limit=MOST_RANKS).items:
            forecasts[ref] = None
        for record in self._repository.forecasts(job=job, limit=MOST_RANKS).items:
            forecasts[record.allocator] = record.forecast
        return [
            views.allocator(
                ref.device_uuid,
                owners[ref.process_id],
                foreseen,
                readings.get(ref.device_uuid),
                live=ref.process_id in live,
            )
            for ref, foreseen in sorted(forecasts.items())
            if ref.process_id in owners
        ]

    def _live(self, record: ProcessRecord) -> bool:
        """By this machine's clock: it did not say that it stops, was heard of lately, and did not die."""
        silent_us = self._now_us() - record.last_received_us
        if record.stopped_us is not None or silent_us > self._live_for_us:
            return False
        return silent_us < DIED_AFTER_US or self._last_event(record.process.process_id, EventKind.OOM) is None

    def _last_event(self, process_id: str, kind: EventKind) -> Event | None:
        items = self._repository.events(process_id=process_id, kind=kind, limit=1).items
        return items[0].event if items else None


def _without_processes(record: ReadingRecord) -> ReadingRecord:
    return replace(record, reading=replace(record.reading, processes=()))
