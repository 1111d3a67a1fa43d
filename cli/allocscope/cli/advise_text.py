"""Advice for people."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from allocscope.cli.capture_owner import printable
from allocscope.cli.figures import moment
from allocscope.model.figures import size

if TYPE_CHECKING:
    from allocscope.cli.ask import Json  # no more than its type: `replay --advise` asks no collector

_PHRASES = (("gains", "it gains"), ("costs", "it costs"), ("hazards", "to be known"))
_NAME = 21


def nothing_text(found: Json) -> str:
    """Why there is none."""
    if found["under_way"]:
        return f"no advice yet; it is on its way: allocscope advise {shell_word(found['job'])} --wait"
    comes = (
        "no advice: it comes of a replay of the job's requests, whose history is recorded when a forecast turns at_risk"
    )
    if found["is_made_here"]:
        return f"{comes}, or now: allocscope advise {shell_word(found['job'])} --fresh"
    return f"{comes}; this collector itself replays nothing (its setting `advice` is false)"


def shell_word(job: str) -> str:
    """A job's name as a command takes it."""
    return printable(shlex.quote(job))


def as_text(found: Json) -> str:
    """The newest of each allocator: what is recommended, why, and what was tried."""
    return "\n\n".join(map(_text, _newest(found["items"])))


def _newest(items: Iterable[Json]) -> list[Json]:
    """Lists begin with what came last."""
    by_allocator: dict[tuple[object, ...], Json] = {}
    for one in items:
        whose = (one["node"], one["uuid"], one["process_id"] if one["rank"] is None else one["rank"])
        by_allocator.setdefault(whose, one)
    return list(by_allocator.values())


def _text(one: Json) -> str:
    head = f"{_whose(one)}, {moment(one['made_us'])} UTC: {one['kind'].replace('_', ' ')}"
    return "\n".join([head, *advice_lines(one)])


def advice_lines(one: Json) -> list[str]:
    """Advice as plain values have it (`advice_to_plain`), indented, without its kind."""
    lines = [f"  {printable(one['summary'], 2000)}"]
    if one["conf"] is not None and one["kind"] in ("setting", "program"):
        lines.append(f"  PYTORCH_CUDA_ALLOC_CONF={printable(one['conf'])}")
    for name, said in _PHRASES:
        lines += [f"  {said}: {printable(phrase, 1000)}" for phrase in one[name]]
    if one["trials"]:
        numbers = _numbers(one["trials"])
        lines += [f"  {_how_sure(one)}", *_table(one["trials"], numbers)]
        lines += [f"  ({number}) not advised: {printable(why, 1000)}" for why, number in numbers.items()]
    return lines


def _whose(one: Json) -> str:
    rank = "" if one["rank"] is None else f" rank {one['rank']}"
    gpu = one["uuid"] if one["gpu"] is None else f"GPU {one['gpu']}"
    return printable(f"{one['job']}{rank} on {one['node']}, {gpu}")


def _how_sure(one: Json) -> str:
    """The words over the table."""
    by = f"by the rules of PyTorch {one['torch_version']}" if one["torch_version"] else "by PyTorch's rules"
    checked = printable(one["exactness"], 1000) or ("exact" if one["is_exact"] else "an estimate")
    return f"{one['requests']:,} recorded requests, {by}; {checked}"


def _numbers(trials: Iterable[Json]) -> dict[str, int]:
    """Why some are not advised, numbered as the notes below the table are."""
    reasons = dict.fromkeys(trial["blocked"] for trial in trials if trial["blocked"] is not None)
    return {why: number for number, why in enumerate(reasons, 1)}


def _table(trials: Iterable[Json], numbers: Mapping[str, int]) -> Iterator[str]:
    """A line each, of 80 columns; two where its name is a long one."""
    yield _line("settings", "needs", "reserved", "stranded", "flushes", "calls", "fails at")
    for at, trial in enumerate(trials):
        name = printable(trial["conf"]) or "default"
        name += " (as recorded)" if at == 0 else ""
        name += f" with {printable(trial['change'])}" if trial["change"] else ""
        name += f" ({numbers[trial['blocked']]})" if trial["blocked"] is not None else ""
        if len(name) > _NAME:
            yield f"  {name}"
        yield _line(
            "" if len(name) > _NAME else name,
            size(trial["needed_bytes"]),
            size(trial["reserved_peak_bytes"]),
            size(trial["stranded_peak_bytes"]),
            f"{trial['num_alloc_retries']:,}",
            f"{trial['num_device_alloc'] + trial['num_device_free']:,}",
            "–" if trial["failed_at"] is None else f"{trial['failed_at']:,}",
        )


def _line(name: str, needs: str, reserved: str, stranded: str, flushes: str, calls: str, end: str) -> str:
    return f"  {name:<{_NAME}} {needs:>10} {reserved:>10} {stranded:>10} {flushes:>7} {calls:>6} {end:>8}"
