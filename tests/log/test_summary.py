"""What events come to, and what of it is normal."""

import pytest

from allocscope.allocator.chronicle.events import Kind
from allocscope.allocator.chronicle.judgement import Subject, judge
from allocscope.allocator.chronicle.standing import Level, Standing, class_bytes, class_of
from allocscope.allocator.chronicle.tally import Flow, StreamUse, Tally
from tests.allocator.made import alloc, asked_free, completed_free, freed, gave_back, got, mapped, oom, unmapped
from tests.log.told import MIB, A, history, told

SECOND = 1_000_000


def tally_of(trace, conf="", **more):
    tally = Tally(**more)
    for event in told(trace, conf=conf):
        tally.take(event)
    return tally


def judged(tally):
    return {finding.subject: finding.normal for finding in judge(tally)}


def test_allocations_frees_splits_and_merges_are_counted_and_put_in_classes():
    trace = [
        got(A, 20 * MIB, time_us=SECOND),
        alloc(A, 5 * MIB, time_us=SECOND),
        alloc(A + 5 * MIB, 3 * MIB, time_us=2 * SECOND),
        *freed(A, time_us=2 * SECOND),
        alloc(A, 5 * MIB, time_us=2 * SECOND),
        *freed(A + 5 * MIB, time_us=3 * SECOND),
    ]
    tally = tally_of(trace)
    assert (tally.allocations, tally.frees, tally.splits, tally.merges) == (3, 2, 2, 1)
    assert (tally.driver, tally.split_cached, tally.cached) == (1, 1, 1)
    assert (tally.duration_s, tally.a_second(tally.allocations)) == (2.0, 1.5)
    assert occurring(tally.allocations_by_class) == {8 * MIB: 2, 4 * MIB: 1}
    assert occurring(tally.frees_by_class) == {8 * MIB: 1, 4 * MIB: 1}
    assert occurring(tally.splits_by_class) == {32 * MIB: 1, 16 * MIB: 1}
    assert occurring(tally.merges_by_class) == {16 * MIB: 1}
    assert tally.streams == {0: StreamUse(3, 13 * MIB, 0)}


def occurring(counts):
    return {class_bytes(index): count for index, count in enumerate(counts) if count}


@pytest.mark.parametrize(
    ("size", "up_to"), [(1, 512), (512, 512), (513, 1024), (MIB, MIB), (MIB + 1, 2 * MIB), (1 << 80, 1 << 63)]
)
def test_a_size_class_is_up_to_a_power_of_two(size, up_to):
    assert class_bytes(class_of(size)) == up_to


def test_without_times_there_are_no_rates():
    trace = [each._replace(time_us=0) for each in (got(A, 20 * MIB), alloc(A, 5 * MIB))]
    tally = tally_of(trace)
    assert (tally.duration_s, tally.a_second(1)) == (None, None)


def test_frees_that_waited_are_counted_by_stream_with_how_long_and_how_much():
    trace = [
        got(A, 20 * MIB, stream=3),
        *(alloc(A + at * MIB, 2 * MIB, stream=3) for at in (0, 2, 4)),
        asked_free(A, stream=3, time_us=1_000),
        asked_free(A + 4 * MIB, stream=3, time_us=1_500),
        alloc(A + 6 * MIB, 2 * MIB, stream=3, time_us=1_700),
        completed_free(A, stream=3, time_us=2_000),
        completed_free(A + 4 * MIB, stream=3, time_us=5_500),
    ]
    tally = tally_of(trace)
    assert (tally.waits, tally.waits_over, tally.waited_us, tally.longest_wait_us) == (2, 2, 5_000, 4_000)
    assert (tally.waiting_bytes, tally.waiting_peak_bytes) == (0, 4 * MIB)
    assert tally.streams == {3: StreamUse(4, 8 * MIB, 2)}
    assert judged(tally)[Subject.WAITS]


CYCLE = [got(A, 20 * MIB), alloc(A, 15 * MIB), *freed(A), gave_back(A, 20 * MIB)]


