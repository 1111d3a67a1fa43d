"""How much was stranded at most is the counter's figure where there is one, and what looks find where there is none."""

from allocscope.allocator.settings import AllocatorSettings
from allocscope.allocator.simulator import Device, Simulator
from allocscope.allocator.simulator.history import Asked, ask_again

MIB = 1 << 20
TOTAL = 1024 * MIB
EXPANDABLE = AllocatorSettings(expandable=True)


def malloc(key, size, *, pool_id=(0, 0), survived=False):
    return Asked("malloc", 0, key, size, 0, pool_id, survived)


def free(key):
    return Asked("free", 0, key, 0, 0, (0, 0))


def outcome(asked, settings=AllocatorSettings(), total=TOTAL):  # noqa: B008 (it is frozen)
    return ask_again(asked, Simulator(settings, Device(total)), lambda _: 0)


def test_holes_in_segments_are_stranded_and_whole_segments_are_not():
    """17 MiB beside 3 in one of 20; then all of it is free, and could be given back."""
    assert outcome([malloc(1, 3 * MIB), free(1), malloc(2, 40 * MIB), free(2)]).stranded_peak_bytes == 17 * MIB


def test_of_an_expandable_segment_whole_pages_are_not_stranded():
    """One of 100 MiB is free behind one of 3 MiB: the four pages that it covers could be given back."""
    asked = [malloc(1, 3 * MIB), malloc(2, 97 * MIB), free(2)]
    assert outcome(asked, EXPANDABLE).stranded_peak_bytes == 17 * MIB


def test_what_private_pools_keep_free_is_not_stranded():
    asked = [malloc(1, 3 * MIB), free(1), malloc(2, 2 * MIB, pool_id=(0, 1)), free(2)]
    assert outcome(asked).stranded_peak_bytes == 17 * MIB
    assert outcome(asked[2:]).stranded_peak_bytes == 0


def test_a_failure_that_the_program_survived_does_not_end_the_replay():
    asked = [malloc(1, 40 * MIB), malloc(2, 60 * MIB, survived=True), free(1), malloc(3, 50 * MIB)]
    found = outcome(asked, total=80 * MIB)
    assert found.failed_at is None
    assert found.num_alloc_retries == 2
    assert outcome([*asked, malloc(4, 50 * MIB)], total=80 * MIB).failed_at == 4


def test_what_failed_then_and_is_served_here_is_given_back_at_once():
    asked = [malloc(1, 40 * MIB), malloc(2, 60 * MIB, survived=True), malloc(3, 60 * MIB)]
    found = outcome(asked, total=120 * MIB)
    assert found.failed_at is None
    assert (found.allocated_peak_bytes, found.reserved_peak_bytes) == (100 * MIB, 100 * MIB)
