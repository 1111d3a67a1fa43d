"""The alerts by name: what each says, how grave it is, how long it must hold, and when it holds.

Pure: figures in, conditions out. That a condition has held long enough is the states' business (`allocscope.alerts.states`);
that the ranks of a job are one alert, `allocscope.alerts.gather`'s. The rules shipped for Prometheus are made from this table
too (`allocscope.alerts.prometheus`), so that names, severities, times and words are the same whoever judges.

A forecast gives one trouble under one of five names, by its cause, at up to three severities: `critical` implies `warning`
implies `info`, each an alert of its own with its own beginning and end. Whoever delivers leaves out the lower ones while a
higher one of the same trouble fires (`allocscope.alerts.states.inhibited`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum

from allocscope.model import Cause, Event, Forecast, Sample, State
from allocscope.model.figures import duration, size

RUNBOOK = "docs/runbook"
"""Where the runbook lies in the repository; a URL to put before it is a setting of whoever tells."""

THRASHING_ROUNDS = 5
"""So many moments with a flush-and-retry round …"""
THRASHING_WINDOW_S = 300.0
"""… in so long are thrashing: one round now and then is how the allocator makes room, and costs little."""
NODE_SILENT_AFTER_S = 60.0
"""A daemon sends at least each second; a minute outlasts a restart of it."""
NODE_FORGOTTEN_AFTER_S = 24 * 3600.0
"""A node that is silent for so long was taken away."""
THE_COLLECTOR = "the collector"
"""Who lost data, where it was no node."""
UNKNOWN = "unknown"
"""In place of a figure."""
LONGEST_REASON = 160
"""Characters of a reason that somebody else wrote: a summary is one line of a page."""


class Severity(Enum):
    """How grave: info is for looking at, a warning for today, critical for now."""

    INFO = "info"
    WARNING = "warning"
    CRITICAL = "critical"

    @property
    def level(self) -> int:
        """0 info, 1 warning, 2 critical."""
        return list(Severity).index(self)


class Incident(Enum):
    """What has come about. Alerts of one incident of one job are one page (deploy/alertmanager groups by both)."""

    MEMORY = "memory"
    """A job runs out of memory, or has."""
    UNWATCHED = "unwatched"
    """We do not see, or lose what we saw."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One alert's name at one severity. Templates are filled by `str.format` with words (`_condition`)."""

    name: str
    severity: Severity
    incident: Incident
    hold_for_s: float
    """So long it must hold before it fires."""
    keep_firing_for_s: float
    """So long it must not hold before it resolves."""
    summary: str
    description: str
    cause: Cause | None = None
    family: str = ""
    """Rules of one family are names of one and the same trouble. "": a family of its own."""
    outlives_its_job: bool = False
    """It tells of what has happened: it stands for its keep-firing time though its job has ended meanwhile."""

    def labels(self) -> dict[str, str]:
        """Those that all its alerts have."""
        cause = {"cause": self.cause.value} if self.cause else {}
        return {"severity": self.severity.value, **cause, "incident": self.incident.value}

    @property
    def runbook_url(self) -> str:
        """Relative to the repository."""
        return f"{RUNBOOK}/{self.name}.md"

    def runbook_url_at(self, address: str | None) -> str:
        """Below an address that shows the repository's files, where there is one."""
        return f"{address.rstrip('/')}/{self.runbook_url}" if address else self.runbook_url


@dataclass(frozen=True, slots=True)
class Subject:
    """What an alert is about: an allocator, a job, or a node."""

    node: str | None = None
    job: str | None = None
    rank: int | None = None
    gpu: int | None = None
    """The device's index on its node."""
    uuid: str | None = None
    pid: int | None = None
    """Only where the rank is not known: it tells processes of one job on one device apart."""

    def labels(self) -> dict[str, str]:
        """What is known, as labels."""
        known = {name: getattr(self, name) for name in ("node", "job", "rank", "gpu", "uuid", "pid")}
        return {name: str(value) for name, value in known.items() if value is not None}

    def __str__(self) -> str:
        """For people: "rank 3 of llama on n7, GPU 2"."""
        rank = None if self.rank is None else f"rank {self.rank}"
        gpu = None if self.gpu is None else f"GPU {self.gpu}"
        who = " of ".join(filter(None, (rank, self.job)))
        where = ", ".join(filter(None, (self.node, gpu))) or self.uuid
        return " on ".join(filter(None, (who, where))) or "somebody"


