"""What histories come to is what the real allocator had in the end: every block to the byte, and every counter."""

from collections import Counter
from collections.abc import Iterable
from operator import attrgetter
from typing import Any

import pytest

from allocscope.allocator.chronicle.events import (
    Kind,
    Release,
)
from allocscope.allocator.chronicle.history import DeviceHistory
from allocscope.allocator.recording import read_recording
from allocscope.allocator.simulator.replay import case_of, serve, simulator_of
from allocscope.allocator.snapshot import read_snapshot
from tests.allocator.made import alloc, got, recordings
from tests.log.told import MIB, A, TruthCase, history, segment
from tests.simulator.recorded import files
from tests.snapshots.made import DATA, MORE

TRUTH = files("truth")
SNAPSHOTS = sorted(path for folder in (DATA, *([MORE] if MORE else [])) for path in folder.glob("*.pickle*"))


@pytest.mark.parametrize("path", recordings(), ids=attrgetter("name"))
def test_a_whole_run_comes_to_the_blocks_of_its_snapshot(path):
    run = read_recording(path)
    found = DeviceHistory(0, run.trace, run.segments, run.settings)
    assert sum(1 for _ in found.events()) > len(run.trace) // 2
    assert (found.contradictions, found.difference()) == (0, None)


@pytest.mark.parametrize("path", SNAPSHOTS, ids=attrgetter("name"))
def test_a_snapshots_history_comes_to_its_blocks(path):
    """PyTorch 2.1 to 2.14; private pools, waiting frees, expandable segments, histories that begin late."""
    snapshot = read_snapshot(path.read_bytes(), path.name, tolerant=True)
    for device, trace in enumerate(snapshot.traces):
        own = tuple(each for each in snapshot.segments if each.device == device)
        found = DeviceHistory(device, trace, own, snapshot.settings)
        list(found.events())
        assert (found.contradictions, found.difference()) == (0, None)


@pytest.mark.parametrize("path", TRUTH, ids=attrgetter("name"))
def test_events_come_to_the_counters_of_the_real_allocator(path):
    case = TruthCase(path)
    found = case.history()
    counted = counters(found.events(), one_stream=len(case.streams) == 1)
    assert found.estimate_from is None
    assert counted == {name: case.stats[name] for name in counted}


@pytest.mark.parametrize("path", TRUTH, ids=attrgetter("name"))
def test_a_flush_and_an_empty_cache_are_told_apart_where_it_is_known_what_the_device_had_left(path):
    """Each empty_cache that gave something back, but where garbage collection gives back as well and can look the same."""
    case = TruthCase(path)
    causes = Counter(event.kind for event in case.history().events() if isinstance(event, Release))
    failed_only = case.stats["num_ooms"]
    assert case.stats["num_alloc_retries"] - failed_only <= causes[Kind.FLUSH] <= case.stats["num_alloc_retries"]
    if not case.settings.gc_threshold:
        assert causes[Kind.EMPTY_CACHE] == empty_caches(case.told)


@pytest.mark.parametrize("path", TRUTH[:3], ids=attrgetter("name"))
@pytest.mark.parametrize("from_entry", [0.3, 0.6, 0.95])
def test_a_ring_that_wrapped_comes_to_the_same_blocks(path, from_entry):
    case = TruthCase(path)
    rest = case.trace[int(len(case.trace) * from_entry) :]
    found = DeviceHistory(0, rest, case.segments, case.settings)
    assert sum(1 for _ in found.events()) > 0
    assert (found.contradictions, found.difference()) == (0, None)


def test_a_block_that_the_snapshot_has_otherwise_is_told_and_from_when_on_it_is_an_estimate():
    trace = [got(A, 20 * MIB), alloc(A, 5 * MIB), alloc(A + 5 * MIB, 2 * MIB)]
    blocks = [(5 * MIB, 5 * MIB, "live"), (3 * MIB, 3 * MIB, "live"), (12 * MIB, 0, "free")]
    found = history(trace, [segment(A, blocks)])
    list(found.events())
    difference = found.difference()
    assert difference is not None
    assert (difference.blocks, difference.address) == (3, A + 5 * MIB)
    assert found.estimate_from == 2


