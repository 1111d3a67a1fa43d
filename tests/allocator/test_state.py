"""The rebuilt state is PyTorch's own: every counter and block after every entry (ALLOCATOR.md 12), every recording's end to the byte.

ALLOCSCOPE_TEST_RECORDINGS and ALLOCSCOPE_TEST_TRUTH name folders with more recordings, and with cases of the real allocator.
"""

import gzip
import json
import os
from pathlib import Path

import pytest

from allocscope.allocator.errors import TraceError
from allocscope.allocator.recording import read_recording
from allocscope.allocator.settings import AllocatorSettings, parse_settings
from allocscope.allocator.state import AllocatorState
from tests.allocator.made import (
    MIB,
    alloc,
    asked_free,
    completed_free,
    entry,
    freed,
    gave_back,
    got,
    label_of,
    mapped,
    oom,
    recordings,
    unmapped,
)

SMALL, LARGE, OWN, OTHER = 0x7F0000000000, 0x7F0010000000, 0x7F0020000000, 0x7F0040000000
EXPANDABLE = parse_settings("expandable_segments:True")
DEFAULT = AllocatorSettings()


def state_after(*steps, settings=DEFAULT, room_bytes=None, device_total_bytes=24 << 30) -> AllocatorState:
    state = AllocatorState(settings, device_total_bytes=device_total_bytes)
    state.room_bytes = room_bytes
    for step in steps:
        state.apply(step if isinstance(step, list) else [step])
    return state


def test_every_counter_after_every_call_is_as_pytorch_gives_it():
    """The worked example, measured on the real allocator: columns as there, and the calls for memory and back."""
    calls = [
        ([got(SMALL, 2097152), alloc(SMALL, 1000)], "1000 1024 1024 2097152 2096128 1 1 1 1/0"),
        ([got(LARGE, 20971520), alloc(LARGE, 3145728)], "3146728 3146752 3146752 23068672 19921920 2 2 2 2/0"),
        ([alloc(LARGE + 3145728, 9961472)], "13108200 13108224 13108224 23068672 9960448 2 2 3 2/0"),
        ([got(OWN, 33554432), alloc(OWN, 31457281)], "44565481 44566016 44566016 56623104 12057088 3 3 4 3/0"),
        (freed(LARGE), "41419753 41420288 41420288 56623104 15202816 4 3 3 3/0"),
        ([alloc(LARGE, 2621440)], "44041193 44566016 44566016 56623104 12057088 3 3 4 3/0"),
        (freed(OWN), "12583912 13108224 13108224 56623104 9960448 2 3 3 3/0"),
        ([alloc(OWN, 31457280)], "44041192 44565504 44565504 56623104 12057600 3 3 4 3/0"),
        ([alloc(OWN + 31457280, 1048577)], "45089769 46662656 46662656 56623104 9960448 2 3 5 3/0"),
        (freed(LARGE + 3145728), "35128297 36701184 36701184 56623104 19921920 2 3 4 3/0"),
        (freed(LARGE), "32506857 33555456 33555456 56623104 2096128 1 3 3 3/0"),
        (freed(OWN + 31457280), "31458280 31458304 31458304 56623104 4193280 2 3 2 3/0"),
        (freed(OWN), "1000 1024 1024 56623104 2096128 1 3 1 3/0"),
        ([gave_back(LARGE, 20971520), gave_back(OWN, 33554432)], "1000 1024 1024 2097152 2096128 1 1 1 3/2"),
        (freed(SMALL), "0 0 0 2097152 0 0 1 0 3/2"),
        ([gave_back(SMALL, 2097152)], "0 0 0 0 0 0 0 0 3/3"),
    ]
    state = AllocatorState(DEFAULT)
    for entries, expected in calls:
        state.apply(entries)
        s = state
        columns = (
            f"{s.requested_bytes} {s.allocated_bytes} {s.active_bytes} {s.reserved_bytes} {s.inactive_split_bytes}"
            f" {s.inactive_split_count} {s.segment_count} {s.allocation_count} {s.num_device_alloc}/{s.num_device_free}"
        )
        assert columns == expected, entries
    s = state
    assert (s.allocations_total, s.allocated_bytes_total) == (7, 81266176)
    assert (s.allocated_peak_bytes, s.active_peak_bytes) == (46662656, 46662656)
    assert (s.requested_peak_bytes, s.reserved_peak_bytes) == (45089769, 56623104)
    assert state.segments() == []


