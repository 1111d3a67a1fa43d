"""What the demo shows: a live table on a terminal, lines elsewhere, and the verdict."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Protocol, Self

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from allocscope.cli.demo.run import FleetView, Result
from allocscope.cli.demo.verdict import Verdict
from allocscope.model.figures import duration, size

INTRO = (
    "Recordings of PyTorch jobs run again on three pretend nodes, many times as fast. Some of them are going to die of"
    " torch.OutOfMemoryError; Allocscope has to say so before, and to leave the others in peace."
)
WORDS = (
    "stranded: free, but in holes between live blocks, where a larger request does not fit, and which cannot be given back ·"
    " releasable: free, and can be given back · headroom: the largest request that would succeed now"
)
STATES = {
    "ok": ("ok", "green"),
    "watch": ("watch", "cyan"),
    "at_risk": ("at risk", "yellow"),
    "critical": ("critical", "bold red"),
}
PARTS: tuple[tuple[str, str, str, frozenset[str]], ...] = (
    ("live", "█", "green", frozenset({"requested", "rounding"})),
    ("waiting", "▞", "magenta", frozenset({"awaiting_free"})),
    ("stranded", "▓", "red", frozenset({"stranded"})),
    ("releasable", "░", "cyan", frozenset({"releasable", "private"})),
    ("others", "▄", "bright_black", frozenset({"outside", "other_processes", "driver"})),
    ("free", "·", "white", frozenset({"free"})),
)
"""How lines of the bill are drawn: a name, a character, a colour, the lines."""
TOLD = 7
"""So many of the latest alerts and deaths are shown under the table."""


COMMAND = sys.argv[0] if Path(sys.argv[0]).name == "allocscope" else f"{sys.executable} -m allocscope.cli"


class Screen(Protocol):
    """Where a run is shown."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
    def show(self, view: FleetView) -> None:
        """The fleet as it is now."""

    def verdict(self, result: Result) -> None:
        """What came of it."""

    def kept(self, url: str) -> None:
        """The fleet goes on."""


class News:
    """The alerts and deaths of a run, each told once."""

    def __init__(self) -> None:
        self._known: set[str] = set()

    def of(self, view: FleetView) -> list[Text]:
        """What is new in this view, in the order of the alerts' times."""
        told = []
        for alert in sorted(view.alerts, key=lambda a: int(a["at_us"])):
            if alert["severity"] == "critical" and alert["state"] == "firing" and alert["alert_id"] not in self._known:
                self._known.add(alert["alert_id"])
                told.append(_told(int(alert["at_us"]) - view.start_us, "critical", "bold red", _why(alert)))
        for job, last in view.ended.items():
            if job not in self._known:
                self._known.add(job)
                told.append(_end(job, last, view))
        return told


def _told(after_us: float, what: str, style: str, text: str) -> Text:
    return Text.assemble((f"{after_us / 1e6:5.0f} s  ", "dim"), (f"{what:<8}  ", style), text)


def _why(alert: Mapping[str, Any]) -> str:
    """The job and the cause first: a narrow terminal cuts the rest off."""
    return f"{alert['job']}: {alert['cause']}: {str(alert['summary']).rpartition(': ')[2]}"


def _end(job: str, last: Mapping[str, Any], view: FleetView) -> Text:
    if last["oom_us"] is None:
        return _told(view.now_s * 1e6, "finished", "green", job)
    return _told(int(last["oom_us"]) - view.start_us, "died", "red", f"{job}: torch.OutOfMemoryError")


class Terminal:
    """A live table."""

    def __init__(self) -> None:
        self._console = Console(highlight=False)
        self._live = Live(Text(f"{INTRO}\n\nstarting …"), console=self._console, auto_refresh=False, transient=True)
        self._news, self._told = News(), list[Text]()

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def show(self, view: FleetView) -> None:
        self._told = [*self._told, *self._news.of(view)][-TOLD:]
        for line in self._told:
            line.truncate(self._console.width, overflow="ellipsis")
        parts = (Text(INTRO), Text(), _table(view, self._console.width), _legend(), Text(WORDS, style="dim"), Text())
        self._live.update(Group(*parts, *self._told), refresh=True)

    def verdict(self, result: Result) -> None:
        _tell(self._console, result)

    def kept(self, url: str) -> None:
        _tell_kept(self._console, url)


class Headless:
    """Lines, as things happen."""

    def __init__(self, *, quiet: bool) -> None:
        self._console = Console(highlight=False, soft_wrap=True, quiet=quiet)
        self._news, self._told_url = News(), False

    def __enter__(self) -> Self:
        self._console.print(f"{INTRO}\n")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return

    def show(self, view: FleetView) -> None:
        if not self._told_url:
            self._told_url = True
            self._console.print(f"the page: {view.url}")
        for line in self._news.of(view):
            self._console.print(line)

    def verdict(self, result: Result) -> None:
        _tell(self._console, result)

    def kept(self, url: str) -> None:
        _tell_kept(self._console, url)


def _tell_kept(console: Console, url: str) -> None:
    console.print(f"\nThe fleet goes on, its jobs start anew as they end. The page: {url}   (Ctrl-C ends it)")
    console.print(f"Elsewhere: allocscope jobs --url {url}   (and risks, bill JOB, alerts, devices)")


# the table


Headings = Sequence[tuple[str, Literal["left", "right"]]]
COLUMNS: Headings = (
    ("job", "left"),
    ("device memory", "left"),
    ("state", "left"),
    ("cause", "left"),
    ("left", "right"),
    ("headroom", "right"),
    ("node", "left"),
)
"""The most important ones first: a narrow terminal has room for NARROW of them."""
NARROW = 5
NARROW_WIDTH, BAR_CELLS = 100, (16, 34)
"""Terminals narrower than this have the narrow table, and the shorter bar."""


