"""Histories that PyTorch recorded are explained entry by entry, and what they ask for can be asked again."""

import pytest

from allocscope.allocator.errors import SettingsError
from allocscope.allocator.recording import read_recording
from allocscope.allocator.settings import AllocatorSettings, parse_settings
from allocscope.allocator.simulator import Device, Simulator
from allocscope.allocator.simulator.beginning import beginning_of
from allocscope.allocator.simulator.history import ask_again, read_history
from allocscope.allocator.simulator.seed import as_told
from allocscope.allocator.simulator.what_if import Source, shown_total, what_if
from allocscope.allocator.snapshot import SnapshotBlock, SnapshotSegment, read_snapshot
from tests.allocator.made import FOLDERS as RECORDINGS
from tests.allocator.made import (
    SHIPPED,
    alloc,
    asked_free,
    completed_free,
    freed,
    gave_back,
    got,
    mapped,
    oom,
    unmapped,
)
from tests.simulator.recorded import FOLDERS

MIB = 1 << 20
DEFAULT = AllocatorSettings()
RUNS = [SHIPPED / f"{name}.run.json" for name in ("streams-2-3890", "neighbour-2-6562", "varlen-1-3372")]
RUNS += [path for folder in RECORDINGS[1:] for path in sorted(folder.glob("*.run.json"))]
SNAPSHOTS = sorted(
    path
    for folder in FOLDERS
    for path in (folder / "snapshots").glob("*.pickle.gz")
    if not path.name.startswith("torch113")  # which does not tell addresses
)
ANY = 1 << 40
A = 1 << 30
"""An address."""


def history(entries, settings=DEFAULT, *, total=1024 * MIB, **more):
    return read_history(entries, settings, device_total_bytes=total, other_used=lambda _: 0, **more)


def kinds(found):
    return [each.what for each in found.asked]


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.name.removesuffix(".run.json"))
def test_a_whole_recorded_run_is_explained_to_the_byte(path):
    """Tens of thousands of entries of the real allocator, with retries, waiting frees, OutOfMemoryErrors."""
    run = read_recording(path)
    found = read_history(
        run.trace, run.settings, device_total_bytes=run.device_total_bytes, other_used=run.other_used_at
    )
    assert found.exact
    assert found.entries > 500
    assert (found.failed_at is None) is not any(entry.action == "oom" for entry in run.trace)


@pytest.mark.parametrize("path", SNAPSHOTS, ids=lambda path: path.name.removesuffix(".pickle.gz"))
def test_private_pools_graphs_and_waiting_frees_are_explained_to_the_byte(path):
    snapshot = read_snapshot(path.read_bytes(), path.name)
    for index, trace in enumerate(snapshot.traces):
        segments = [as_told(segment) for segment in snapshot.segments if segment.device == index]
        found = history(trace, snapshot.settings, total=ANY, segments=segments)
        assert found.exact
        assert found.entries > 0 or not trace


@pytest.mark.parametrize("cut", [0.3, 0.77])
@pytest.mark.parametrize("name", ["streams-2-3890", "varlen-1-3372"])
def test_a_history_that_begins_in_the_middle_is_explained_from_there_on(name, cut):
    run = read_recording(SHIPPED / f"{name}.run.json")
    trace = run.trace[int(cut * len(run.trace)) :]
    segments = [as_told(segment) for segment in run.segments]
    found = read_history(
        trace,
        run.settings,
        device_total_bytes=run.device_total_bytes,
        other_used=run.other_used_at,
        segments=segments,
    )
    assert found.exact
    assert found.entries == len(trace)


