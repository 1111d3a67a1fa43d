"""What a replay under several settings came to, for people and as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass

from allocscope.allocator.simulator.history import Outcome
from allocscope.allocator.simulator.what_if import WhatIf
from allocscope.cli.advise_text import advice_lines
from allocscope.model import Advice
from allocscope.model.advice_plain import advice_to_plain
from allocscope.model.figures import size

_NAME = 27
_HEADINGS = ("reserved", "stranded", "flushes", "got/returned")


@dataclass(frozen=True, slots=True)
class Replays:
    """What was tried on one device's history."""

    what_if: WhatIf
    hazards: tuple[tuple[str, ...], ...]
    """By settings, in the order of their outcomes: what is known against them."""
    changes: tuple[tuple[str, Outcome], ...] = ()
    """To the program, under the recorded settings."""
    advice: Advice | None = None
    """None: none was asked for."""


def replays_as_json(found: Mapping[int, Replays]) -> dict[str, object]:
    """By device: how well the history is understood, and what came of its requests under each of the settings."""
    return {"devices": {str(index): _as_json(each) for index, each in found.items()}}


def _as_json(replays: Replays) -> dict[str, object]:
    each = replays.what_if
    history, exactness = each.history, each.exactness
    advice = replays.advice
    return {
        "torch": history.version,
        "rules_known": exactness.rules_known,
        "device_total_bytes": each.device_total_bytes,
        "total_is_shown": each.total_is_shown,
        "recorded_peak_bytes": each.recorded_peak_bytes,
        "requests": len(history.asked),
        "entries": history.entries,
        "explained": history.explained,
        "exact": history.exact,
        "differs_us": history.differs_us,
        "begins_in_the_middle": not history.is_whole,
        "ties": history.ties,
        "estimates": not exactness.exact,
        "exactness": exactness.words(),
        "recorded": {**asdict(exactness.recorded), "num_alloc_retries": history.num_alloc_retries},
        "recorded_oom_at": history.failed_at,
        "replays": [
            {"conf": conf, **asdict(outcome), "hazards": list(hazards)}
            for (conf, outcome), hazards in zip(each.outcomes, replays.hazards, strict=True)
        ],
        "changes": [{"change": change, **asdict(outcome)} for change, outcome in replays.changes],
        **({"advice": advice_to_plain(advice)} if advice is not None else {}),
    }


def replays_as_text(found: Mapping[int, Replays]) -> str:
    """Of each device a table with a line for each of the settings, and what is to be known of it; 80 columns and more."""
    return "\n\n".join("\n".join(_lines(index, each)) for index, each in found.items())


def _lines(index: int, replays: Replays) -> Iterator[str]:
    each = replays.what_if
    history = each.history
    yield f"device {index}, {_device(each)}: {len(history.asked):,} requests, by the rules of torch {history.version}"
    yield each.exactness.words()
    if history.ties:
        yield f"of equally large free blocks the history shows {history.ties} times which is older; that is taken from it"
    yield ""
    named = [(conf or "default", outcome) for conf, outcome in each.outcomes]
    named[0] = f"{named[0][0]} (as recorded)", named[0][1]
    named += [(f"with {change}", outcome) for change, outcome in replays.changes]
    yield from _table(named)
    yield from _hazards(named, replays.hazards if replays.advice is None else ((), *replays.hazards[1:]))
    for name, outcome in named:
        if outcome.failed_at is not None:
            yield ""
            yield from _failure(name, outcome, history.asked[0].time_us)
    if history.failed_at is not None and any(outcome.failed_at is None for _, outcome in named[1:]):
        yield ""
        yield (
            f"the recorded job ran out at request {history.failed_at:,}: what it would have asked for later is not known, "
            "so that one served to the end may still run out then"
        )
    if replays.advice is not None:
        yield ""
        yield f"advice: {replays.advice.kind.value.replace('_', ' ')}"
        yield from advice_lines(advice_to_plain(replays.advice))


def _device(each: WhatIf) -> str:
    total = each.device_total_bytes
    if total is None:
        return "of unknown size, so nothing can fail (--device-total)"
    return f"of {size(total)}" + (
        " for this allocator, as its last OutOfMemoryError shows" if each.total_is_shown else ""
    )


def _table(named: Iterable[tuple[str, Outcome]]) -> Iterator[str]:
    """The most that was reserved and stranded; how often the cache was flushed; calls to the driver; what became of it."""
    yield _row("settings", _HEADINGS, "failed at")
    for name, outcome in named:
        figures = (
            size(outcome.reserved_peak_bytes),
            size(outcome.stranded_peak_bytes),
            f"{outcome.num_alloc_retries:,}",
            f"{outcome.num_device_alloc:,}/{outcome.num_device_free:,}",
        )
        end = "–" if outcome.failed_at is None else f"{outcome.failed_at:,}"
        if len(name) > _NAME:
            yield name
        yield _row("" if len(name) > _NAME else name, figures, end)


def _hazards(named: Iterable[tuple[str, Outcome]], hazards: Iterable[tuple[str, ...]]) -> Iterator[str]:
    """What is known against the settings; advice tells by itself of those in force."""
    told = [f"{name}: {hazard}" for (name, _), found in zip(named, hazards, strict=False) for hazard in found]
    if told:
        yield ""
        yield from told


def _row(name: str, figures: tuple[str, ...], end: str) -> str:
    reserved, stranded, flushes, calls = figures
    return f"{name:<{_NAME}} {reserved:>10} {stranded:>10} {flushes:>7} {calls:>12} {end:>9}".rstrip()


def _failure(name: str, outcome: Outcome, began_us: int) -> Iterator[str]:
    """Where it ran out, and what PyTorch would have said."""
    at = outcome.failed_at or 0
    if outcome.undefined is not None:
        yield f"{name}: undefined at request {at:,}: {outcome.undefined}"
        return
    after_s = ((outcome.failed_us or began_us) - began_us) / 1e6
    yield f"{name}: OutOfMemoryError at request {at:,} for {size(outcome.failed_size or 0)}, after {after_s:.1f} s:"
    yield f"  {outcome.message}"