def test_every_counter_of_expandable_segments_is_as_pytorch_gives_it():
    """The same program with expandable_segments: pages instead of segments, exact splits, no inactive_split."""
    tail = LARGE + 13107200
    calls = [
        ([mapped(SMALL, 2097152), alloc(SMALL, 1000)], "1024 2097152 1/0"),
        ([mapped(LARGE, 20971520), alloc(LARGE, 3145728)], "3146752 23068672 2/0"),
        ([alloc(LARGE + 3145728, 9961472)], "13108224 23068672 2/0"),
        ([mapped(LARGE + 20971520, 41943040), alloc(tail, 31457281)], "44566016 65011712 3/0"),
        (freed(LARGE), "41420288 65011712 3/0"),
        ([alloc(LARGE, 2621440)], "44041728 65011712 3/0"),
        (freed(tail), "12583936 65011712 3/0"),
        ([alloc(tail, 31457280)], "44041216 65011712 3/0"),
        ([alloc(tail + 31457280, 1048577)], "45090304 65011712 3/0"),
        ([*freed(LARGE + 3145728), *freed(LARGE), *freed(tail + 31457280), *freed(tail)], "1024 65011712 3/0"),
        ([unmapped(LARGE, 62914560)], "1024 2097152 3/1"),
        (freed(SMALL), "0 2097152 3/1"),
        ([unmapped(SMALL, 2097152)], "0 0 3/2"),
    ]
    state = AllocatorState(EXPANDABLE, device_total_bytes=24 << 30)
    for entries, expected in calls:
        state.apply(entries)
        s = state.sample(1, 1)
        found = f"{s.allocated_bytes} {s.reserved_bytes} {s.num_device_alloc}/{s.num_device_free}"
        assert found == expected, entries
        assert (s.segment_count, s.inactive_split_bytes, s.inactive_split_count) == (0, 0, 0)
    assert state.segments() == []


def test_a_block_that_another_stream_still_uses_waits():
    state = state_after(got(OWN, 32 * MIB), alloc(OWN, 30 * MIB), asked_free(OWN))
    s = state.sample(1, 1)
    assert (s.allocated_bytes, s.allocation_count) == (0, 0)
    assert (s.active_bytes, s.active_count, s.requested_bytes) == (30 * MIB, 1, 30 * MIB)
    (segment,) = state.segments()
    assert [(b["size"], b["state"]) for b in segment["blocks"]] == [
        (30 * MIB, "active_pending_free"),
        (2 * MIB, "inactive"),
    ]
    state.apply([completed_free(OWN)])
    assert (state.active_bytes, state.requested_bytes, state.inactive_split_bytes) == (0, 0, 0)
    (segment,) = state.segments()
    assert [(b["size"], b["state"]) for b in segment["blocks"]] == [(32 * MIB, "inactive")]


@pytest.mark.parametrize(
    ("conf", "segment", "asked", "taken"),
    [
        pytest.param("", 32 * MIB, 31 * MIB, 32 * MIB, id="a rest of 1 MiB is not split off"),
        pytest.param("", 32 * MIB, 31 * MIB - 512, 31 * MIB - 512, id="a larger one is"),
        pytest.param(
            "max_split_size_mb:24", 32 * MIB, 30 * MIB, 32 * MIB, id="from max_split_size on blocks stay whole"
        ),
        pytest.param("max_split_size_mb:32", 32 * MIB, 30 * MIB, 30 * MIB, id="below it they are split"),
        pytest.param("", 2 * MIB, MIB - 512, MIB - 512, id="in the small pool 512 bytes are enough"),
        pytest.param("roundup_power2_divisions:4", 44 * MIB, 33 * MIB, 40 * MIB, id="the rounding of the settings"),
    ],
)
def test_a_block_is_split_as_the_settings_say(conf, segment, asked, taken):
    state = state_after(got(OWN, segment), alloc(OWN, asked), settings=parse_settings(conf))
    assert state.allocated_bytes == taken