@dataclass(frozen=True, slots=True)
class Condition:
    """A rule that holds now, for somebody, in words."""

    rule: Rule
    subject: Subject
    summary: str
    description: str
    first: Subject | None = None
    """Of a job: the rank that goes first, which the words are about."""
    ranks: int = 1
    """Of a job: how many of its allocators it is about."""
    advice: str | None = None
    """What would help, from a replay of its own requests; None: nothing is known of that."""

    @property
    def trouble(self) -> tuple[str, Severity, Subject]:
        """The same for all names of one and the same trouble at one severity."""
        return self.rule.family or self.rule.name, self.rule.severity, self.subject

    @property
    def labels(self) -> dict[str, str]:
        """The alert's identity for the world outside."""
        return {"alertname": self.rule.name, **self.rule.labels(), **self.subject.labels()}

    @property
    def description_with_advice(self) -> str:
        """For receivers who show people the description only."""
        return self.description if self.advice is None else f"{self.description} {ADVICE.format(advice=self.advice)}"

    @property
    def place(self) -> dict[str, str]:
        """Where to look first, which may change while the alert stands: node, rank, gpu, uuid as far as they are known."""
        return self.first.labels() if self.first else {}


ADVICE = "A replay of its own requests says: {advice}"
"""Said behind a description."""
FORECAST = "forecast"
"""The family of what is foreseen."""

NAMES = {
    Cause.FRAGMENTATION: "AllocscopeFragmentationOOMRisk",
    Cause.CAPACITY: "AllocscopeCapacityOOMRisk",
    Cause.GROWTH: "AllocscopeMemoryGrowth",
    Cause.LEAK: "AllocscopeMemoryLeak",
    Cause.NEIGHBOUR: "AllocscopeNeighbourPressure",
}

_SUMMARIES = {
    Cause.FRAGMENTATION: "{who} {outlook}, by fragmentation: {forecast}",
    Cause.CAPACITY: "{who} {outlook}: it needs more than the device has: {forecast}",
    Cause.GROWTH: "{who} {outlook}: what a step needs grows: {forecast}",
    Cause.LEAK: "{who} {outlook}, by a leak: {forecast}",
    Cause.NEIGHBOUR: "{who} {outlook}: another process on the device grows: {forecast}",
}

_DESCRIPTIONS = {
    Cause.FRAGMENTATION: (
        "Live memory and the request together would fit the device, but what is free lies in holes that cannot be given"
        " back. Headroom {headroom}, largest request {request}, time left {left}. Often expandable_segments:True"
        " helps; settings are read at the start, so restart from a checkpoint before it dies. `allocscope inspect` shows in a"
        " PyTorch snapshot what pins the holes."
    ),
    Cause.CAPACITY: (
        "The job needs more than the device has, holes or not. Headroom {headroom}, largest request {request}, time left"
        " {left}. A smaller batch, a shorter sequence, sharding or offloading help; allocator settings do not."
    ),
    Cause.GROWTH: (
        "Each step needs more than the one before, and the trend runs into the device's end. Headroom {headroom}, largest"
        " request {request}, time left {left}. Look for lengths, batches or caches that grow; bound them, or checkpoint."
    ),
    Cause.LEAK: (
        "Memory that nothing uses again grows step after step. Headroom {headroom}, largest request {request}, time left"
        " {left}. A PyTorch snapshot with history shows who allocated what is never freed: often a kept loss, a list of"
        " outputs or a retained graph."
    ),
    Cause.NEIGHBOUR: (
        "Memory of this device that the job could have had goes to another process. Headroom {headroom}, largest request"
        " {request}, time left {left}. `allocscope bill {job}` shows how much, and whose it is where that has a probe;"
        " `nvidia-smi` on the node names the others. Move one of the two."
    ),
}

