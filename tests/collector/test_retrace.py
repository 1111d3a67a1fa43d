"""What was judged before a restart is known again as it was, to the last word, and goes on as it would have."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest

import allocscope.cli
from allocscope.alerts.forecast import of_samples
from allocscope.alerts.states import Alert
from allocscope.allocator.player import Seen
from allocscope.allocator.recording import read_recording
from allocscope.collector.fleet import Change, Fleet, Told, Watched
from allocscope.collector.retrace import Past, retrace
from allocscope.model import AllocatorRef, BlockMap, Device, Event, EventKind, Forecast, Process, Sample
from tests.collector.made import player

RECORDINGS = Path(allocscope.cli.__path__[0]) / "recordings"
NAMES = ("leak-1-3771", "islands_grow-4-5518", "neighbour-2-6562", "varlen-1-3372")
RETIRE_AFTER_US = 300_000_000
HEARD_US = 1_800_000_000_000_000


@pytest.fixture(scope="module")
def runs() -> list[tuple[Process, list[Seen]]]:
    """Two ranks of each job: the second lives half as fast, and takes two samples in some seconds."""
    return [run for name in NAMES for run in _ranks(name)]


def _ranks(name: str) -> Iterator[tuple[Process, list[Seen]]]:
    recording = read_recording(RECORDINGS / f"{name}.run.json")
    seen = list(player(recording))
    for rank, pace in enumerate((1.0, 0.6)):
        device = Device(f"GPU-{name}-{rank}", 0, total_bytes=recording.device_total_bytes)
        process = Process(
            f"{name}-{rank}", name, 1, "host", recording.start_us, rank=rank, devices=(device,),
            allocator_conf=recording.conf,
        )  # fmt: skip
        yield process, [_at_pace(item, recording.start_us, pace, device.uuid) for item in seen]


def _at_pace(item: Seen, start_us: int, pace: float, uuid: str) -> Seen:
    time_us = start_us + int((item.time_us - start_us) * pace)
    if isinstance(item, Event):
        return replace(item, time_us=time_us, device_uuid=uuid)
    return replace(item, time_us=time_us)


def fleet_of(runs: list[tuple[Process, list[Seen]]]) -> tuple[Fleet, list[Watched]]:
    fleet = Fleet(retire_after_us=RETIRE_AFTER_US)
    watched = [
        fleet.watch(AllocatorRef(process.process_id, process.devices[0].uuid), process, "n1") for process, _ in runs
    ]
    for one in watched:
        one.heard_us = HEARD_US
    return fleet, watched


def past(watched: Watched, told: Sequence[Told]) -> Past:
    samples = [item for item in told if isinstance(item, Sample)]
    others = [item for item in told if not isinstance(item, Sample)]
    return Past(watched, of_samples(samples), samples[-1] if samples else None, others)


def known(
    fleet: Fleet,
) -> list[tuple[int, int, Sample | None, str | None, int | None, Forecast | None, tuple[Alert, ...]]]:
    return [
        (w.sequence, w.judged_us, w.sample, w.died, w.largest_free_block_bytes, w.watch.forecast, w.watch.alerts)
        for w in fleet.watched.values()
    ]


def went_on(fleet: Fleet, watched: list[Watched], left: list[list[Told]]) -> list[list[Change]]:
    return [
        fleet.tell(zip(watched, left, strict=True)),
        *(fleet.tick(HEARD_US + second * 1_000_000, {}) for second in range(1, 700, 25)),
    ]


@pytest.mark.parametrize("part", [0.05, 0.7, 1.0])
def test_it_comes_to_the_same_as_it_did_when_it_was_told(runs, part):
    """Also with a map, an error or nothing at the end, and the errors that the programs survived."""
    cut = [int(part * len(seen)) for _, seen in runs]
    before = [_with_survived_errors(seen)[:end] for (_, seen), end in zip(runs, cut, strict=True)]
    left: list[list[Told]] = [_with_survived_errors(seen)[end:] for (_, seen), end in zip(runs, cut, strict=True)]
    told, watched = fleet_of(runs)
    told.tell(zip(watched, before, strict=True))
    again, watched_again = fleet_of(runs)
    retrace(again, [past(*one) for one in zip(watched_again, before, strict=True)])
    assert known(again) == known(told)
    assert again.gathering.standing() == told.gathering.standing()
    assert again.ooms == told.ooms
    assert part < 0.5 or told.gathering.standing(), "nothing was to be told"
    assert went_on(again, watched_again, left) == went_on(told, watched, left)


def _with_survived_errors(seen: list[Seen]) -> list[Told]:
    """One more after each two hundred things; numbered anew."""
    told: list[Told] = []
    for at, item in enumerate(seen, 1):
        told.append(replace(item, sequence=len(told) + 1))
        if at % 200 == 0:
            process_id = item.process_id if isinstance(item, Event) else ""
            told.append(Event(process_id, len(told) + 1, item.time_us, EventKind.OOM, requested_bytes=at << 20))
    return told


def test_of_an_allocator_of_which_nothing_or_only_a_map_was_kept(runs):
    maps = [item for item in chain(*(seen for _, seen in runs)) if isinstance(item, BlockMap)]
    fleet, watched = fleet_of(runs)
    retrace(fleet, [past(watched[0], []), past(watched[1], maps[:1]), past(watched[2], runs[2][1][:50])])
    assert (watched[0].sequence, watched[1].sequence) == (0, maps[0].sequence)
    assert watched[2].watch.forecast is not None
