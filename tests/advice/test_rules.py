"""The rules by which settings are made, judged and chosen."""

import pytest

from allocscope.allocator.advice import Attempt
from allocscope.allocator.advice.candidates import candidates, more_candidates, split_limits_mb
from allocscope.allocator.advice.choice import best_of, is_near_limit, is_worth_it
from allocscope.allocator.advice.demand import demand_of
from allocscope.allocator.advice.room import needed_bytes
from allocscope.allocator.conf import conf_in_force, text_of
from allocscope.allocator.settings import AllocatorSettings, parse_settings, parse_settings_to_try
from allocscope.allocator.simulator.history import Asked, Outcome
from allocscope.model import Trial

MIB = 1 << 20
GIB = 1 << 30


def malloc(key, mib, *, time_us=0):
    return Asked("malloc", time_us, key, mib * MIB, 0, (0, 0))


def free(key):
    return Asked("free", 0, key, 0, 0, (0, 0))


LARGE = [malloc(key, mib) for key, mib in enumerate((30, 60, 90, 120, 5, 5), start=1)]


@pytest.mark.parametrize(
    "conf",
    [
        "",
        "max_split_size_mb:64",
        "expandable_segments:True,roundup_power2_divisions:4",
        "pinned_use_background_threads:True,garbage_collection_threshold:0.8",
        "backend:native,per_process_memory_fraction:0.5",
    ],
)
@pytest.mark.parametrize("release", [(2, 0), (2, 6), (2, 11), (2, 14)])
def test_nothing_is_tried_that_pytorch_would_refuse_or_that_is_set_already(conf, release):
    in_force = conf_in_force(conf, parse_settings(conf))
    tried = candidates(LARGE, in_force, release, has_limit=True)
    further = more_candidates(in_force, release)
    assert len(tried) >= 5
    assert len(further) >= 10
    assert len(set(tried)) == len(tried)
    for each in (*tried, *further):
        assert parse_settings_to_try(each) != parse_settings(conf)
        kept = {"pinned_use_background_threads", "backend", "per_process_memory_fraction"} & set(in_force)
        assert all(f"{key}:{in_force[key]}" in each for key in kept)


def test_sizes_to_be_kept_whole_are_those_of_the_job():
    assert split_limits_mb(LARGE, AllocatorSettings()) == [60, 90, 120]
    assert split_limits_mb([malloc(1, 20)], AllocatorSettings()) == []


@pytest.mark.parametrize(
    ("conf", "in_force", "told"),
    [
        ("", "", ""),
        ("max_split_size_mb:64", "", ""),
        ("", "expandable_segments:True", "expandable_segments:True"),
        ("expandable_segments:True,backend:native", "", "expandable_segments:False,backend:native"),
        ("roundup_power2_divisions:4", "roundup_power2_divisions:8", "roundup_power2_divisions:8"),
        ("max_splt_size_mb:64", "max_split_size_mb:32", "max_split_size_mb:32"),
    ],
)
def test_what_is_in_force_is_told_by_its_own_string(conf, in_force, told):
    assert text_of(conf_in_force(conf, parse_settings(in_force))) == told


def test_a_table_of_divisions_is_told_so_that_it_is_read_the_same():
    settings = parse_settings("roundup_power2_divisions:[64:8,256:4,1024:4,>:1]")
    told = text_of(conf_in_force("", settings))
    assert [max(each, 1) for each in parse_settings(told).divisions] == [max(each, 1) for each in settings.divisions]


def served_from(least):
    """A replay in which requests are served from so many bytes on; by settings."""

    def made(attempts):
        for each in attempts:
            served = least(each.conf, each.room_bytes)
            yield Outcome(None if served else 7, None, None, 0, 0, 0, 0, 0, 0, 0)

    return made


def found(least, *confs, room=1000 * MIB, start=1000 * MIB, live=100 * MIB, near=None):
    starts = [(Attempt(conf), start) for conf in confs]
    answer = needed_bytes(starts, served_from(least), room_bytes=room, live_bytes=live, near_bytes=near)
    return {attempt.conf: needed for attempt, needed in answer.items()}


@pytest.mark.parametrize("least_mib", [101, 400, 999, 1000, 1001, 1300, 2900])
def test_the_room_is_found_to_a_hundredth(least_mib):
    needed = found(lambda _, room: room >= least_mib * MIB, "a")["a"]
    assert least_mib * MIB <= needed <= (least_mib + 10) * MIB


def test_what_needs_more_than_three_times_the_room_has_no_figure():
    assert found(lambda _, room: room >= 3100 * MIB, "a") == {}


def test_what_needs_much_more_than_the_best_is_not_sought_to_the_end():
    least = {"a": 400, "b": 405, "c": 900}
    near = found(lambda conf, room: room >= least[conf] * MIB, *least, near=lambda _: 50 * MIB)
    assert set(near) == {"a", "b"}


def test_without_time_nothing_half_found_is_told():
    def made(attempts):
        yield Outcome(None, None, None, 0, 0, 0, 0, 0, 0, 0)

    starts = [(Attempt("a"), GIB), (Attempt("b"), GIB)]
    assert needed_bytes(starts, made, room_bytes=GIB, live_bytes=MIB) == {}