def test_what_was_there_before_is_walked_back_to():
    trace = [*freed(0), got(20 * MIB, 20 * MIB), alloc(20 * MIB, 3 * MIB)]
    trace[0] = trace[0]._replace(size=5 * MIB)
    trace[1] = trace[1]._replace(size=5 * MIB)
    after = [
        told(0, [(20 * MIB, 0, "inactive")]),
        told(20 * MIB, [(3 * MIB, 3 * MIB, "active_allocated"), (17 * MIB, 0, "inactive")]),
    ]
    assert beginning_of(trace, after, DEFAULT) == [
        told(0, [(5 * MIB, 5 * MIB, "active_allocated"), (15 * MIB, 0, "inactive")])
    ]
    found = history(trace, segments=after)
    segment, blocks = ["hole", "free"], ["malloc", "hole"]
    assert kinds(found) == [*segment, *blocks, "empty_cache", "free", "began", "free", "malloc"]
    assert found.asked[0].size == 20 * MIB
    assert not found.is_whole


def test_holes_of_before_the_history_are_there_when_it_is_asked_again():
    """Nine segments of 200 MiB with 110 MiB in each, and two streams whose segments of 150 MiB only fit one after the other."""
    device_bytes = 9 * 200 * MIB + 200 * MIB
    allocator = Simulator(DEFAULT, Device(device_bytes), version="2.14.1", trace=True)
    for address in [allocator.malloc(200 * MIB) for _ in range(9)]:
        allocator.free(address)
    for _ in range(9):
        allocator.malloc(110 * MIB)
    before = len(allocator.trace)
    retries = allocator.stats()["num_alloc_retries"]
    for _ in range(10):
        for stream in (0, 1):
            allocator.free(allocator.malloc(150 * MIB, stream))
    retries = allocator.stats()["num_alloc_retries"] - retries
    assert retries == 19
    found = history(allocator.trace[before:], total=device_bytes, segments=allocator.segments())
    assert found.exact
    again = ask_again(found.asked, Simulator(DEFAULT, Device(device_bytes), version="2.14.1"), lambda _: 0)
    assert (again.failed_at, again.num_alloc_retries) == (None, 19)
    assert again.stranded_peak_bytes == 9 * 90 * MIB
    assert again.reserved_peak_bytes == 9 * 200 * MIB + 150 * MIB
    expandable = parse_settings("expandable_segments:True")
    compact = ask_again(found.asked, Simulator(expandable, Device(device_bytes), version="2.14.1"), lambda _: 0)
    assert (compact.failed_at, compact.num_alloc_retries) == (None, 1), "once, for the pages of the holes"


def test_what_was_given_back_though_it_would_have_served_was_an_empty_cache():
    """Also where the driver had too little for the request while it was still there."""
    allocator = Simulator(DEFAULT, Device(500 * MIB), version="2.14.1", trace=True)
    for _ in range(2):
        allocator.free(allocator.malloc(400 * MIB))
        allocator.empty_cache()
        allocator.free(allocator.malloc(250 * MIB))
    found = history(allocator.trace, total=500 * MIB)
    assert found.exact
    assert kinds(found) == [
        *["malloc", "free", "empty_cache", "malloc", "free"],
        *["malloc", "free", "empty_cache", "malloc", "free"],
    ]


def test_slack_belongs_to_the_block_before_it():
    """No free block of the large pool is as small as 1 MiB."""
    trace = [entry._replace(size=19 * MIB + 512) for entry in freed(0)]
    before = beginning_of(trace, [told(0, [(20 * MIB, 0, "inactive")])], DEFAULT)
    assert before == [told(0, [(20 * MIB, 19 * MIB + 512, "active_allocated")])]


def test_pages_are_walked_back_to():
    page = 20 * MIB
    trace = [unmapped(page, page), mapped(3 * page, page)]
    after = [
        told(0, [(page, page, "active_allocated")], expandable=True),
        told(2 * page, [(page, page, "active_allocated"), (page, 0, "inactive")], expandable=True),
    ]
    before = beginning_of(trace, after, parse_settings("expandable_segments:True"))
    blocks = [(page, page, "active_allocated"), (page, 0, "inactive"), (page, page, "active_allocated")]
    assert before == [told(0, blocks, expandable=True)]


