"""What the player yields is what a probe would have had: in order, at the promised moments, never of a call half done."""

from typing import Any

import pytest

from allocscope.allocator.errors import TraceError
from allocscope.allocator.player import Player
from allocscope.allocator.recording import read_recording
from allocscope.allocator.state import AllocatorState
from allocscope.model import AllocatorRef, BlockMap, Event, EventKind, Sample
from tests.allocator.made import (
    MIB,
    SHIPPED,
    START_US,
    alloc,
    asked_free,
    completed_free,
    freed,
    gave_back,
    got,
    label_of,
    oom,
    recordings,
    write_recording,
)

A, B = 0x7F0000000000, 0x7F0010000000
SECOND = 1_000_000


def at(seconds: float) -> int:
    return START_US + round(seconds * SECOND)


def play(tmp_path, entries, *, seed=0, conf="", **described) -> list[Any]:
    recording = read_recording(write_recording(tmp_path, entries, conf=conf, **described))
    return list(Player(recording, seed, allocator=AllocatorRef("f" * 32, "GPU-1")))


def of_kind(kind, seen) -> list[Any]:
    return [item for item in seen if isinstance(item, kind)]


RUN = [
    got(A, 32 * MIB, time_us=at(0)),
    alloc(A, 30 * MIB, time_us=at(0.5)),
    asked_free(A, time_us=at(1.5)),
    completed_free(A, time_us=at(2.5)),
    alloc(A, 28 * MIB, time_us=at(2.6)),
    asked_free(A, time_us=at(35)),
]


def test_a_sample_is_due_each_second(tmp_path):
    samples = of_kind(Sample, play(tmp_path, RUN))
    assert [sample.time_us for sample in samples] == [at(k) for k in range(1, 36)]


def test_a_block_map_is_due_about_every_ten_seconds_at_moments_drawn_from_the_seed(tmp_path):
    def moments(seed):
        return [(item.time_us - START_US) / SECOND for item in of_kind(BlockMap, play(tmp_path, RUN, seed=seed))]

    assert moments(1) == moments(1) != moments(2)
    for seed in range(5):
        first, second, third = moments(seed)
        assert 6 <= first <= 14
        assert 16 <= second <= 24
        assert 26 <= third <= 34


def test_everything_comes_in_order_and_numbered_from_one(tmp_path):
    seen = play(tmp_path, RUN)
    assert [item.sequence for item in seen] == list(range(1, len(seen) + 1))
    assert [item.time_us for item in seen] == sorted(item.time_us for item in seen)


def test_numbers_come_from_whom_the_caller_says(tmp_path):
    recording = read_recording(write_recording(tmp_path, RUN))
    numbers = iter(range(100, 1000))
    seen = list(Player(recording, next_sequence=lambda: next(numbers)))
    assert [item.sequence for item in seen] == list(range(100, 100 + len(seen)))


def test_a_run_that_ends_in_order_stops(tmp_path):
    last = play(tmp_path, RUN)[-1]
    assert (last.kind, last.time_us, last.process_id, last.device_uuid) == (EventKind.STOPPED, at(35), "f" * 32, None)


def test_what_is_free_and_used_follows_from_what_others_use(tmp_path):
    steps = [[at(0), 100 * MIB], [at(10), 300 * MIB], [at(20), 60 * MIB]]
    samples = of_kind(Sample, play(tmp_path, RUN, other_used=steps))
    told = {
        (s.time_us - START_US) // SECOND: (s.device_free_bytes // MIB, s.process_used_bytes // MIB) for s in samples
    }
    assert (told[9], told[10], told[20]) == ((892, 132), (692, 132), (932, 92))
    assert {sample.device_total_bytes for sample in samples} == {1024 * MIB}


def test_a_device_that_others_overfill_has_nothing_free(tmp_path):
    samples = of_kind(Sample, play(tmp_path, RUN, other_used=[[at(0), 2000 * MIB]]))
    assert samples[0].device_free_bytes == 0


