"""The report on a log's out-of-memory texts for people: the same failure on many ranks is one block."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from allocscope.allocator.messages import Figure, Judgement, OomMessage, OomReport, Origin, amount, judge
from allocscope.cli.prose import fold

PROCESSES = 8

_FIGURES = (
    ("requested", "asked for"),
    ("total", "device"),
    ("free", "free on the device"),
    ("allowed", "allowed"),
    ("limit", "limit"),
    ("this_process", "this process"),
    ("allocated", "allocated"),
    ("reserved", "reserved"),
    ("unallocated", "free in holes"),
    ("cached", "free in holes"),
    ("private_pools", "free in private pools"),
    ("active", "active"),
    ("other", "other allocations"),
)
_WHAT = {
    Origin.ALLOCATOR: "out of memory",
    Origin.ASYNC: "out of memory (cudaMallocAsync)",
    Origin.POLICY: "refused by policy",
    Origin.DRIVER: "the driver is out of memory",
    Origin.LIBRARY: "a library is out of memory",
    Origin.NCCL: "NCCL is out of memory",
    Origin.HOST: "the host is out of memory",
    Origin.MASKED: "out of memory, its text lost",
    Origin.ASSERT: "device-side assert",
    Origin.RETRY: "an attempt failed, and is made again",
}
_AMOUNT = re.compile(r"(?:about |at least )?\d[\d.]*(?: (?:[KMG]iB|bytes))?")


@dataclass(frozen=True, slots=True)
class _Told:
    """A message and its judgement."""

    message: OomMessage
    judgement: Judgement

    @property
    def who(self) -> tuple[int | None, str | None, int | None]:
        """Which process it is, as far as the log says."""
        return (self.message.rank, self.message.worker, self.message.device)

    @property
    def failure(self) -> tuple[object, ...]:
        """What makes two of them the same failure: all but the amounts, and as much asked for."""
        message, judgement = self.message, self.judgement
        known = tuple(name for name, _ in _FIGURES if getattr(message, name) is not None)
        reasons = tuple(_AMOUNT.sub("#", reason) for reason in judgement.reasons)
        return (message.origin, message.kind, judgement.verdict, message.requested, known, reasons)


def as_text(report: OomReport, width: int | None = None) -> str:
    """The report, sentences folded to a width; None: not folded."""
    blocks = _blocks([_Told(message, judge(message)) for message in report.messages])
    return "\n\n".join([fold(_summary(report), width), *(_block(block, width) for block in blocks)])


def _blocks(told: Iterable[_Told]) -> list[list[_Told]]:
    """The same failure of different processes together; what one process tells anew begins another block."""
    blocks: dict[tuple[object, ...], list[_Told]] = {}
    times: Counter[tuple[object, ...]] = Counter()
    for each in told:
        key = (each.failure, each.who)
        blocks.setdefault((each.failure, times[key]), []).append(each)
        times[key] += 1
    return list(blocks.values())


def _summary(report: OomReport) -> str:
    ooms = [message for message in report.messages if message.is_oom]
    if not report.messages:
        return f"no out-of-memory text in {_many(report.lines, 'line')}"
    parts = [f"{_many(len(ooms), 'out-of-memory text')} in {_many(report.lines, 'line')}"]
    repeated = sum(message.times for message in ooms) - len(ooms)
    if repeated:
        parts.append(f"{_many(repeated, 'repetition')} of them")
    if report.retries:
        parts.append(f"{_many(report.retries, 'failed attempt')} that PyTorch made again")
    if report.left_out:
        parts.append(f"{_many(report.left_out, 'more text')} left out")
    return ", ".join(parts)


def _many(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count:,} {what}s"


def _block(told: Sequence[_Told], width: int | None) -> str:
    first = told[0]
    reasons = [f"  {reason}" for reason in first.judgement.reasons]
    if any(each.judgement.reasons != first.judgement.reasons for each in told):
        reasons.append(f"  (these are the figures of line {first.message.line})")
    advice = [f"  try: {advice}" for advice in first.judgement.advice]
    prose = [fold(line, width) for line in (_title(told), *reasons)]
    return "\n".join([*prose, *_figures(told), *_processes(told), *(fold(line, width) for line in advice)])


def _title(told: Sequence[_Told]) -> str:
    messages = [each.message for each in told]
    who = [_numbers("line", [message.line for message in messages])]
    who.append(_numbers("rank", [message.rank for message in messages]))
    workers = list(dict.fromkeys(message.worker for message in messages if message.worker))
    who.append(", ".join(workers) if len(workers) <= 2 else f"{len(workers)} workers ({workers[0]}, …)")
    who.append(_numbers("device", [message.device for message in messages]))
    times = sum(message.times for message in messages)
    who.append(f"{times} times" if times > 1 else "")
    verdict = told[0].judgement.verdict.value.replace("_", " ").upper()
    return f"{', '.join(filter(None, who))}: {_WHAT[messages[0].origin]}: {verdict}"


def _numbers(what: str, numbers: Iterable[int | None]) -> str:
    """`rank 3`, `ranks 0-7, 9`, the lines from which to which; "" where none is known."""
    known = sorted({number for number in numbers if number is not None})
    if not known:
        return ""
    if len(known) == 1:
        return f"{what} {known[0]}"
    if what == "line":
        return f"lines {known[0]} to {known[-1]}"
    return f"{what}s {', '.join(_runs(known))}"


def _runs(known: Sequence[int]) -> list[str]:
    runs: list[list[int]] = []
    for number in known:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return [f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs]


def _figures(told: Sequence[_Told]) -> list[str]:
    rows = [(label, [getattr(each.message, name) for each in told]) for name, label in _FIGURES]
    return [f"  {label:<22} {_between(figures)}" for label, figures in rows if figures[0] is not None]


def _between(figures: Iterable[Figure]) -> str:
    known = [figure.bytes for figure in figures]
    least = f"{amount(min(known)):>14}"
    return least if min(known) == max(known) else f"{least} to {amount(max(known))}"


def _processes(told: Sequence[_Told]) -> list[str]:
    """Those that the text names; of several texts only where they name the same."""
    first = told[0]
    named = first.message.other_processes
    if any(each.message.other_processes != named for each in told):
        return ["  the processes that they name differ: see --json"]
    lines = []
    for process in named[:PROCESSES]:
        mine = " (this job itself)" if process.pid == first.judgement.own_pid else ""
        lines.append(
            f"  {f'process {process.pid}':<22} {amount(process.used.bytes) if process.used else 'not known':>14}{mine}"
        )
    if len(named) > PROCESSES:
        lines.append(f"  and {len(named) - PROCESSES:,} more processes")
    return lines