def test_pages_that_went_together_are_of_the_small_pool_where_large_pages_do_not_fit():
    after = [told(0, [(20 * MIB, 20 * MIB, "active_allocated")], expandable=True)]
    before = beginning_of([unmapped(60 * MIB, 4 * MIB)], after, parse_settings("expandable_segments:True"))
    assert [(each["address"], each["segment_type"]) for each in before] == [(0, "large"), (60 * MIB, "small")]


def told(address, blocks, *, kind="large", expandable=False):
    at, listed = address, []
    for size, requested, state in blocks:
        listed.append({"address": at, "size": size, "requested_size": requested, "state": state})
        at += size
    return {
        "address": address,
        "total_size": at - address,
        "stream": 0,
        "segment_type": kind,
        "segment_pool_id": (0, 0),
        "is_expandable": expandable,
        "blocks": listed,
    }


def test_segments_given_back_between_requests_were_an_empty_cache():
    found = history([got(A, 20 * MIB), alloc(A, 20 * MIB), *freed_of(A, 20 * MIB), gave_back(A, 20 * MIB)])
    assert kinds(found) == ["malloc", "free", "empty_cache"]
    assert found.exact


def freed_of(address, size):
    return [entry._replace(size=size) for entry in freed(address)]


ROUND = [got(A, 40 * MIB), alloc(A, 40 * MIB), *freed_of(A, 40 * MIB), gave_back(A, 40 * MIB)]
ROUND += [got(A, 60 * MIB), alloc(A, 60 * MIB)]


def test_segments_given_back_for_want_of_memory_were_the_allocation_s_own_doing():
    found = history(ROUND, total=80 * MIB)
    assert kinds(found) == ["malloc", "free", "malloc"]
    assert found.exact


def test_segments_given_back_where_there_was_enough_were_an_empty_cache():
    found = history(ROUND, total=1024 * MIB)
    assert kinds(found) == ["malloc", "free", "empty_cache", "malloc"]
    assert found.exact


def test_a_free_that_does_not_complete_at_once_waits_and_is_done_before_the_next_allocation():
    trace = [got(A, 40 * MIB), alloc(A, 40 * MIB), asked_free(A)._replace(size=40 * MIB)]
    trace += [completed_free(A)._replace(size=40 * MIB), alloc(A, 30 * MIB)]
    trace.insert(3, got(A + 100 * MIB, 2 * MIB))
    trace.insert(4, alloc(A + 100 * MIB, 512))
    found = history(trace)
    assert kinds(found) == ["malloc", "wait", "free", "malloc", "done", "malloc"]
    assert found.exact


def test_what_waited_until_a_flush_is_done_elsewhere_with_the_next_that_is_done_by_itself():
    """Where other settings do not flush, it must not wait for ever."""
    simulator = Simulator(DEFAULT, Device(100 * MIB), trace=True)
    flushed = simulator.malloc(60 * MIB)
    simulator.record_stream(flushed, 1)
    simulator.free(flushed)
    simulator.malloc(512)  # or it would look like a free that waited for nothing
    simulator.free(simulator.malloc(50 * MIB))  # for want of room; done before, the other would have served it
    assert simulator.stats()["num_alloc_retries"] == 1
    by_itself = simulator.malloc(MIB)
    simulator.record_stream(by_itself, 1)
    simulator.free(by_itself)
    simulator.malloc(MIB)
    simulator.catch_up()
    simulator.malloc(MIB)
    found = history(simulator.trace, total=100 * MIB)
    assert found.exact
    assert [(each.what, each.key) for each in found.asked if each.what in ("wait", "done")] == [
        ("wait", 1),
        ("wait", 4),
        ("done", 1),
        ("done", 4),
    ]


POOL, OTHER_POOL = (0, 1), (0, 2)


def asked_of(simulator, *, total=200):
    """What a history, explained to the end, was read to ask for but allocations and frees, with the pool of each."""
    found = history(simulator.trace, total=total * MIB)
    assert found.exact
    return [(each.what, each.pool_id) for each in found.asked if each.what not in ("malloc", "free")]