def test_a_free_with_nothing_to_wait_for_is_never_seen_half_done(tmp_path):
    """Both its entries were written under one lock, however far apart the recording's clock puts them."""
    samples = of_kind(Sample, play(tmp_path, RUN))
    assert [(s.allocated_bytes // MIB, s.active_bytes // MIB) for s in samples[:3]] == [(30, 30), (30, 30), (28, 28)]


def test_a_free_that_waits_for_another_stream_is_seen_waiting(tmp_path):
    entries = [
        got(A, 32 * MIB, time_us=at(0)),
        alloc(A, 30 * MIB, time_us=at(0.5)),
        asked_free(A, time_us=at(1.5)),
        got(B, 20 * MIB, time_us=at(2.5)),
        alloc(B, 2 * MIB, time_us=at(2.5)),
        completed_free(A, time_us=at(3.5)),
    ]
    samples = of_kind(Sample, play(tmp_path, entries))
    assert [(s.allocated_bytes // MIB, s.active_bytes // MIB) for s in samples] == [(30, 30), (0, 30), (2, 32)]


def test_an_allocation_is_never_seen_half_done(tmp_path):
    """Neither with its cache given back and no segment yet, nor with a segment and no block."""
    entries = [
        got(A, 32 * MIB, time_us=at(0)),
        alloc(A, 32 * MIB, time_us=at(0)),
        *freed(A, time_us=at(0.1)),
        gave_back(A, 32 * MIB, time_us=at(0.9)),
        got(B, 40 * MIB, time_us=at(1.9)),
        alloc(B, 40 * MIB, time_us=at(2.9)),
    ]
    first, second = of_kind(Sample, play(tmp_path, entries, device_total=141 * MIB))
    assert (first.reserved_bytes, second.reserved_bytes) == (32 * MIB, 32 * MIB)
    assert first.num_alloc_retries == second.num_alloc_retries == 0


def test_an_empty_cache_is_seen_when_it_is_done(tmp_path):
    entries = [
        got(A, 32 * MIB, time_us=at(0)),
        got(B, 32 * MIB, time_us=at(0)),
        alloc(B, 32 * MIB, time_us=at(0)),
        gave_back(A, 32 * MIB, time_us=at(0.9)),
        asked_free(B, time_us=at(2.5)),
    ]
    samples = of_kind(Sample, play(tmp_path, entries))
    assert [sample.reserved_bytes for sample in samples] == [32 * MIB, 32 * MIB]


DEATH = [
    got(A, 32 * MIB, time_us=at(0)),
    alloc(A, 32 * MIB, time_us=at(0.5)),
    oom(40 * MIB + 512, 7 * MIB, time_us=at(2.25)),
    asked_free(A, time_us=at(3)),
    completed_free(A, time_us=at(4)),
]


def test_a_death_is_seen_with_its_counters_and_blocks_and_is_the_end(tmp_path):
    seen = play(tmp_path, DEATH)
    sample, block_map, event = seen[-3:]
    assert (sample.time_us, sample.num_ooms, sample.num_alloc_retries) == (at(2.25), 1, 1)
    assert sample.allocated_bytes == 32 * MIB
    assert (block_map.time_us, block_map.groups[0].allocated_bytes) == (at(2.25), 32 * MIB)
    assert event == Event(
        process_id="f" * 32,
        sequence=len(seen),
        time_us=at(2.25),
        kind=EventKind.OOM,
        device_uuid="GPU-1",
        requested_bytes=42 * MIB,
        device_total_bytes=1024 * MIB,
        device_free_bytes=7 * MIB,
    )


def test_an_out_of_memory_error_that_the_program_survives_is_not_the_end(tmp_path):
    survived = [*DEATH, alloc(A, 30 * MIB, time_us=at(5)), asked_free(A, time_us=at(8.5))]
    seen = play(tmp_path, survived)
    assert [(event.kind, event.time_us) for event in of_kind(Event, seen)] == [
        (EventKind.OOM, at(2.25)),
        (EventKind.STOPPED, at(8.5)),
    ]
    assert of_kind(Sample, seen)[-1].time_us == at(8)


def test_a_memory_fraction_is_what_the_process_is_allowed(tmp_path):
    path = write_recording(tmp_path, RUN, conf="per_process_memory_fraction:0.5")
    assert read_recording(path).allowed_bytes == 512 * MIB
    assert read_recording(write_recording(tmp_path, RUN)).allowed_bytes is None


def test_a_clock_that_was_set_back_loses_nothing(tmp_path):
    entries = [got(A, 32 * MIB, time_us=at(5)), alloc(A, 30 * MIB, time_us=at(2)), asked_free(A, time_us=at(8.5))]
    samples = of_kind(Sample, play(tmp_path, entries))
    assert [sample.allocated_bytes // MIB for sample in samples] == [0, 0, 0, 0, 30, 30, 30, 30]


def test_a_history_that_begins_in_the_middle_is_refused(tmp_path):
    with pytest.raises(TraceError, match="must begin with the first allocation"):
        play(tmp_path, RUN[2:])


@pytest.mark.parametrize("name", ["leak-1-3771", "kv_serve-1-4114", "streams-2-3890"])
def test_the_map_and_the_counters_of_a_moment_agree(name):
    """Of any moment with both: what the blocks add up to is what the counters say."""
    player = Player(read_recording(SHIPPED / f"{name}.run.json"), seed=3)
    compared = 0
    for seen in player:
        if isinstance(seen, BlockMap):
            counters = player.state
            groups = seen.groups
            assert sum(g.reserved_bytes for g in groups) == counters.reserved_bytes
            assert sum(g.allocated_bytes for g in groups) == counters.allocated_bytes
            assert sum(g.awaiting_free_bytes for g in groups) == counters.active_bytes - counters.allocated_bytes
            assert sum(g.stranded_bytes for g in groups) == counters.inactive_split_bytes
            if counters.active_bytes == counters.allocated_bytes:
                assert sum(g.requested_bytes or 0 for g in groups) == counters.requested_bytes
            compared += 1
    assert compared > 50


@pytest.mark.parametrize("path", recordings(), ids=lambda path: path.name.removesuffix(".run.json"))
def test_a_recorded_run_is_seen_to_its_end(path):
    recording, label = read_recording(path), label_of(path)
    player = Player(recording, seed=1)
    seen: list[Any] = list(player)
    samples = of_kind(Sample, seen)
    end_us = label["oom_us"] or label["end_us"]
    assert player.died == label["oom"]
    assert (seen[-1].kind, seen[-1].time_us) == (EventKind.OOM if label["oom"] else EventKind.STOPPED, end_us)
    assert len(samples) == (end_us - recording.start_us) // SECOND + label["oom"]
    assert samples[-1].num_alloc_retries == label["retries"]
    assert all(sample.device_free_bytes >= 0 for sample in samples)
    peak = AllocatorState(recording.settings, device_total_bytes=recording.device_total_bytes)
    peak.apply(entry for entry in recording.trace if entry.time_us <= samples[-1].time_us)
    assert max(s.reserved_bytes for s in samples) <= samples[-1].reserved_peak_bytes <= peak.reserved_peak_bytes
