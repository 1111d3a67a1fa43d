"""One run of the demo: the fleet started, followed, and judged by what its database holds at the end."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx

from allocscope.alerts.watch import JUDGE_EVERY_US
from allocscope.cli.demo.fleet import NODES, Fleet, FleetError, Player, tail
from allocscope.cli.demo.verdict import Critical, Verdict, is_increasing, standing_at, usual_rule_at
from allocscope.model import AllocatorRef, Sample
from allocscope.storage.repository import Repository
from allocscope.storage.sql import open_repository

LOOK_EVERY_S = 0.25
SETTLE_WITHIN_S = 20.0
"""How long what was sent may take to be stored and judged after the last job's end; it takes about two seconds."""
PAGE = 10_000


@dataclass(frozen=True, slots=True)
class FleetView:
    """What the collector said of the fleet, as its API gives it, and what the recorded jobs said at their ends."""

    jobs: Sequence[Mapping[str, Any]]
    alerts: Sequence[Mapping[str, Any]]
    ended: Mapping[str, Mapping[str, Any]]
    start_us: int
    """The recordings' start, by the clock of the jobs."""
    now_s: float
    """How far the recordings have come, in seconds of recorded time."""
    url: str
    """The collector's page."""


@dataclass(frozen=True, slots=True)
class Result:
    """What came of a run."""

    verdicts: tuple[Verdict, ...]
    samples_sent: int
    samples_stored: int
    stored_right: bool
    """Each job's samples are there once, all of them."""
    duration_s: float
    url: str
    recordings: Path

    @property
    def ok(self) -> bool:
        """Whether the demo shows what it promises."""
        return self.stored_right and self.samples_sent == self.samples_stored and all(v.right for v in self.verdicts)

    def to_json(self) -> dict[str, Any]:
        """For `--json`: seconds of the recorded time."""
        hidden = ("foreseeable", "causes")
        jobs = [
            {k: v for k, v in asdict(verdict).items() if k not in hidden} | {"lead_s": verdict.lead_s}
            for verdict in self.verdicts
        ]
        return {
            "jobs": jobs,
            "samples_sent": self.samples_sent,
            "samples_stored": self.samples_stored,
            "duration_s": round(self.duration_s, 1),
            "url": self.url,
            "ok": self.ok,
        }


@dataclass(frozen=True, slots=True)
class Role:
    """A recorded job, and what its recording's label says of it."""

    player: Player
    foreseeable: bool
    causes: frozenset[str]
    length_s: float
    """How long the recorded job ran."""


def cast(recordings: Path) -> tuple[Role, ...]:
    """The recordings of a folder, spread over the pretend nodes. FleetError where there are none."""
    try:
        labels: dict[str, Any] = json.loads((recordings / "labels.json").read_text())
    except (OSError, ValueError) as error:
        raise FleetError(f"{recordings}: no readable labels.json ({error})") from error
    roles = []
    for number, (name, label) in enumerate(sorted(labels.items())):
        node, gpu_index = NODES[number % len(NODES)], number // len(NODES)
        roles.append(
            Role(
                Player(name, recordings / f"{name}.run.json", node, gpu_index),
                bool(label["foreseeable"]),
                frozenset(label["cause"] or ()),
                (label["end_us"] - label["start_us"]) / 1e6,
            )
        )
    if not roles:
        raise FleetError(f"{recordings}/labels.json names no recording")
    return tuple(roles)