def test_segments_got_again_right_after_are_churn_and_that_is_not_normal():
    tally = tally_of(CYCLE * 10)
    assert tally.segments == {20 * MIB: Flow(10, 200 * MIB, 10, 200 * MIB, 9, 180 * MIB)}
    assert tally.of(Kind.EMPTY_CACHE).count == 10
    found = judged(tally)
    assert (found[Subject.CHURN], found[Subject.EMPTY_CACHES]) == (False, False)


def test_an_empty_cache_now_and_then_is_normal():
    found = judged(tally_of(CYCLE))
    assert (found[Subject.CHURN], found[Subject.EMPTY_CACHES]) == (True, True)


def test_a_segment_that_is_got_again_much_later_is_no_churn():
    busy = [got(A + 64 * MIB, 2 * MIB), *[alloc(A + 64 * MIB, 2 * MIB), *freed(A + 64 * MIB)] * 1001]
    assert tally_of([*CYCLE, *busy, *CYCLE]).segments[20 * MIB].again == 0


def test_pages_got_again_count_by_their_bytes():
    trace = [mapped(A, 40 * MIB), unmapped(A, 40 * MIB), mapped(A, 20 * MIB), alloc(A, 15 * MIB)]
    tally = tally_of(trace, "expandable_segments:True")
    assert tally.pages == Flow(2, 60 * MIB, 1, 40 * MIB, 1, 20 * MIB)


def test_a_flush_and_an_out_of_memory_error_are_not_normal():
    trace = [*CYCLE, oom(30 * MIB, MIB)]
    tally = tally_of(trace)
    found = {finding.subject: finding for finding in judge(tally)}
    assert (tally.of(Kind.FLUSH).count, tally.of(Kind.FLUSH).given_back_bytes, tally.ooms) == (1, 20 * MIB, 1)
    assert not found[Subject.FLUSHES].normal
    assert not found[Subject.OOMS].normal
    assert "1.00 MiB on the device, when 30.00 MiB was asked for" in found[Subject.OOMS].text


@pytest.mark.parametrize(("per_step", "normal"), [(False, True), (True, False)])
def test_asking_the_driver_again_and_again_is_not_normal_once_a_job_is_warm(per_step, normal):
    warm = [got(A, 20 * MIB), *[alloc(A, 19 * MIB), *freed(A)] * 600]
    more = [
        entry
        for at in range(1, 600)
        for entry in (got(A + 32 * at * MIB, 20 * MIB), alloc(A + 32 * at * MIB, 19 * MIB))
    ]
    steady = [*[alloc(A, 19 * MIB), *freed(A)] * 600]
    tally = tally_of([*warm, *(more if per_step else steady)], late_from_entry=len(warm))
    assert judged(tally)[Subject.SOURCE] is normal


def test_splitting_and_merging_is_always_normal():
    trace = [got(A, 20 * MIB), *[alloc(A, 5 * MIB), *freed(A)] * 1000]
    tally = tally_of(trace)
    assert (tally.splits, tally.merges) == (1000, 1000)
    assert judged(tally) == {Subject.SPLITS_AND_MERGES: True}


def test_what_is_in_use_is_known_at_the_end_and_at_the_peak():
    trace = [
        got(A, 20 * MIB),
        alloc(A, 5 * MIB),
        alloc(A + 5 * MIB, 3 * MIB),
        *freed(A + 5 * MIB),
        alloc(A + 5 * MIB, 2 * MIB),
    ]
    found = history(trace)
    standing = Standing(found.live_before, found.reserved_before)
    for event in found.events():
        standing.take(event)
    now, peak = standing.now(), standing.peak()
    assert (now.used_bytes, now.reserved_bytes, occurring(now.blocks)) == (7 * MIB, 20 * MIB, {8 * MIB: 1, 2 * MIB: 1})
    assert (peak.used_bytes, peak.reserved_bytes, occurring(peak.blocks)) == (
        8 * MIB,
        20 * MIB,
        {8 * MIB: 1, 4 * MIB: 1},
    )


def test_what_is_reserved_and_not_in_use_is_not_called_fragmentation():
    (finding,) = judge(Tally(), Level(5 * MIB, 20 * MIB, ()))
    assert (finding.subject, finding.normal) == (Subject.UNUSED, True)
    assert "15.00 MiB more was reserved. That is not fragmentation" in finding.text


def test_nothing_is_said_of_nothing():
    assert judge(Tally()) == ()