def test_memory_of_a_private_pool_is_told_apart():
    pool = (0, 1)
    state = state_after(got(OWN, 32 * MIB, pool_id=pool), got(LARGE, 20 * MIB), gave_back(LARGE, 20 * MIB))
    assert (state.reserved_bytes, state.private_pools_reserved_bytes) == (32 * MIB, 32 * MIB)
    assert [segment["segment_pool_id"] for segment in state.segments()] == [pool]


def test_neighbouring_segments_never_merge():
    state = state_after(got(OWN, 32 * MIB), got(OWN + 32 * MIB, 32 * MIB), alloc(OWN, 32 * MIB), freed(OWN))
    assert [segment["total_size"] for segment in state.segments()] == [32 * MIB, 32 * MIB]


def test_neighbouring_expandable_segments_never_merge():
    """Addresses of a gone expandable segment may belong to another stream's next."""
    first = [mapped(LARGE, 20 * MIB), alloc(LARGE, 2 * MIB), freed(LARGE), unmapped(LARGE, 20 * MIB)]
    state = state_after(
        *first,
        mapped(LARGE + 20 * MIB, 20 * MIB, stream=1),
        mapped(LARGE, 20 * MIB, stream=2),
        settings=EXPANDABLE,
    )
    assert [(s["stream"], s["total_size"]) for s in state.segments()] == [(2, 20 * MIB), (1, 20 * MIB)]


def test_pages_are_unmapped_out_of_the_middle_of_a_free_block():
    state = state_after(
        mapped(LARGE, 60 * MIB),
        alloc(LARGE, 2 * MIB),
        alloc(LARGE + 2 * MIB, 57 * MIB),
        alloc(LARGE + 59 * MIB, MIB),
        freed(LARGE + 2 * MIB),
        unmapped(LARGE + 20 * MIB, 20 * MIB),
        settings=EXPANDABLE,
    )
    assert [(s["address"], s["total_size"], len(s["blocks"])) for s in state.segments()] == [
        (LARGE, 20 * MIB, 2),
        (LARGE + 40 * MIB, 20 * MIB, 2),
    ]
    assert state.reserved_bytes == 40 * MIB


ONE = [got(OWN, 32 * MIB), got(OTHER, 32 * MIB), alloc(OTHER, 32 * MIB)]


@pytest.mark.parametrize(
    ("then", "room_bytes", "retries", "syncs"),
    [
        pytest.param([gave_back(OWN, 32 * MIB), got(OWN, 40 * MIB), alloc(OWN, 40 * MIB)], None, 1, 1, id="a retry"),
        pytest.param(
            [gave_back(OWN, 32 * MIB), got(OWN, 40 * MIB), alloc(OWN, 40 * MIB)],
            104 * MIB,
            0,
            1,
            id="an empty_cache before an allocation that had room",
        ),
        pytest.param(
            [gave_back(OWN, 32 * MIB), got(OWN, 40 * MIB), alloc(OWN, 40 * MIB)],
            103 * MIB,
            1,
            1,
            id="a retry for want of room",
        ),
        pytest.param([gave_back(OWN, 32 * MIB), *freed(OTHER)], None, 0, 1, id="an empty_cache"),
        pytest.param([gave_back(OWN, 32 * MIB), oom(40 * MIB, 0)], None, 1, 1, id="a retry that failed"),
        pytest.param([oom(40 * MIB, 0)], None, 1, 1, id="a retry that found nothing to give back, and failed"),
        pytest.param([oom(40 * MIB, 0), oom(40 * MIB, 0)], None, 2, 2, id="two failures"),
    ],
)
def test_retries_are_told_from_flushes(then, room_bytes, retries, syncs):
    state = state_after(ONE, then, room_bytes=room_bytes)
    assert (state.num_alloc_retries, state.num_sync_all_streams) == (retries, syncs)


def test_garbage_collection_is_no_flush():
    state = state_after(
        ONE,
        [got(SMALL, 2 * MIB), gave_back(OWN, 32 * MIB), got(OWN, 40 * MIB), alloc(OWN, 40 * MIB)],
        settings=parse_settings("garbage_collection_threshold:0.5"),
    )
    assert (state.num_alloc_retries, state.num_sync_all_streams) == (0, 0)