def used_pool(simulator, pool_id):
    """Two blocks of it, of segments of their own; the second is free."""
    simulator.create_pool(pool_id)
    kept, freed = (simulator.malloc_in(pool_id, size * MIB) for size in (12, 14))
    simulator.free(freed)
    return kept


def test_a_private_pool_that_ends_is_not_taken_for_a_flush():
    """Its memory goes to another pool's request, for which there was none, and everybody's cache stays."""
    simulator = Simulator(DEFAULT, Device(100 * MIB), trace=True)
    simulator.free(simulator.malloc(60 * MIB))
    used_pool(simulator, POOL)
    simulator.release_pool(POOL, empty=True)
    simulator.malloc_in(OTHER_POOL, 20 * MIB)
    assert asked_of(simulator, total=100) == [("end_pool", POOL)]


def test_a_private_pool_that_nobody_used_any_more_goes_when_the_cache_is_emptied():
    simulator = Simulator(DEFAULT, Device(200 * MIB), trace=True)
    used_pool(simulator, POOL)
    simulator.free(simulator.malloc(60 * MIB))
    simulator.release_pool(POOL)
    simulator.empty_cache()
    simulator.malloc(MIB)
    assert asked_of(simulator) == [("free_pool", POOL), ("empty_cache", (0, 0))]


def test_a_private_pool_that_goes_after_everybody_s_frees_were_waited_for_goes_with_the_cache():
    simulator = Simulator(DEFAULT, Device(200 * MIB), trace=True)
    used_pool(simulator, POOL)
    waiting = simulator.malloc(30 * MIB)
    simulator.malloc(MIB)
    simulator.record_stream(waiting, 1)
    simulator.free(waiting)
    simulator.release_pool(POOL)
    simulator.malloc(MIB)
    simulator.empty_cache()
    simulator.malloc(MIB)
    assert asked_of(simulator) == [("wait", (0, 0)), ("free_pool", POOL), ("empty_cache", (0, 0))]


def test_a_free_before_a_private_pool_s_end_did_not_wait_for_a_flush():
    simulator = Simulator(DEFAULT, Device(200 * MIB), trace=True)
    used_pool(simulator, POOL)
    simulator.malloc(512, 1)  # with one stream nothing waits
    simulator.free(simulator.malloc(30 * MIB))
    simulator.release_pool(POOL, empty=True)
    simulator.malloc(30 * MIB)
    assert asked_of(simulator) == [("end_pool", POOL)]


def test_what_tensors_kept_of_a_private_pool_goes_when_the_cache_is_emptied():
    simulator = Simulator(DEFAULT, Device(200 * MIB), trace=True)
    kept = used_pool(simulator, POOL)
    simulator.release_pool(POOL, empty=True)
    simulator.malloc(MIB)
    simulator.free(kept)
    simulator.empty_cache()
    simulator.malloc(MIB)
    assert asked_of(simulator) == [("end_pool", POOL), ("empty_cache", (0, 0))]


def test_private_pools_may_be_given_back_in_any_order():
    """Which one PyTorch empties first is a hash map's doing."""
    simulator = Simulator(DEFAULT, Device(200 * MIB), trace=True)
    for pool_id in (POOL, OTHER_POOL):
        used_pool(simulator, pool_id)
    simulator.free(simulator.malloc(60 * MIB))
    for pool_id in (OTHER_POOL, POOL):
        simulator.release_pool(pool_id)
    simulator.empty_cache()
    simulator.malloc(MIB)
    gone = [entry for entry in simulator.trace if entry.action == "segment_free"]
    assert [entry.pool_id for entry in gone] == [(0, 0), OTHER_POOL, POOL]
    at = simulator.trace.index(gone[1])
    simulator.trace[at : at + 2] = gone[:0:-1]
    assert asked_of(simulator) == [("free_pool", POOL), ("free_pool", OTHER_POOL), ("empty_cache", (0, 0))]


