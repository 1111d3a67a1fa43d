"""Recorded runs as a probe would have seen them, and what is known of how they ended."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from allocscope.allocator.errors import UndefinedStateError
from allocscope.allocator.player import Player, Seen
from allocscope.allocator.recording import Recording, read_recording
from allocscope.allocator.settings import parse_settings
from allocscope.allocator.simulator import Device, Simulator
from allocscope.allocator.simulator.history import Asked, ask_again, read_history
from allocscope.allocator.simulator.seed import as_told
from allocscope.allocator.snapshot import TraceEntry
from allocscope.model import BlockMap, Event, EventKind, Sample

SEED = 20
EXPANDABLE = "expandable_segments:True"
TOO_SMALL = 0.06
FORESEEABLE_US = 200_000_000
"""Before that nothing could be seen in time."""


@dataclass(frozen=True, slots=True)
class Run:
    """A run, seen from its beginning to its end."""

    name: str
    family: str
    conf: str
    device_total_bytes: int
    seen: tuple[Seen, ...]
    oom_us: int | None
    """When it died; None: it did not."""
    foreseeable: bool
    """Whether there was something to see in time."""
    healthy: bool
    causes: tuple[str, ...]
    """Any of which names rightly what went wrong."""

    @property
    def samples(self) -> Iterator[Sample]:
        """In the order of time."""
        return (each for each in self.seen if isinstance(each, Sample))


def read_runs(folder: Path, *, expandable: bool = False) -> list[Run]:
    """All runs of a folder; `expandable`: as they would have gone with expandable segments."""
    labels = json.loads((folder / "labels.json").read_text())
    wanted = [(folder, name, label, expandable) for name, label in sorted(labels.items())]
    with ProcessPoolExecutor() as pool:
        return [pickle.loads(run) for run in pool.map(_read, wanted) if run]


def _read(wanted: tuple[Path, str, dict[str, Any], bool]) -> bytes | None:
    folder, name, label, expandable = wanted
    recording = read_recording(folder / f"{name}.run.json")
    changed = _expandable(recording, died=label["oom"]) if expandable else recording
    if changed is None:
        return None
    seen = tuple(Player(changed, SEED))
    died = label["oom"]
    oom_us = label["oom_us"] if died else None
    if expandable:
        ooms = [each.time_us for each in seen if isinstance(each, Event) and each.kind is EventKind.OOM]
        oom_us = ooms[-1] if ooms else None
    run = Run(
        name=name,
        family=label["family"],
        conf=changed.conf,
        device_total_bytes=changed.device_total_bytes,
        seen=seen,
        oom_us=oom_us,
        foreseeable=label["foreseeable"] and oom_us is not None and oom_us - recording.start_us >= FORESEEABLE_US,
        healthy=not died and not label["doomed"] and oom_us is None,
        causes=_causes(label["cause"] or (), expandable=expandable),
    )
    return pickle.dumps(run)


def _causes(told: Sequence[str], *, expandable: bool) -> tuple[str, ...]:
    """With expandable segments what died of holes dies of what it needs."""
    return (*told, "growth", "capacity") if expandable and "fragmentation" in told else tuple(told)


def _expandable(recording: Recording, *, died: bool) -> Recording | None:
    """With expandable segments. What died without them would mostly have gone on for longer than there is a record of: so its device
    is one that is too small by this much for what it came to need."""
    changed = under(recording, EXPANDABLE, recording.device_total_bytes)
    if changed is None or not died:
        return changed
    reserved = needed = 0
    for entry in changed.trace:
        reserved += _GIVES.get(entry.action, 0) * entry.size
        needed = max(needed, reserved + recording.other_used_at(entry.time_us))
    return under(recording, EXPANDABLE, needed - round(TOO_SMALL * needed))


_GIVES = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}


def under(recording: Recording, conf: str, device_total_bytes: int) -> Recording | None:
    """The same requests under other settings, on such a device, as the simulator has it; None: it cannot tell."""
    history = read_history(
        recording.trace,
        recording.settings,
        device_total_bytes=recording.device_total_bytes,
        other_used=recording.other_used_at,
        segments=[as_told(segment) for segment in recording.segments],
    )
    settings = parse_settings(conf)
    simulator = Simulator(settings, Device(device_total_bytes), version=history.version, trace=True)
    trace: list[TraceEntry] = []

    def stamped(asked: tuple[Asked, ...]) -> Iterator[Asked]:
        time_us = recording.start_us
        for each in asked:
            trace.extend(entry._replace(time_us=time_us) for entry in simulator.trace[len(trace) :])
            time_us = each.time_us
            yield each
        trace.extend(entry._replace(time_us=time_us) for entry in simulator.trace[len(trace) :])

    try:
        outcome = ask_again(stamped(history.asked), simulator, recording.other_used_at)
    except UndefinedStateError:
        return None
    end_us = outcome.failed_us or recording.end_us
    trace.extend(entry._replace(time_us=end_us) for entry in simulator.trace[len(trace) :])
    if not trace:
        return None
    return replace(
        recording,
        conf=conf,
        settings=settings,
        trace=tuple(trace),
        end_us=end_us,
        device_total_bytes=device_total_bytes,
    )


Variant = Callable[[Run], Run]


def as_it_was(run: Run) -> Run:
    """A sample a second, a block map each ten."""
    return run


def each_five_seconds(run: Run) -> Run:
    """A sample in five."""
    return _keep(run, lambda index, each: not isinstance(each, Sample) or index % 5 == 4)


def one_in_ten_missing(run: Run) -> Run:
    """Every tenth or so sample lost, by chance from a fixed seed."""
    import random

    draw = random.Random(run.name)
    return _keep(run, lambda _, each: not isinstance(each, Sample) or draw.random() >= 0.1)


def maps_each_minute(run: Run) -> Run:
    """A block map in six."""
    maps = iter(range(10**9))
    return _keep(run, lambda _, each: not isinstance(each, BlockMap) or next(maps) % 6 == 5)


def daemon_restarts(run: Run) -> Run:
    """In the middle nothing comes for five seconds; then all of it at once, the last two seconds twice."""
    first, last = run.seen[0].time_us, run.seen[-1].time_us
    middle = (first + last) // 2
    at = next(index for index, each in enumerate(run.seen) if each.time_us >= middle)
    again = tuple(each for each in run.seen[max(at - 3, 0) : at])
    return replace(run, seen=(*run.seen[:at], *again, *run.seen[at:]))


def collector_restarts(run: Run) -> Run:
    """In the middle a minute is lost."""
    first, last = run.seen[0].time_us, run.seen[-1].time_us
    middle = (first + last) // 2
    return _keep(run, lambda _, each: not middle <= each.time_us < middle + 60_000_000)


VARIANTS: dict[str, Variant] = {
    "as it was": as_it_was,
    "a sample each 5 s": each_five_seconds,
    "10 % of samples missing": one_in_ten_missing,
    "block maps each 60 s": maps_each_minute,
    "a daemon restarts in the middle, and sends again": daemon_restarts,
    "a minute in the middle is lost": collector_restarts,
}


def _keep(run: Run, keeps: Callable[[int, Seen], bool]) -> Run:
    """What is kept, and always the end."""
    last = len(run.seen) - 3
    return replace(run, seen=tuple(each for i, each in enumerate(run.seen) if i >= last or keeps(i, each)))