def test_an_expandable_retry_is_told_by_the_pages_it_lacked():
    """Pages that a flush unmapped and the allocation mapped again were not what it lacked."""
    start = [mapped(LARGE, 40 * MIB), alloc(LARGE, 20 * MIB)]
    flush = [
        unmapped(LARGE + 20 * MIB, 20 * MIB),
        mapped(LARGE + 20 * MIB, 40 * MIB),
        alloc(LARGE + 20 * MIB, 40 * MIB),
    ]
    had_room = state_after(start, flush, settings=EXPANDABLE, room_bytes=60 * MIB)
    lacked_it = state_after(start, flush, settings=EXPANDABLE, room_bytes=59 * MIB)
    assert (had_room.num_alloc_retries, lacked_it.num_alloc_retries) == (0, 1)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([alloc(OWN, 512)], "entry 0: 512 bytes at 0x7f0020000000, where no free block begins"),
        ([got(OWN, 2 * MIB), alloc(OWN, 3 * MIB)], "entry 1: 3145728 bytes at .*, where 2097152 are free"),
        ([got(OWN, 2 * MIB), asked_free(OWN)], "entry 1: a free of .*, where no live block begins"),
        ([got(OWN, 2 * MIB), completed_free(OWN)], "entry 1: a completed free of .*, which none had asked for"),
        ([gave_back(OWN, 2 * MIB)], "entry 0: segment .* given back, where no whole free one begins"),
        ([got(OWN, 2 * MIB), got(OWN, 2 * MIB)], "entry 1: a segment at .*, where there is one"),
        ([unmapped(OWN, 2 * MIB)], "entry 0: 2097152 bytes unmapped at .*, which are not all free"),
    ],
)
def test_a_history_that_begins_in_the_middle_is_refused(entries, message):
    with pytest.raises(TraceError, match=message) as caught:
        state_after(entries)
    assert caught.value.entry == len(entries) - 1


def test_what_is_not_known_changes_nothing():
    state = state_after(ONE, [entry("snapshot", 0, 5), entry("annotate", 1, 1), entry("of_tomorrow", 1, 1)])
    assert (state.reserved_bytes, state.entries_applied) == (64 * MIB, 6)


@pytest.mark.parametrize("path", recordings(), ids=lambda path: path.name.removesuffix(".run.json"))
def test_a_recording_ends_as_its_snapshot_says_to_the_byte(path):
    recording, label = read_recording(path), label_of(path)
    state = AllocatorState(recording.settings, device_total_bytes=recording.device_total_bytes)
    if label["oom"]:
        at = next(index for index, e in enumerate(recording.trace) if e.action == "oom") + 1
        state.apply(recording.trace[:at])
        told = label["at_oom"]
        assert (state.reserved_bytes, state.requested_bytes) == (told["reserved"], told["live"])
        free = recording.device_total_bytes - recording.other_used_at(told["time_us"]) - state.reserved_bytes
        assert free == told["device_free"]
    else:
        at = 0
    state.apply(recording.trace[at:])
    assert [_as_values(s) for s in state.segments()] == [_snapshot_values(s) for s in recording.segments]
    assert state.num_alloc_retries == label["retries"]
    assert state.num_ooms == int(label["oom"])
    blocks = [(segment, block) for segment in state.segments() for block in segment["blocks"]]
    free_pieces = [b["size"] for s, b in blocks if b["state"] == "inactive" and len(s["blocks"]) > 1]
    assert (state.inactive_split_bytes, state.inactive_split_count) == (sum(free_pieces), len(free_pieces))
    assert state.active_count == sum(b["state"] != "inactive" for _, b in blocks)
    assert state.allocation_count == sum(b["state"] == "active_allocated" for _, b in blocks)
    assert state.segment_count == len(recording.segments)


def _as_values(segment):
    blocks = [(b["address"], b["size"], b["state"], b["requested_size"]) for b in segment["blocks"]]
    kind = (segment["segment_type"], segment["stream"], segment["segment_pool_id"], segment["is_expandable"])
    return segment["address"], segment["total_size"], kind, blocks