def trial(conf, needed_mib=None, *, calls=10, flushes=0, **more):
    needed = None if needed_mib is None else needed_mib * MIB
    return Trial(conf, needed_bytes=needed, num_device_alloc=calls, num_alloc_retries=flushes, **more)


@pytest.mark.parametrize(
    ("trials", "best"),
    [
        pytest.param([trial("a:1", 700), trial("b:1", 500)], "b:1", id="the least room"),
        pytest.param([trial("a:1,b:1", 500), trial("c:1", 510)], "c:1", id="of near-equals the fewest keys"),
        pytest.param([trial("a:1", 500, calls=900), trial("c:1", 510)], "c:1", id="then the fewest calls"),
        pytest.param([trial("a:1", 500, flushes=90), trial("c:1", 510)], "c:1", id="and flushes"),
        pytest.param(
            [trial("max_split_size_mb:64", 500, calls=5), trial("roundup_power2_divisions:8", 510)],
            "roundup_power2_divisions:8",
            id="before that the surest",
        ),
        pytest.param([trial("a:1", 500, blocked="no"), trial("c:1", 900)], "c:1", id="nothing that is blocked"),
        pytest.param([trial("a:1", 500, failed_at=3), trial("c:1", 900)], "c:1", id="nothing that fails"),
        pytest.param([trial("a:1,b:1"), trial("c:1")], "c:1", id="unmeasured, the simplest"),
        pytest.param([trial("a:1", failed_at=3)], None, id="nothing serves"),
    ],
)
def test_the_best_leaves_most_room_and_is_simple(trials, best):
    chosen = best_of(trials, 1000 * MIB)
    assert (chosen and chosen.conf) == best


@pytest.mark.parametrize(("needed_mib", "near"), [(899, False), (901, True), (None, False)])
def test_near_the_limit_is_less_than_a_tenth_from_it(needed_mib, near):
    assert is_near_limit(trial("", needed_mib), 1000 * MIB) is near
    assert not is_near_limit(trial("", needed_mib), None)


@pytest.mark.parametrize(
    ("recorded", "other", "worth"),
    [
        pytest.param(trial("", 950), trial("a:1", 899), True, id="a twentieth of the room"),
        pytest.param(trial("", 950), trial("a:1", 901), False, id="less"),
        pytest.param(trial("", 950, flushes=5), trial("a:1", 950, flushes=1), True, id="flushes"),
        pytest.param(trial("", 950, flushes=4), trial("a:1", 950), False, id="few flushes"),
        pytest.param(trial("", 950, flushes=9), trial("a:1", 960), False, id="flushes for room"),
        pytest.param(trial("", 950), trial("a:1"), False, id="nobody knows"),
    ],
)
def test_what_is_worth_a_change_for_a_run_in_which_nothing_failed(recorded, other, worth):
    assert is_worth_it(other, recorded, 1000 * MIB) is worth


def demand(asked, total_mib=1000, limit=None, other=lambda _: 0):
    return demand_of(asked, device_total_bytes=total_mib * MIB, limit_bytes=limit, other_used=other)


def test_what_is_live_at_once_is_needed_whatever_the_settings():
    told = demand([malloc(1, 300), malloc(2, 300), free(1), malloc(3, 100)], total_mib=500)
    assert (told.live_peak_bytes, told.live_bytes, told.room_bytes) == (600 * MIB, 600 * MIB, 500 * MIB)
    assert told.exceeds
    assert not demand([malloc(1, 300), free(1), malloc(2, 300)], total_mib=500).exceeds
    assert demand([malloc(1, 300)], limit=200 * MIB).exceeds


def test_the_worst_moment_goes_by_what_others_leave():
    told = demand(
        [malloc(1, 300, time_us=1), malloc(2, 100, time_us=2)], other=lambda time_us: 700 * MIB if time_us > 1 else 0
    )
    assert (told.live_bytes, told.room_bytes, told.other_growth_bytes) == (400 * MIB, 300 * MIB, 700 * MIB)


def test_what_failed_and_was_survived_is_not_live():
    told = demand([malloc(1, 300), malloc(2, 900)._replace(survived=True), malloc(3, 100)])
    assert told.live_peak_bytes == 400 * MIB
    assert not told.exceeds


def rounds(count, size_of, kept_of):
    asked, key = [], 0
    for step in range(count):
        asked += [malloc(key + 1, size_of(step)), free(key + 1), malloc(key + 2, kept_of(step))]
        if not kept_of(step):
            asked[-1] = malloc(key + 2, 1)
            asked.append(free(key + 2))
        key += 2
    return asked


@pytest.mark.parametrize(
    ("asked", "grows", "keeps"),
    [
        pytest.param(rounds(200, lambda _: 50, lambda _: 0), False, False, id="steady"),
        pytest.param(rounds(200, lambda step: 50 + step % 7, lambda _: 0), False, False, id="up and down"),
        pytest.param(rounds(200, lambda step: 50 + step, lambda _: 0), True, False, id="larger and larger"),
        pytest.param(rounds(200, lambda _: 50, lambda _: 2), True, True, id="a leak"),
    ],
)
def test_growth_is_told_from_what_goes_up_and_down_and_a_leak_from_growth(asked, grows, keeps):
    told = demand(asked)
    assert (told.growth_bytes > 0, told.keeps_growth) == (grows, keeps)