class Run:
    """One run, from the start of the fleet to the verdict."""

    JOBS_START_WITHIN_S = 5.0
    """About how long a dozen interpreters take to start and read their recordings, on two cores: then all begin."""
    NEWS_WITHIN_S = 30.0
    """By then the collector knows of jobs, or something is wrong."""

    def __init__(
        self,
        fleet: Fleet,
        roles: Sequence[Role],
        show: Callable[[FleetView], None],
        *,
        speed: float | None,
        lasts_s: float,
    ) -> None:
        """Without a `speed` it follows from how long the whole may last."""
        self.fleet, self.roles, self.show = fleet, roles, show
        self.speed, self.lasts_s = speed or 0.0, lasts_s
        self.sockets: dict[str, str] = {}
        self.start_at_s = 0.0
        self.url = ""

    def through(self) -> Result:
        """Start everything, follow the jobs to their ends, and judge."""
        began = time.monotonic()
        collector = self.fleet.start_collector()
        self.url = f"http://{collector['http']}/"
        for node in NODES:
            self.sockets[node] = self.fleet.start_daemon(node, collector["grpc"])["socket"]
        if not self.speed:
            left_s = self.lasts_s - (time.monotonic() - began) - self.JOBS_START_WITHIN_S
            self.speed = max(r.length_s for r in self.roles) / max(left_s, 20.0)
        self.start_at_s = time.time() + self.JOBS_START_WITHIN_S
        for role in self.roles:
            self._start(role, self.start_at_s)
        ended = self._follow()
        repository = open_repository(self.fleet.database)
        try:
            self._settle(repository, ended)
            return self._judge(repository, ended, began)
        finally:
            repository.close()

    def again_for_ever(self) -> None:
        """Start each job anew when it ends, until somebody stops it."""
        while True:
            self.fleet.check()
            for role in self.roles:
                if self.fleet.ended(role.player.job) is not None:
                    self._start(role, time.time())
            time.sleep(1.0)

    def _start(self, role: Role, start_at_s: float) -> None:
        self.fleet.start_player(role.player, self.sockets[role.player.node], self.speed, start_at_s)

    def _follow(self) -> dict[str, dict[str, Any]]:
        ended: dict[str, dict[str, Any]] = {}
        heard_by = time.monotonic() + self.JOBS_START_WITHIN_S + self.NEWS_WITHIN_S
        with httpx.Client(base_url=self.url, timeout=5.0, trust_env=False) as client:
            while len(ended) < len(self.roles):
                time.sleep(LOOK_EVERY_S)
                self.fleet.check()
                for job in (r.player.job for r in self.roles if r.player.job not in ended):
                    last = self.fleet.ended(job)
                    if last is not None:
                        ended[job] = last
                view = self._view(client, ended)
                if not view.jobs and time.monotonic() > heard_by:
                    said = "; ".join(f"{service.log.stem}: {tail(service.log)}" for service in self.fleet.services)
                    raise FleetError(f"the collector hears of no job. {said}")
                self.show(view)
        return ended

    def _view(self, client: httpx.Client, ended: Mapping[str, Mapping[str, Any]]) -> FleetView:
        return FleetView(
            jobs=_items(client, "jobs"),
            alerts=_items(client, "alerts"),
            ended=ended,
            start_us=round(self.start_at_s * 1e6),
            now_s=max((time.time() - self.start_at_s) * self.speed, 0.0),
            url=self.url,
        )

    def _settle(self, repository: Repository, ended: Mapping[str, Mapping[str, Any]]) -> None:
        """Wait until what was sent is stored and judged; whether it is, the verdict says."""
        deadline = time.monotonic() + SETTLE_WITHIN_S
        sent = sum(last["samples"] for last in ended.values())
        while time.monotonic() < deadline:
            self.fleet.check()
            if repository.counts().samples >= sent and all(self._judged(repository, job) for job in ended):
                return
            time.sleep(LOOK_EVERY_S)

    def _judged(self, repository: Repository, job: str) -> bool:
        """Whether the forecast has come to the second of a job's last sample."""
        forecasts = repository.forecasts(job=job).items
        return bool(forecasts) and all(
            f.forecast.time_us + JUDGE_EVERY_US > _last_time_us(repository, f.allocator) for f in forecasts
        )

    def _judge(self, repository: Repository, ended: Mapping[str, Mapping[str, Any]], began: float) -> Result:
        verdicts, stored, right = [], 0, True
        for role in self.roles:
            last = ended[role.player.job]
            samples = [s for ref in repository.allocators(job=role.player.job).items for s in _samples(repository, ref)]
            stored += len(samples)
            right = (
                right
                and len(samples) == last["samples"]
                and is_increasing(s.sequence for s in samples)
                and not last["unacknowledged"]
            )
            verdicts.append(_verdict(repository, role, last, samples))
        sent = sum(last["samples"] for last in ended.values())
        return Result(
            tuple(verdicts),
            sent,
            stored,
            right,
            time.monotonic() - began,
            self.url,
            self.roles[0].player.recording.parent,
        )


def _verdict(repository: Repository, role: Role, last: Mapping[str, Any], samples: Sequence[Sample]) -> Verdict:
    start_us: int = last["start_us"]

    def recorded_s(time_us: int) -> float:
        return round((time_us - start_us) / 1e6, 1)

    died_at_s = None if last["oom_us"] is None else recorded_s(last["oom_us"])
    criticals = [
        Critical(a.cause.value, recorded_s(a.at_us), None if a.resolved_us is None else recorded_s(a.resolved_us))
        for a in repository.alerts(job=role.player.job, limit=1000).items
        if a.severity == "critical" and a.state != "pending" and a.cause is not None
    ]
    alert = standing_at(criticals, died_at_s)
    total = next((s.device_total_bytes for s in samples if s.device_total_bytes is not None), 0)
    used = (
        (s.time_us, s.device_total_bytes - s.device_free_bytes)
        for s in samples
        if s.device_total_bytes and s.device_free_bytes is not None
    )
    usual_us = usual_rule_at(used, total)
    return Verdict(
        job=role.player.job,
        node=role.player.node,
        outcome="completed" if died_at_s is None else "oom",
        foreseeable=role.foreseeable,
        causes=role.causes,
        died_at_s=died_at_s,
        alert_at_s=alert.at_s if alert else None,
        cause=alert.cause if alert else None,
        usual_rule_at_s=None if usual_us is None else recorded_s(usual_us),
    )


def _samples(repository: Repository, ref: AllocatorRef) -> Iterator[Sample]:
    after = 0
    while found := [s for chunk in repository.samples(ref, after_sequence=after, limit=PAGE) for s in chunk.samples()]:
        yield from found
        after = found[-1].sequence


def _last_time_us(repository: Repository, ref: AllocatorRef) -> int:
    return max((s.time_us for s in _samples(repository, ref)), default=0)


def _items(client: httpx.Client, what: str) -> Sequence[Mapping[str, Any]]:
    """A list of the API; empty where the collector is too busy to answer, since the next look is soon."""
    try:
        answer = client.get(f"api/v1/{what}", params={"limit": 100})
        answer.raise_for_status()
    except httpx.HTTPError:
        return ()
    items: Sequence[Mapping[str, Any]] = answer.json()["items"]
    return items