_OUTLOOKS = {
    Severity.INFO: "may come to run out of memory",
    Severity.WARNING: "is at risk of running out of memory",
    Severity.CRITICAL: "is about to run out of memory",
}

_HOLDS = {Severity.INFO: (60.0, 300.0), Severity.WARNING: (30.0, 120.0), Severity.CRITICAL: (10.0, 60.0)}
"""Hold and keep-firing times. The forecast has a hysteresis of its own; these keep one odd moment from waking somebody, and
cost a critical alert no more than ten seconds of its lead."""

OTHERS = "; {others} more of the job's ranks with it"
"""Said behind a job's summary, which is about the rank that goes first."""

RENAME_AFTER_S = 60.0
"""An alert that fires keeps its name until another cause has held for so long."""

FORECAST_RULES: dict[tuple[Cause, Severity], Rule] = {
    (cause, severity): Rule(
        NAMES[cause],
        severity,
        Incident.MEMORY,
        hold_for_s=_HOLDS[severity][0],
        keep_firing_for_s=_HOLDS[severity][1],
        summary=_SUMMARIES[cause].replace("{outlook}", _OUTLOOKS[severity]),
        description=_DESCRIPTIONS[cause],
        cause=cause,
        family=FORECAST,
    )
    for cause in Cause
    for severity in Severity
}

THRASHING = Rule(
    "AllocscopeAllocatorThrashing",
    Severity.WARNING,
    Incident.MEMORY,
    hold_for_s=0.0,
    keep_firing_for_s=300.0,
    summary="{who} flushes its allocator's cache again and again: {rounds} times in the last {window}",
    description=(
        "Requests found no room, so the allocator gave back all that it had cached and asked the driver anew. Each time"
        " the device waits, and the job slows down; the next request may not fit at all. See `allocscope bill {job}`."
    ),
)

OOM = Rule(
    "AllocscopeOOM",
    # What happened is not foreseen any more: critical is kept for what can still be prevented.
    Severity.WARNING,
    Incident.MEMORY,
    hold_for_s=0.0,
    keep_firing_for_s=600.0,
    summary="{who} ran out of memory{figures}",
    description=(
        "A torch.OutOfMemoryError was raised; the job may have caught it. {message}`allocscope oom` explains"
        " the message in the job's log."
    ),
    outlives_its_job=True,
)

NODE_SILENT = Rule(
    "AllocscopeNodeSilent",
    Severity.WARNING,
    Incident.UNWATCHED,
    hold_for_s=0.0,  # the silence itself is what has held
    keep_firing_for_s=0.0,
    summary="nothing was heard of node {node} for {silent}",
    description=(
        "The daemon of the node does not send: it, the node or the way between is down. Its jobs run on, unwatched; their"
        " samples wait in its spool. Look at the daemon's log and /metrics there."
    ),
)

DROPPING_DATA = Rule(
    "AllocscopeDroppingData",
    Severity.WARNING,
    Incident.UNWATCHED,
    hold_for_s=0.0,
    keep_firing_for_s=300.0,
    summary="data is lost on the way from {who}: {dropped} {what} dropped ({why})",
    description=(
        "A bounded buffer ran over: what came in between is missing from series, and forecasts are blind for that while."
        " Look at allocscope_dropped_total for where, and at whether the next one on the way can be reached."
    ),
)

RULES: tuple[Rule, ...] = (*FORECAST_RULES.values(), THRASHING, OOM, NODE_SILENT, DROPPING_DATA)
"""All of them."""

_STATES = {State.WATCH: Severity.INFO, State.AT_RISK: Severity.WARNING, State.CRITICAL: Severity.CRITICAL}


