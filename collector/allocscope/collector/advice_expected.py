"""The request that a forecast is about, once more at a recording's end: whether it would be served there.

A forecast looks further back than the some seconds of a recording: the largest request that a job makes may come once an epoch, or find
room just then. What can be said of it is what would become of it at the end of the recording, under the settings in force and under those
that were tried; not what else the job would have asked for before it. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from allocscope.allocator.advice import Circumstances
from allocscope.allocator.advice.circumstances import circumstances_of
from allocscope.allocator.advice.hazards import hazards_of_advice
from allocscope.allocator.advice.words import costs_of
from allocscope.allocator.conf import conf_in_force
from allocscope.allocator.settings import parse_settings
from allocscope.allocator.simulator.asked import Asked, pack
from allocscope.allocator.simulator.history import History
from allocscope.allocator.simulator.script import Script
from allocscope.allocator.simulator.what_if import Source
from allocscope.allocator.snapshot import DEFAULT_POOL, TraceEntry
from allocscope.collector.advice_words import ESTIMATE
from allocscope.model import Advice, AdviceKind, Trial
from allocscope.model.figures import size

_NEWEST_RELEASE = (2, 14)


def with_expected(
    advice: Advice,
    source: Source,
    history: History,
    script: Script,
    request_bytes: int | None,
    *,
    circumstances: Circumstances,
    time_left: Callable[[], bool],
) -> Advice:
    """The same advice, with what it means for such a request; bytes. `history` and `script` are what was read of the source.

    Unchanged where no request or no device's size is known, where the history ended in an OutOfMemoryError, so that it says by itself
    what did not fit, and where there was no time.
    """
    allocs = [entry for entry in source.trace if entry.action == "alloc"]
    if request_bytes is None or source.device_total_bytes is None or not allocs or not time_left():
        return advice
    if advice.kind is AdviceKind.UNKNOWN or not advice.trials or any(entry.action == "oom" for entry in source.trace):
        return advice
    largest = max(allocs, key=_size)
    expecting = _with(script, history, request_bytes, source.trace[-1], largest.stream)
    ends = dict(_ends(expecting, _in_order(advice), time_left))
    if ends[advice.trials[0].conf] and request_bytes <= largest.size:
        return advice
    hazards = circumstances_of(source, circumstances)
    return _qualified(advice, ends, _what(request_bytes, largest.size), hazards)


def _size(entry: TraceEntry) -> int:
    return entry.size


def _with(script: Script, history: History, request_bytes: int, last: TraceEntry, stream: int) -> Script:
    """What was asked for, and then the one that is expected."""
    key = max((each.key for each in history.asked), default=0) + 1
    expected = Asked("malloc", last.time_us, key, request_bytes, stream, DEFAULT_POOL)
    return replace(script, asked=pack((*history.asked, expected)))


def _in_order(advice: Advice) -> Iterator[Trial]:
    """As it was recorded, then what is advised, then the others that served everything and that nothing is known against."""
    recorded, *others = advice.trials
    yield recorded
    others = [trial for trial in others if trial.change is None and trial.failed_at is None and trial.blocked is None]
    yield from sorted(others, key=lambda trial: trial.conf != advice.conf)


def _ends(script: Script, trials: Iterable[Trial], time_left: Callable[[], bool]) -> Iterator[tuple[str, bool]]:
    """By settings: whether the last request is served. What is enough is enough."""
    for at, trial in enumerate(trials):
        if at and not time_left():
            return
        outcome = script.replay(trial.conf)
        served = outcome.failed_at is None and outcome.undefined is None
        yield trial.conf, served
        if served:
            return


def _what(request_bytes: int, largest_bytes: int) -> str:
    recorded = "" if request_bytes <= largest_bytes else f" (the largest that was recorded is of {size(largest_bytes)})"
    return f"A request of {size(request_bytes)}, which the forecast is about{recorded}, at the recording's end"


def _qualified(advice: Advice, ends: dict[str, bool], what: str, circumstances: Circumstances) -> Advice:
    def more(words: str) -> Advice:
        return replace(advice, summary=f"{advice.summary} {what} {words}.")

    recorded = advice.trials[0]
    served = next((conf for conf, is_served in ends.items() if is_served), None)
    if served is None:
        return more("fails under all settings that were tried")
    if served == recorded.conf:
        return more("is served as it is set, too")
    if advice.kind is AdviceKind.SETTING and served == advice.conf:
        return more("fails as it is set, and is served then")
    if advice.kind is AdviceKind.SETTING or advice.kind is AdviceKind.PROGRAM:
        return more(f"fails then, too; {_action(served)} serves it")
    estimate = "" if advice.is_exact else f" {ESTIMATE}"
    trial = next(each for each in advice.trials if each.conf == served)
    release = circumstances.release() or _NEWEST_RELEASE
    hazards = hazards_of_advice(conf_in_force(served, parse_settings(served)), circumstances, release)
    return replace(
        advice,
        kind=AdviceKind.SETTING,
        conf=served,
        summary=f"{_action(served)}. {what} fails as it is set, and is served then.{estimate}",
        gains=("the request that the forecast is about is served after those that were recorded",),
        costs=tuple(costs_of(trial, recorded, None)),
        hazards=tuple(dict.fromkeys((*advice.hazards, *hazards))),
    )


def _action(conf: str) -> str:
    return f"Set PYTORCH_CUDA_ALLOC_CONF={conf}" if conf else "Unset PYTORCH_CUDA_ALLOC_CONF"