class Split:
    """inactive_split of memory_stats(), from events alone (ALLOCATOR.md 2.9, 3.1); expandable segments do not count."""

    def __init__(self):
        self.segments: dict[int, int] = {}
        self.figures: Counter[str] = Counter()

    def allocated(self, event):
        if self.counts(event.address):
            whole = self.segments.get(event.address) == event.hole_bytes
            if event.left_bytes:
                self.change(*((1, event.left_bytes) if whole else (0, -event.block_bytes)))
            elif not whole:
                self.change(-1, -event.hole_bytes)

    def freed(self, address: int, size: int, absorbed: list[int]) -> None:
        if self.counts(address):
            whole = self.segments.get(address) == size
            self.change((not whole) - len(absorbed), (0 if whole else size) - sum(absorbed))

    def counts(self, address):
        return any(start <= address < start + size for start, size in self.segments.items())

    def change(self, count, size):
        for name, by in (("inactive_split.all", count), ("inactive_split_bytes.all", size)):
            self.figures[f"{name}.current"] += by
            self.figures[f"{name}.allocated"] += max(by, 0)


def counters(events: Iterable[Any], *, one_stream: bool) -> dict[str, int]:
    """memory_stats(), from events alone."""
    stats: Counter[str] = Counter()
    split, free = Split(), None
    for event in events:
        if free is not None:
            merged = event if event.kind == Kind.MERGE else None
            address, size = free if merged is None else (merged.address, merged.block_bytes)
            split.freed(
                address, size, [] if merged is None else [*filter(None, (merged.before_bytes, merged.behind_bytes))]
            )
            free = None
        match event.kind:
            case Kind.ALLOC:
                stats["allocation.all.allocated"] += 1
                stats["allocated_bytes.all.allocated"] += event.block_bytes
                stats["requested_bytes.all.allocated"] += event.requested_bytes
                split.allocated(event)
            case Kind.FREE | Kind.WAIT:
                stats["allocation.all.freed"] += 1
                stats["allocated_bytes.all.freed"] += event.block_bytes
            case Kind.SEGMENT_ALLOC | Kind.SEGMENT_MAP:
                stats["num_device_alloc"] += 1
                stats["reserved_bytes.all.allocated"] += event.block_bytes
                if not event.expandable:
                    stats["segment.all.allocated"] += 1
                    split.segments[event.address] = event.block_bytes
            case Kind.SEGMENT_FREE | Kind.SEGMENT_UNMAP:
                stats["num_device_free"] += 1
                stats["reserved_bytes.all.freed"] += event.block_bytes
                if not event.expandable:
                    stats["segment.all.freed"] += 1
                    del split.segments[event.address]
            case Kind.OOM:
                stats["num_ooms"] += 1
        if event.kind in (Kind.FREE, Kind.WAIT_OVER):
            stats["active.all.freed"] += 1
            stats["active_bytes.all.freed"] += event.block_bytes
            stats["requested_bytes.all.freed"] += event.requested_bytes
            free = (event.address, event.block_bytes)
    if free is not None:
        split.freed(free[0], free[1], [])
    if one_stream:  # the order of frees of several streams that complete together is not told
        return dict(stats + split.figures)
    return dict(stats) | {name: split.figures[name] for name in split.figures if name.endswith("current")}


class CountingCaches:
    """A simulator that counts the empty_cache calls that gave something back."""

    def __init__(self, simulator):
        self.simulator, self.count = simulator, 0

    def __getattr__(self, name):
        return getattr(self.simulator, name)

    def empty_cache(self):
        before = self.simulator.stats()["num_device_free"]
        self.simulator.empty_cache()
        self.count += self.simulator.stats()["num_device_free"] > before


def empty_caches(told):
    """How many of a case's empty_cache calls gave something back."""
    case = case_of(told, "case")
    counting: Any = CountingCaches(simulator_of(case))
    serve(counting, case.requests)
    return counting.count