def alerts_of(forecast: Forecast, subject: Subject) -> tuple[Condition, ...]:
    """What of a forecast is for somebody to hear: one condition for its severity and each below, gravest first."""
    worst = _STATES.get(forecast.state)
    if worst is None:
        return ()
    cause = forecast.cause or Cause.CAPACITY  # a cause not given must not silence the alert
    severities = [s for s in reversed(Severity) if s.level <= worst.level]
    words = {
        "forecast": forecast.summary or "no figures",
        "headroom": size(forecast.headroom_bytes, UNKNOWN),
        "request": size(forecast.request_bytes, UNKNOWN),
        "left": duration(forecast.seconds_to_oom, UNKNOWN),
    }
    return tuple(_condition(FORECAST_RULES[cause, severity], subject, words) for severity in severities)


@dataclass(frozen=True, slots=True)
class RetryRounds:
    """When an allocator lately flushed its cache and tried again. Handed from sample to sample."""

    total: int | None = None
    """num_alloc_retries of the latest sample that knew it."""
    times_us: tuple[int, ...] = ()
    """The samples that saw it grow, oldest first, within the window; no more than are needed."""

    def observe(self, sample: Sample) -> RetryRounds:
        """A counter that goes backwards was reset: nothing is known of what happened in between."""
        now_us, total = sample.time_us, sample.num_alloc_retries
        if total is None or total == self.total:
            return self
        if self.total is None or total < self.total:
            return RetryRounds(total, self.times_us)
        return RetryRounds(total, (*self._lately(now_us), now_us)[-4 * THRASHING_ROUNDS :])

    def _lately(self, now_us: int) -> tuple[int, ...]:
        """Without those of the future: the clock was set back."""
        oldest_us = now_us - int(THRASHING_WINDOW_S * 1e6)
        return tuple(t for t in self.times_us if oldest_us < t <= now_us)

    def alerts(self, now_us: int, subject: Subject) -> tuple[Condition, ...]:
        """Thrashing, or nothing."""
        rounds = len(self._lately(now_us))
        if rounds < THRASHING_ROUNDS:
            return ()
        return (_condition(THRASHING, subject, {"rounds": str(rounds), "window": duration(THRASHING_WINDOW_S)}),)


def oom_alert(event: Event, subject: Subject) -> Condition:
    """An OOM that happened; holds at that moment only."""
    figures = f": {size(event.requested_bytes, UNKNOWN)} were asked for, {size(event.device_free_bytes, UNKNOWN)} of the device were free"
    message = _line(event.message or "", 300)
    return _condition(OOM, subject, {"figures": figures, "message": f"{message} " if message else ""})


def node_alerts(node: str, silent_for_s: float, silent_after_s: float = NODE_SILENT_AFTER_S) -> tuple[Condition, ...]:
    """Whether a node is silent, by the listener's clock."""
    if silent_for_s < silent_after_s:
        return ()
    return (_condition(NODE_SILENT, Subject(node=node), {"silent": duration(silent_for_s)}),)


def dropping_alert(subject: Subject, dropped_count: int | None, what: str, why: str) -> Condition:
    """Data was lost on the way from a node; holds at that moment only.

    `subject` is who of the node lost it, or nobody: then the collector did. `what` and `why` are words for people, or somebody's
    message.
    """
    dropped = "an unknown number of" if dropped_count is None else str(dropped_count)
    who = str(subject) if subject.node else THE_COLLECTOR
    words = {"who": who, "dropped": dropped, "what": what, "why": _line(why, LONGEST_REASON)}
    return replace(_condition(DROPPING_DATA, subject, words), subject=Subject(node=subject.node), first=subject)


def _condition(rule: Rule, subject: Subject, words: Mapping[str, str]) -> Condition:
    known = {"who": str(subject), "node": subject.node or "unknown", "job": subject.job or "JOB", **words}
    return Condition(rule, subject, rule.summary.format_map(known), rule.description.format_map(known))


def _line(text: str, longest: int) -> str:
    """The first line of what somebody else wrote, no longer than that."""
    line = next((line.strip() for line in text.splitlines() if line.strip()), "")
    return line if len(line) <= longest else f"{line[: longest - 1]}…"
