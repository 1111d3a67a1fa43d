"""Advice held against replays that know nothing of it.

Of a recorded run it is right when

- it died, and settings or a change are advised: replayed with these, every request is served;
- it died, and nothing is said to help: under none of `SENSIBLE` is every request served;
- nothing failed, and no change is advised;
- nothing failed, and settings are advised: in the room that they are said to need every request is served, and as it was set one
  fails in it, or the cache is flushed less in the room that there was.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from allocscope.allocator.advice import Circumstances, advise, changed
from allocscope.allocator.recording import Recording, read_recording
from allocscope.allocator.settings import parse_settings
from allocscope.allocator.simulator import Device, Simulator
from allocscope.allocator.simulator.history import Asked, Outcome, ask_again, read_history
from allocscope.allocator.simulator.what_if import Source
from allocscope.model import Advice, AdviceKind

SENSIBLE = (
    "expandable_segments:True",
    "expandable_segments:True,roundup_power2_divisions:8",
    "max_split_size_mb:32",
    "max_split_size_mb:64",
    "max_split_size_mb:128",
    "max_split_size_mb:256",
    "max_split_size_mb:512",
    "max_split_size_mb:128,roundup_power2_divisions:8",
    "roundup_power2_divisions:2",
    "roundup_power2_divisions:4",
    "roundup_power2_divisions:8",
    "roundup_power2_divisions:16",
    "large_segment_size_mb:64",
    "large_segment_size_mb:128",
)
TORCH = "2.14.1"


@dataclass(frozen=True)
class Judged:
    """A run, what was advised, and why that is wrong."""

    name: str
    died: bool
    advice: Advice
    wrong: str | None
    """None: nothing is."""


def recordings(folder: Path) -> list[Path]:
    """RUN.run.json of each."""
    return sorted(folder.glob("*.run.json"))


def judge(path: Path) -> Judged:
    """One recording."""
    run = read_recording(path)
    source = Source(run.trace, run.segments, run.settings, run.conf, run.device_total_bytes, run.other_used_at)
    advice = advise(source, circumstances=Circumstances(TORCH))
    died = _died(path, run)
    return Judged(run.name, died, advice, what_is_wrong(run, asked_of(run), advice, died=died))


def asked_of(run: Recording) -> Sequence[Asked]:
    """What a run asked for."""
    return read_history(
        run.trace, run.settings, device_total_bytes=run.device_total_bytes, other_used=run.other_used_at, version=TORCH
    ).asked


def _died(path: Path, run: Recording) -> bool:
    """By the labels, which were not made from the history."""
    labels = path.parent / "labels.json"
    if labels.is_file():
        return bool(json.loads(labels.read_text())[run.name]["oom"])
    return any(entry.action == "oom" for entry in run.trace)


def what_is_wrong(run: Recording, asked: Sequence[Asked], advice: Advice, *, died: bool) -> str | None:
    """What of it is not so; None: nothing."""
    conf = run.conf if advice.conf is None else advice.conf
    if advice.kind in (AdviceKind.SETTING, AdviceKind.PROGRAM):
        then = changed(asked, advice.change) if advice.change else asked
        if (at := _replay(run, then, conf).failed_at) is not None:
            return f"with what is advised request {at} fails"
        return None if died else _no_gain(run, asked, advice, conf)
    if not died:
        return None if advice.kind is AdviceKind.NO_CHANGE else f"nothing failed, and the advice is {advice.kind.value}"
    if advice.kind is not AdviceKind.NOTHING:
        return f"it died, and the advice is {advice.kind.value}"
    helping = [conf for conf in SENSIBLE if _replay(run, asked, conf).failed_at is None]
    return f"it would be served with {', '.join(helping)}" if helping else None


def _no_gain(run: Recording, asked: Sequence[Asked], advice: Advice, conf: str) -> str | None:
    trial = next(each for each in advice.trials if each.conf == conf)
    if trial.needed_bytes is None:
        return "it does not say how much room it needs then"
    if _replay(run, asked, conf, trial.needed_bytes).failed_at is not None:
        return f"with what is advised a request fails in {trial.needed_bytes} bytes"
    if _replay(run, asked, run.conf, trial.needed_bytes).failed_at is not None:
        return None
    before, after = (_replay(run, asked, each).num_alloc_retries for each in (run.conf, conf))
    return None if after < before else "it gains nothing"


def _replay(run: Recording, asked: Sequence[Asked], conf: str, room_bytes: int | None = None) -> Outcome:
    total = run.device_total_bytes
    simulator = Simulator(parse_settings(conf), Device(total), version=TORCH)
    return ask_again(asked, simulator, run.other_used_at if room_bytes is None else lambda _: total - room_bytes)