def _grid(title: str, headings: Headings) -> Table:
    """A plain table; where there is no room for all of it, the first column folds."""
    table = Table(title=title, title_justify="left", title_style="dim", box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for number, (heading, side) in enumerate(headings):
        table.add_column(heading, justify=side, no_wrap=number > 0)
    return table


def _table(view: FleetView, width: int) -> Table:
    narrow = width < NARROW_WIDTH
    shown, cells = (NARROW, BAR_CELLS[0]) if narrow else (len(COLUMNS), BAR_CELLS[1])
    table = _grid(f"{view.now_s:.0f} s of recorded time    {view.url}", COLUMNS[:shown])
    for job in sorted(view.jobs, key=lambda j: str(j["job"])):
        table.add_row(*_row(job, view.ended.get(job["job"]), cells)[:shown])
    return table


def _row(job: Mapping[str, Any], last: Mapping[str, Any] | None, cells: int) -> tuple[str | Text, ...]:
    worst = job["worst"] or {}
    where = f"{worst.get('node') or '?'}/{worst['gpu']}" if worst.get("gpu") is not None else ", ".join(job["nodes"])
    if last is not None:
        end = Text("finished", style="green") if last["oom_us"] is None else Text("died of OOM", style="bold red")
        return job["job"], Text(), end, "", "", "", where
    forecast = worst.get("forecast") or {}
    name, style = STATES.get(job["state"] or "", ("", ""))
    return (
        job["job"],
        _bar(worst["bill"], cells) if worst.get("bill") else Text(),
        Text(name, style=style),
        job["cause"] or "",
        duration(forecast.get("seconds_to_oom")),
        size(forecast.get("headroom_bytes")),
        where,
    )


def _bar(bill: Mapping[str, Any], cells: int) -> Text:
    """The lines of a bill to scale."""
    text, ends, drawn = Text(), 0, 0
    for _, character, style, lines in PARTS:
        ends += sum(int(line["bytes"]) for line in bill["lines"] if line["line"] in lines)
        more = round(ends * cells / max(int(bill["total_bytes"]), 1)) - drawn
        text.append(character * more, style=style)
        drawn += more
    return text


def _legend() -> Text:
    return Text.assemble(*((f"{character} {name}   ", style) for name, character, style, _ in PARTS))


# the verdict


def _tell(console: Console, result: Result) -> None:
    table = _grid("\nWhat came of it, in seconds of recorded time", HEADINGS)
    for verdict in result.verdicts:
        table.add_row(*_judged(verdict))
    console.print(table)
    for line in _sums(result):
        console.print(line)
    for further in _further(result):
        console.print(Text(further), soft_wrap=True)


HEADINGS: Headings = (
    ("job", "left"),
    ("ended", "left"),
    ("critical", "right"),
    ("ahead", "right"),
    ("cause", "left"),
    ("used > 95 %", "left"),
    ("", "left"),
)
"""The last but one is the usual rule, held for five minutes. Together they fit 80 columns."""


def _judged(verdict: Verdict) -> tuple[str | Text, ...]:
    died = verdict.died_at_s is not None
    ended = Text(f"died {verdict.died_at_s:.0f} s", style="red") if died else Text("finished", style="green")
    usual = (
        "never" if verdict.usual_rule_at_s is None else f"{verdict.usual_rule_at_s:.0f} s" + ("" if died else ", false")
    )
    since = "" if verdict.alert_at_s is None else f"{verdict.alert_at_s:.0f} s"
    ahead = "" if verdict.lead_s is None else f"{verdict.lead_s:.0f} s"
    mark = Text("right", style="green") if verdict.right else Text("WRONG", style="bold red")
    return verdict.job, ended, since, ahead, verdict.cause or "", usual, mark


def _further(result: Result) -> list[str]:
    """Where to see more of a death by fragmentation."""
    holes = next((v for v in result.verdicts if v.died_at_s is not None and v.cause == "fragmentation"), None)
    if holes is None:
        return []
    recording = min(str(result.recordings / holes.job), os.path.relpath(result.recordings / holes.job), key=len)
    return [
        f"\nThe holes that {holes.job} died of, and what pinned them:",
        f"  {COMMAND} inspect {recording}.pickle.gz",
        "What other settings would have made of its requests:",
        f"  {COMMAND} replay {recording}.run.json --conf expandable_segments:True",
    ]


def _sums(result: Result) -> list[Text]:
    deaths = [v for v in result.verdicts if v.died_at_s is not None]
    lived = [v for v in result.verdicts if v.died_at_s is None]
    foreseen = sum(v.alert_at_s is not None for v in deaths)
    false = sum(v.alert_at_s is not None for v in lived)
    usual = sum(v.usual_rule_at_s is not None for v in deaths)
    usual_false = sum(v.usual_rule_at_s is not None for v in lived)
    kept = "every one once" if result.stored_right else "NOT every one once"
    return [
        Text(
            f"Allocscope foresaw {foreseen} of {len(deaths)} deaths, with {false} false alarms in {len(lived)} healthy jobs."
        ),
        Text(f"The usual rule (more than 95 % used for 5 min): {usual} of {len(deaths)}, with {usual_false} false."),
        Text(
            f"{result.samples_sent:,} samples were handed on, {result.samples_stored:,} are stored, {kept}. It took {duration(result.duration_s)}."
        ),
        Text("The demo shows what it promises.", style="bold green")
        if result.ok
        else Text("The demo does NOT show what it promises.", style="bold red"),
    ]
