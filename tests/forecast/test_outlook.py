"""What is foreseen of made-up jobs: who is in danger, why, how long before, and who is not."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from allocscope.model import (
    AllocatorRef,
    BlockGroup,
    BlockMap,
    Cause,
    Device,
    DeviceReading,
    Event,
    EventKind,
    Pool,
    Sample,
    SizeClass,
    State,
    chunks,
)
from tests.forecast.streams import (
    GIB,
    MIB,
    START_US,
    STEP_S,
    TOTAL,
    Job,
    S,
    always,
    criticals,
    entered,
    foretell,
    outlook,
    rising,
    worst,
)

HOUR_S = 3600


def _steps_of(seed: int, low: int, high: int):
    """Peaks that vary from step to step and do not grow."""
    draw = random.Random(seed)
    steps = [draw.randint(low, high) for _ in range(HOUR_S // STEP_S + 1)]
    return lambda t: steps[t // STEP_S]


@pytest.mark.parametrize(
    "job",
    [
        pytest.param(Job(), id="half full"),
        pytest.param(Job(swing=always(57 * GIB), reserves=always(79 * GIB)), id="99 % full, step for step the same"),
        pytest.param(Job(reserves=rising(40 * GIB, GIB / 60), swing=always(40 * GIB)), id="the cache grows"),
        pytest.param(Job(swing=_steps_of(1, 20 * GIB, 45 * GIB), reserves=always(79 * GIB)), id="peaks vary"),
        pytest.param(Job(trough=rising(10 * GIB, GIB / 4, until_s=80)), id="warms up for 80 s"),
    ],
)
def test_a_job_that_does_not_change_is_never_critical_however_full(job):
    told = foretell(job.samples(HOUR_S))
    assert not criticals(told)
    assert worst(told) is State.OK


def test_a_leak_is_critical_minutes_ahead_and_stays_so():
    """2 GiB a minute from 40 GiB of peak on: 79 GiB less 1 stranded are reached after 1,140 s."""
    leaking = Job(trough=rising(20 * GIB, 2 * GIB / 60), blocks=rising(1000, 1))
    told = foretell(leaking.samples(1140))
    first, causes = criticals(told)[0][0], {cause for _, cause in criticals(told)}
    assert 920 <= first <= 960
    assert causes == {Cause.LEAK}
    assert told[-1][1].state is State.CRITICAL
    assert entered(told, State.CRITICAL) == 1


def test_what_is_kept_for_an_epoch_and_let_go_is_no_leak():
    """It rises for five minutes as a leak does; once it was given back it is none, however often it rises to where it was."""
    epochs = Job(
        trough=lambda t: 20 * GIB + t % 300 * GIB // 20, swing=always(25 * GIB), blocks=lambda t: 1000 + t % 300
    )
    told = foretell(epochs.samples(HOUR_S))
    assert [t for t, _ in criticals(told) if t > 430] == [], "two minutes after the first"


def test_time_left_comes_to_the_moment_it_runs_out():
    leaking = Job(trough=rising(20 * GIB, 2 * GIB / 60), blocks=rising(1000, 1))
    told = dict(foretell(leaking.samples(1140)))
    for t in (800, 900, 1000, 1100):
        assert told[t].seconds_to_oom == pytest.approx(1140 - t, abs=40)


def test_peaks_that_grow_over_troughs_that_do_not_are_growth():
    growing = Job(swing=rising(20 * GIB, 3 * GIB / 60))
    told = foretell(growing.samples(760))
    assert {cause for _, cause in criticals(told)} == {Cause.GROWTH}
    assert criticals(told)[0][0] <= 760 - 180


def test_growth_that_has_ended_is_no_danger_any_more():
    bending = Job(swing=rising(20 * GIB, 3 * GIB / 60, until_s=400))
    told = foretell(bending.samples(1200))
    assert told[-1][1].state is State.OK


def test_growth_that_stops_while_there_is_room_for_minutes_is_worth_a_warning_only():
    """Had it gone on, it would have ended at 760 s."""
    stops = Job(swing=rising(20 * GIB, 3 * GIB / 60, until_s=520))
    assert worst(foretell(stops.samples(1200))) is State.AT_RISK


def test_growth_is_critical_earlier_where_more_lies_stranded_than_is_left():
    """Need and room meet at 580 s, but how much of the 20 GiB serves anybody is chance."""
    told = foretell(
        Job(trough=always(10 * GIB), swing=rising(20 * GIB, GIB / 20), stranded=always(20 * GIB)).samples(560)
    )
    assert 180 <= criticals(told)[0][0] <= 260


def test_a_neighbour_that_came_once_is_no_danger():
    came = Job(others=lambda t: GIB if t < 300 else 30 * GIB)
    assert worst(foretell(came.samples(HOUR_S))) is State.OK


def test_a_neighbour_that_goes_to_and_fro_is_no_danger():
    wavers = Job(others=lambda t: (2 + 8 * (t // 20 % 2)) * GIB)
    assert not criticals(foretell(wavers.samples(HOUR_S)))


def test_a_neighbour_that_grows_is_critical_and_named():
    grows = Job(others=rising(GIB, GIB / 10, since_s=200))
    told = foretell(grows.samples(200 + 370))
    first, cause = criticals(told)[0]
    assert 360 <= first <= 410, "it ends at 580 s"
    assert cause is Cause.NEIGHBOUR
    assert told[-1][1].state is State.CRITICAL


def test_a_neighbour_that_waits_for_the_job_to_give_back_still_grows():
    """It takes what is free, stands still while nothing is, and goes on when the job flushes."""
    grows = Job(
        swing=always(40 * GIB), reserves=always(70 * GIB), others=rising(GIB, GIB / 10, since_s=200, until_s=290)
    )
    told = dict(foretell(grows.samples(340)))
    assert told[340].state is State.CRITICAL
    assert told[340].cause is Cause.NEIGHBOUR


def test_flushes_that_leave_less_and_less_are_critical_by_fragmentation():
    left = {200: 3 * GIB, 300: 2 * GIB, 400: GIB // 4}

    def reserves(t: int) -> int:
        return 79 * GIB - min((slack for at, slack in left.items() if at <= t), default=20 * GIB)

    job = Job(
        swing=always(40 * GIB),
        stranded=always(18 * GIB),
        reserves=reserves,
        retries=lambda t: sum(at <= t for at in left),
    )
    told = foretell(job.samples(500))
    assert criticals(told)[0] == (400, Cause.FRAGMENTATION)
    assert "3 flushes in the last ten minutes, the narrowest left 256.00 MiB" in told[-1][1].summary


def _flushing(left: dict[int, int]) -> Job:
    """A job that flushes at these seconds, and what that leaves."""

    def reserves(t: int) -> int:
        return 79 * GIB - next((slack for at, slack in reversed(left.items()) if at <= t), 20 * GIB)

    return Job(swing=always(40 * GIB), reserves=reserves, retries=lambda t: sum(at <= t for at in left))


def test_flushes_that_go_on_leaving_less_than_any_before_are_a_trend():
    """None of them is narrow, and some leave more than the one before: holes grow, which peaks do not show."""
    falling = _flushing({200: 8 * GIB, 260: 6 * GIB, 300: 7 * GIB, 360: 4 * GIB, 420: 5 * GIB, 460: 2 * GIB})
    told = foretell(falling.samples(500))
    assert criticals(told)[0][0] == 460
    assert told[-1][1].seconds_to_oom == pytest.approx(2 / (4 / 300), rel=0.01), "the largest fall left out"


@pytest.mark.parametrize(
    "left",
    [
        pytest.param({200: 8, 201: 6, 203: 4, 205: 2}, id="in one step"),
        pytest.param({200: 18, 300: 3, 400: 2.9, 500: 2.8}, id="but for one of them hardly"),
        pytest.param({200: 4, 260: 5, 300: 3, 360: 6, 420: 3.5, 460: 4}, id="to and fro"),
    ],
)
def test_flushes_that_leave_less_by_chance_or_once_are_no_trend(left):
    told = foretell(_flushing({at: round(slack * GIB) for at, slack in left.items()}).samples(560))
    assert criticals(told) == []


def test_one_narrow_flush_of_a_job_whose_steps_are_alike_is_worth_a_warning_only():
    job = Job(swing=always(58 * GIB), reserves=always(79 * GIB - 100 * MIB), retries=lambda t: int(t >= 200))
    assert worst(foretell(job.samples(500))) is State.AT_RISK


def test_the_summary_has_the_figures():
    told = dict(foretell(Job(swing=rising(20 * GIB, 3 * GIB / 60)).samples(600)))
    assert told[600].summary == (
        "70.00 GiB live at its peaks, of 79.00 GiB that it can have; 1.00 GiB lie stranded then, in 37 holes now;"
        " its peaks grow by 3.00 GiB a minute; at this rate in 3 min"
    )
    assert told[600].margin_ratio is None, "no map came: what is asked for is not known"


def _large(free: tuple[SizeClass, ...], live: tuple[SizeClass, ...], *, expandable: bool = False) -> BlockGroup:
    held, holes = sum(c.bytes for c in live), sum(c.bytes for c in free)
    return BlockGroup(
        pool=Pool.LARGE,
        stream=0,
        private_pool=None,
        expandable=expandable,
        segment_count=1,
        reserved_bytes=held + holes,
        requested_bytes=held,
        rounding_bytes=0,
        allocated_bytes=held,
        awaiting_free_bytes=0,
        stranded_bytes=holes,
        releasable_bytes=0,
        private_bytes=0,
        free_stranded=free,
        free_releasable=(),
        live=live,
        largest_free_block_bytes=max((c.largest_bytes for c in free), default=None),
    )


def _map(t: int, group: BlockGroup) -> BlockMap:
    return BlockMap(100_000 + t, START_US + t * S, (group,))


HOLE = SizeClass(GIB, 2, 2 * GIB, GIB)
LIVE = SizeClass(4 * GIB, 5, 20 * GIB, 5 * GIB)


def test_headroom_and_request_come_from_maps():
    """The driver has 80 - 1 - 60 = 19 GiB; nothing cached is whole; 5 GiB is the largest that is live."""
    into = outlook()
    for sample in Job().samples(60):
        into.observe(sample)
    into.observe_map(_map(60, _large((HOLE,), (LIVE,))))
    forecast = into.forecast(START_US + 60 * S)
    assert forecast.headroom_bytes == 19 * GIB
    assert forecast.request_bytes == 5 * GIB
    assert forecast.margin_ratio == pytest.approx((19 - 5) / 80)


def test_a_request_counts_for_ten_minutes():
    into = outlook()
    samples = {(s.time_us - START_US) // S: s for s in Job().samples(800)}
    for t, sample in samples.items():
        into.observe(sample)
        if t == 100:
            into.observe_map(_map(t, _large((HOLE,), (LIVE,))))
        if t == 699:
            assert into.forecast(sample.time_us).request_bytes == 5 * GIB
    assert into.forecast(samples[800].time_us).request_bytes is None


def test_an_oom_that_was_survived_tells_what_is_asked_for():
    into = outlook()
    for sample in Job().samples(60):
        into.observe(sample)
    into.observe_event(Event("p", 1000, START_US + 60 * S, EventKind.OOM, requested_bytes=30 * GIB))
    assert into.forecast(START_US + 60 * S).request_bytes == 30 * GIB


def test_holes_of_expandable_segments_come_from_maps():
    into = outlook(allocator_conf="expandable_segments:True")
    forecast = None
    for sample in Job(stranded=always(0), swing=rising(20 * GIB, 3 * GIB / 60)).samples(600):
        into.observe(sample)
        if sample.sequence % 10 == 0:
            into.observe_map(_map(sample.sequence, _large((HOLE,), (LIVE,), expandable=True)))
        forecast = into.forecast(sample.time_us)
    assert forecast is not None
    assert "2.00 GiB lie stranded then" in forecast.summary


def test_where_samples_do_not_know_the_device_its_readings_do():
    into = outlook(device_total_bytes=TOTAL)
    critical = []
    for sample in Job(others=rising(GIB, GIB / 10, since_s=200)).samples(500):
        free = sample.device_free_bytes
        into.observe(replace(sample, device_free_bytes=None, device_total_bytes=None))
        device = Device("GPU-1", 0, total_bytes=TOTAL)
        into.observe_device(DeviceReading(device, sample.time_us, from_nvml=True, free_bytes=free))
        if into.forecast(sample.time_us).state is State.CRITICAL:
            critical.append(sample.sequence)
    assert critical
    assert critical[0] <= 410


def test_a_memory_fraction_is_the_end_of_the_room():
    told = foretell(Job(trough=rising(10 * GIB, GIB / 60)).samples(600), outlook(allowed_bytes=41 * GIB))
    assert criticals(told)


@pytest.mark.parametrize(
    "samples",
    [
        pytest.param([], id="no samples"),
        pytest.param([Sample(t, START_US + t * S) for t in range(1, 500)], id="no figures"),
        pytest.param(
            [Sample(t, START_US + t * S, allocated_bytes=t * GIB, reserved_bytes=t * GIB) for t in range(1, 500)],
            id="no device",
        ),
    ],
)
def test_of_nothing_known_nothing_is_said(samples):
    told = foretell(samples, into := outlook())
    assert not told or worst(told) is State.OK
    assert into.forecast(START_US).state is State.OK
    assert into.forecast(START_US).cause is None


def test_a_peak_that_the_user_resets_is_no_news():
    samples = [
        replace(sample, allocated_peak_bytes=sample.allocated_bytes if sample.sequence % 7 == 0 else 40 * GIB)
        for sample in Job().samples(HOUR_S)
    ]
    assert worst(foretell(samples)) is State.OK


def test_counters_that_are_reset_are_no_news():
    """reset_accumulated_memory_stats zeroes what was counted."""
    samples = [
        replace(s, allocations_total=s.sequence % 500, num_alloc_retries=3 - s.sequence // 1000, num_device_alloc=0)
        for s in Job().samples(HOUR_S)
    ]
    assert worst(foretell(samples)) is State.OK


LEAKING = Job(trough=rising(20 * GIB, 2 * GIB / 60), blocks=rising(1000, 1))


@pytest.mark.parametrize(
    "seen",
    [
        pytest.param(lambda s: [x for x in s if x.sequence % 5 == 0], id="a sample each five seconds"),
        pytest.param(lambda s: [x for x in s if not 400 <= x.sequence < 520], id="two minutes missing"),
        pytest.param(lambda s: [x for y in s for x in (y, y)], id="each twice"),
        pytest.param(
            lambda s: [x for i in range(0, len(s), 4) for x in (*s[i : i + 4], *s[i : i + 4])], id="fours twice"
        ),
        pytest.param(
            lambda s: [replace(x, time_us=x.time_us - 3 * S * (x.sequence > 500)) for x in s], id="clock 3 s back"
        ),
        pytest.param(lambda s: s[300:], id="attached after five minutes"),
    ],
)
def test_a_leak_is_seen_through_gaps_and_repetitions(seen):
    told = foretell(seen(list(LEAKING.samples(1140))))
    assert criticals(told)[0][0] <= 1140 - 150
    assert told[-1][1].state is State.CRITICAL


def test_a_clock_that_is_set_back_by_an_hour_starts_over():
    first = list(LEAKING.samples(500))
    again = [replace(s, time_us=s.time_us - HOUR_S * S) for s in Job().samples(1500) if s.sequence > 500]
    told = foretell([*first, *again])
    assert told[-1][1].state is State.OK


def test_a_time_from_the_far_future_breaks_nothing():
    samples = list(Job().samples(600))
    samples[300] = replace(samples[300], time_us=2**62)
    assert worst(foretell(samples)) is State.OK


def test_many_samples_at_once_say_the_same():
    samples = list(LEAKING.samples(1000))
    at_once, one_by_one = outlook(), outlook()
    for chunk in chunks(AllocatorRef("p", "GPU-1"), samples):
        at_once.observe_chunk(chunk)
    for sample in samples:
        one_by_one.observe(sample)
    now = samples[-1].time_us
    assert at_once.forecast(now) == one_by_one.forecast(now)
    assert at_once.forecast(now).state is State.CRITICAL


def test_the_time_of_day_does_not_matter():
    day = [foretell(LEAKING.samples(900)) for _ in range(2)]
    shifted = [replace(s, time_us=s.time_us + 95_976_654_055_193) for s in LEAKING.samples(900)]
    states = [f.state for _, f in foretell(shifted)]
    assert day[0] == day[1]
    assert states == [f.state for _, f in day[0]]


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32), low_gib=st.integers(1, 30), spread_gib=st.integers(1, 25))
def test_a_state_is_not_taken_back_within_two_minutes(seed, low_gib, spread_gib):
    """Whatever peaks do: no flapping."""
    swing = _steps_of(seed, low_gib * GIB, (low_gib + spread_gib) * GIB)
    job = Job(swing=lambda t: swing(t) + t * 15 * MIB, retries=lambda t: t // 97, reserves=always(79 * GIB))
    levels = [(t, forecast.state.level) for t, forecast in foretell(job.samples(900))]
    raised_at = 0
    for (_, before), (t, now) in pairwise(levels):
        if now < before:
            assert t - raised_at >= 119
        if now != before:
            raised_at = t


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.builds(
            Sample,
            sequence=st.integers(1, 60),
            time_us=st.one_of(st.integers(0, 2**63 - 1), st.integers(START_US, START_US + 900 * S)),
            allocated_bytes=st.none() | st.integers(0, 2**63 - 1),
            reserved_bytes=st.none() | st.integers(0, 2**63 - 1),
            inactive_split_bytes=st.none() | st.integers(0, 2**63 - 1),
            allocated_peak_bytes=st.none() | st.integers(0, 2**63 - 1),
            allocation_count=st.none() | st.integers(0, 2**63 - 1),
            num_alloc_retries=st.none() | st.integers(0, 2**63 - 1),
            num_device_alloc=st.none() | st.integers(0, 2**63 - 1),
            num_device_free=st.none() | st.integers(0, 2**63 - 1),
            device_total_bytes=st.none() | st.integers(0, 2**63 - 1),
            device_free_bytes=st.none() | st.integers(0, 2**63 - 1),
        ),
        max_size=60,
    )
)
def test_whatever_a_job_says_nothing_breaks(samples):
    for _, forecast in foretell(samples):
        assert (forecast.cause is None) == (forecast.state is State.OK)
        assert forecast.seconds_to_oom is None or forecast.seconds_to_oom >= 0