def test_a_pool_that_makes_room_for_its_own_request_is_still_in_use():
    """max_split_size_mb gives back its large free blocks (ALLOCATOR.md 2.7)."""
    settings = parse_settings("max_split_size_mb:20")
    simulator = Simulator(settings, Device(100 * MIB), trace=True)
    simulator.create_pool(POOL)
    simulator.free(simulator.malloc_in(POOL, 60 * MIB))
    simulator.malloc_in(POOL, 90 * MIB)
    found = history(simulator.trace, settings, total=100 * MIB)
    assert found.exact
    assert kinds(found) == ["malloc", "free", "malloc"]


def test_a_failure_is_remembered():
    trace = [got(A, 40 * MIB), alloc(A, 40 * MIB), oom(60 * MIB, 40 * MIB)]
    found = history(trace, total=80 * MIB)
    assert found.exact
    assert found.failed_at == 1
    outcome = ask_again(found.asked, Simulator(DEFAULT, Device(80 * MIB)), lambda _: 0)
    assert outcome.failed_at == 1
    assert "Tried to allocate 60.00 MiB" in (outcome.message or "")


def test_where_a_history_is_not_explained_is_told():
    """A segment that no rule asks for."""
    found = history([got(A, 20 * MIB), alloc(A, 3 * MIB), got(A + 20 * MIB, 22 * MIB), alloc(A + 20 * MIB, 3 * MIB)])
    assert (found.explained, found.entries, found.exact) == (2, 4, False)


def test_the_version_is_the_one_that_explains_most():
    """The second of two equal blocks lies lower, and is taken: as up to 2.11."""
    trace = [got(A, 30 * MIB), alloc(A, 30 * MIB), got(A + 30 * MIB, 30 * MIB), alloc(A + 30 * MIB, 30 * MIB)]
    trace += [*freed_of(A, 30 * MIB), gave_back(A, 30 * MIB), got(A, 30 * MIB), alloc(A, 30 * MIB)]
    trace += [*freed_of(A, 30 * MIB), *freed_of(A + 30 * MIB, 30 * MIB)]
    assert history([*trace, alloc(A, 30 * MIB)]).version == "2.11.0"
    assert history([*trace, alloc(A + 30 * MIB, 30 * MIB)]).version == "2.14.1"
    assert history([*trace, alloc(A, 30 * MIB)], version="2.13.0").exact is False


def test_other_settings_would_have_saved_a_run():
    """This one died of holes, which expandable segments do not have."""
    path = next((SHIPPED.parent / "recordings").glob("islands_grow-*.run.json"))
    run = read_recording(path)
    source = Source(run.trace, run.segments, run.settings, run.conf, run.device_total_bytes, run.other_used_at)
    found = what_if(source, ["expandable_segments:True"])
    (as_it_was, recorded), (conf, expandable) = found.outcomes
    assert found.history.exact
    assert (as_it_was, conf) == ("", "expandable_segments:True")
    assert recorded.failed_at == found.history.failed_at is not None
    assert expandable.failed_at is None
    assert expandable.reserved_peak_bytes < recorded.reserved_peak_bytes


def test_settings_that_cannot_be_read_are_refused():
    with pytest.raises(SettingsError):
        what_if(Source([], [], DEFAULT, ""), ["max_split_size_mb:x"])


def test_a_block_in_a_state_that_is_not_known_is_taken_for_waiting():
    segment = SnapshotSegment(0, 0, 2 * MIB, 0, "small", (0, 0), False, (SnapshotBlock(0, 2 * MIB, 9, "active_odd"),))
    assert as_told(segment)["blocks"][0]["state"] == "active_pending_free"


def test_a_failure_shows_how_much_there_was():
    trace = [got(0, 40 * MIB), alloc(0, 40 * MIB), oom(60 * MIB, 24 * MIB), gave_back(0, 40 * MIB)]
    assert shown_total(trace, []) == 64 * MIB
    assert shown_total(trace[:2], []) is None