def _snapshot_values(segment):
    blocks = [(b.address, b.size, b.state, b.requested_size if b.state != "inactive" else 0) for b in segment.blocks]
    kind = (segment.segment_type, segment.stream, segment.pool_id, segment.is_expandable)
    return segment.address, segment.total_size, kind, blocks


_TRUTHS = [Path(__file__).parent / "truth", *map(Path, filter(None, [os.environ.get("ALLOCSCOPE_TEST_TRUTH")]))]
TRUTH = [path for folder in _TRUTHS for path in sorted(folder.glob("*.json.gz"))]
NAMES = {
    "allocated_bytes": "allocated_bytes.all.current",
    "active_bytes": "active_bytes.all.current",
    "requested_bytes": "requested_bytes.all.current",
    "reserved_bytes": "reserved_bytes.all.current",
    "inactive_split_bytes": "inactive_split_bytes.all.current",
    "inactive_split_count": "inactive_split.all.current",
    "allocated_peak_bytes": "allocated_bytes.all.peak",
    "active_peak_bytes": "active_bytes.all.peak",
    "requested_peak_bytes": "requested_bytes.all.peak",
    "reserved_peak_bytes": "reserved_bytes.all.peak",
    "allocation_count": "allocation.all.current",
    "active_count": "active.all.current",
    "segment_count": "segment.all.current",
    "allocations_total": "allocation.all.allocated",
    "allocated_bytes_total": "allocated_bytes.all.allocated",
    "num_alloc_retries": "num_alloc_retries",
    "num_ooms": "num_ooms",
    "num_device_alloc": "num_device_alloc",
    "num_device_free": "num_device_free",
}


@pytest.mark.parametrize("path", TRUTH, ids=lambda path: path.name.removesuffix(".json.gz"))
def test_a_case_of_the_real_allocator_comes_out_exactly(path):
    """Every counter at every mark and at the end, and every block at the end, whatever the settings."""
    case = json.loads(gzip.decompress(path.read_bytes()))
    expected, fraction = case["expect"], case["memory_fraction"]
    state = AllocatorState(parse_settings(case["conf"] or ""), device_total_bytes=case["device_total"])
    allowed = int(fraction * case["device_total"]) if fraction else case["device_total"]
    state.room_bytes = min(case["device_total"] - case["device_other"], allowed)
    entries = [
        oom(size, where, stream=stream) if action == "oom" else entry(action, where, size, stream=stream)
        for action, where, size, stream in expected["trace"]
    ]
    done = 0
    for calls, stats in expected["marks"]:
        made = [call[0] for call in case["requests"][:calls]]
        upto = _entries_of(entries, made.count("a"), made.count("f"))
        if made[-1] in "af" and upto is not None:
            state.apply(entries[done:upto])
            done = upto
            assert _differing(state, stats) == {}, f"after {calls} calls"
    assert done > 0
    state.apply(entries[done:])
    assert _differing(state, expected["stats"]) == {}
    assert [_as_rows(s) for s in state.segments()] == sorted(map(_truth_rows, expected["segments"]))


def _entries_of(entries, allocs, frees):
    """How many entries so many allocations and frees have made; None: not to be told (the last free waits)."""
    for index, e in enumerate(entries):
        allocs -= e.action == "alloc"
        frees -= e.action == "free_requested"
        if allocs == frees == 0:
            if e.action == "alloc":
                return index + 1
            following = entries[index + 1] if index + 1 < len(entries) else None
            completed = following and following.action == "free_completed" and following.address == e.address
            return index + 2 if completed else None
    return None


def _differing(state, stats):
    sample = state.sample(1, 1)
    pairs = {name: (getattr(sample, name), stats[key]) for name, key in NAMES.items() if key in stats}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _as_rows(segment):
    blocks = [[b["address"], b["size"], b["requested_size"], b["state"]] for b in segment["blocks"]]
    return [segment["address"], segment["total_size"], segment["stream"], segment["segment_type"], blocks]


def _truth_rows(segment):
    blocks = [
        [address, size, asked if state != "inactive" else 0, state] for address, size, asked, state in segment["blocks"]
    ]
    return [segment["address"], segment["total_size"], segment["stream"], segment["type"], blocks]
