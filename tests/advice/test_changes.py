"""What a program asks for when it does otherwise."""

import pytest

from allocscope.allocator.advice import CHANGES, changed
from allocscope.allocator.simulator.history import Asked
from tests.advice.made import MIB

POOL = (0, 0)


def malloc(key, mib, *, stream=0, time_us=0):
    return Asked("malloc", time_us, key, mib * MIB, stream, POOL)


def free(key, *, time_us=0):
    return Asked("free", time_us, key, 0, 0, POOL)


def steps(*shapes):
    """Each of these steps allocates so many MiB, layer by layer, and frees all of it."""
    asked, key = [malloc(1, 100)], 1
    for at, layers in enumerate(shapes):
        keys = range(key + 1, key + 1 + len(layers))
        asked += [malloc(key, mib, time_us=at) for key, mib in zip(keys, layers, strict=True)]
        asked += [free(key, time_us=at) for key in reversed(keys)]
        key = keys[-1]
    return asked


def mibs(asked):
    return [each.size // MIB for each in asked if each.what == "malloc"]


def test_steps_padded_to_buckets_ask_for_what_the_largest_of_their_bucket_does():
    """The first step and the last are not known to be whole, and stay."""
    asked = steps((10, 20), (10, 20), (11, 22), (39, 80), (40, 79), (10, 20))
    assert mibs(changed(asked, "buckets:2")) == [100, 10, 20, 11, 22, 11, 22, 40, 80, 40, 80, 10, 20]
    assert mibs(changed(asked, "buckets:1")) == [100, 10, 20, *([40, 80] * 4), 10, 20]


def test_without_steps_large_sizes_are_padded_to_so_many():
    asked = [malloc(key, mib) for key, mib in enumerate((1, 2, 3, 60, 64), start=1)]
    assert mibs(changed(asked, "buckets:2")) == [1, 3, 3, 64, 64]


def test_the_cache_is_emptied_after_so_many_steps():
    asked = steps(*[(10, 20)] * 7)
    kinds = [each.what for each in changed(asked, "empty_cache:2")]
    assert kinds.count("empty_cache") == 3
    assert [at for at, kind in enumerate(kinds) if kind == "empty_cache"] == [9, 18, 27]
    assert [each for each in changed(asked, "empty_cache:2") if each.what != "empty_cache"] == asked


def test_without_steps_hundredths_of_the_requests_stand_for_them():
    asked = [malloc(key, 5) for key in range(1, 501)]
    kinds = [each.what for each in changed(asked, "empty_cache:10")]
    assert kinds.count("empty_cache") == 10 - 1


def test_on_one_stream_nothing_waits_for_another():
    asked = [
        malloc(1, 5, stream=3),
        malloc(2, 5),
        Asked("wait", 0, 1, 0, 0, POOL),
        free(1),
        Asked("done", 0, 1, 0, 0, POOL),
    ]
    assert changed(asked, "one_stream") == [malloc(1, 5), malloc(2, 5), free(1)]


def test_the_largest_step_is_run_once_more_after_the_first():
    asked = steps((10, 20), (11, 21), (30, 40), (12, 22), (10, 20))
    then = changed(asked, "largest_first")
    assert mibs(then) == [100, 10, 20, 30, 40, 11, 21, 30, 40, 12, 22, 10, 20]
    assert len({each.key for each in then if each.what == "malloc"}) == 13
    assert len(then) == len(asked) + 4


def test_without_steps_there_is_no_largest():
    asked = [malloc(1, 5), malloc(2, 6)]
    assert changed(asked, "largest_first") == asked


@pytest.mark.parametrize("change", CHANGES)
def test_every_change_that_is_tried_can_be_made_of_no_requests(change):
    assert list(changed([], change)) == []


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ("bucket:8", "there are buckets:N, empty_cache:N, one_stream, largest_first"),
        ("", "is no change"),
        ("buckets", "needs a whole number from 1 on, such as buckets:8"),
        ("buckets:0", "needs a whole number"),
        ("empty_cache:-1", "such as empty_cache:8"),
        ("empty_cache:1e3", "needs a whole number"),
        ("one_stream:2", "one_stream takes no number"),
    ],
)
def test_what_is_no_change_is_told_with_what_there_is(change, problem):
    with pytest.raises(ValueError, match=problem):
        changed([], change)
