"""The device is an account of bytes and addresses."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allocscope.allocator.simulator import Device, LowestGap, Rising

MIB = 1 << 20
PAGE = 2 * MIB


def test_the_lowest_gap_that_fits_is_taken_in_whole_pages():
    gaps = LowestGap(100 * MIB)
    first, second, third = gaps.take(PAGE), gaps.take(3 * MIB), gaps.take(PAGE)
    assert [first, second, third] == [100 * MIB, 102 * MIB, 106 * MIB]
    gaps.give_back(second, 3 * MIB)
    assert gaps.take(6 * MIB) == 108 * MIB
    assert gaps.take(PAGE) == 102 * MIB
    copy = gaps.copy()
    assert copy.take(PAGE) == gaps.take(PAGE) == 104 * MIB


@given(st.lists(st.tuples(st.integers(1, 9 * MIB), st.integers(0, 1 << 16), st.booleans()), max_size=60))
def test_no_two_ranges_overlap_and_all_comes_back(steps):
    gaps = LowestGap(0)
    taken: dict[int, int] = {}
    for size, which, gives_back in steps:
        if gives_back and taken:
            address = sorted(taken)[which % len(taken)]
            gaps.give_back(address, taken.pop(address))
        else:
            address = gaps.take(size)
            assert all(address >= start + length or address + size <= start for start, length in taken.items())
            taken[address] = size
    for address, size in taken.items():
        gaps.give_back(address, size)
    assert gaps.take(1 << 40) == 0


def test_addresses_are_never_used_up():
    """However large a device is said to be, and wherever its segments are."""
    addresses = LowestGap((1 << 64) - (1 << 20))
    assert [addresses.take(1 << 62) >> 62 for _ in range(9)] == list(range(3, 12))


def test_rising_ranges_are_never_used_twice():
    rising = Rising(1 << 40, step_bytes=1 << 30)
    assert rising.take(1) == 1 << 40
    rising.give_back(1 << 40, 1)
    assert rising.take((1 << 30) + 1) == (1 << 40) + (1 << 30)
    assert rising.copy().take(1) == rising.take(1) == (1 << 40) + (3 << 30)


def test_memory_is_counted_whether_or_not_it_has_an_address():
    device = Device(100 * MIB, other_bytes=30 * MIB)
    address = device.malloc(40 * MIB)
    assert address is not None
    assert device.free_bytes == 30 * MIB
    assert device.malloc(40 * MIB) is None
    assert device.commit(30 * MIB)
    assert not device.commit(1)
    device.free(address, 40 * MIB)
    device.uncommit(30 * MIB)
    assert (device.used_bytes, device.free_bytes) == (0, 70 * MIB)
    device.other_bytes = 300 * MIB
    assert device.free_bytes == 0


@pytest.mark.parametrize("shared", [True, False])
def test_a_copy_s_addresses_are_its_own(shared):
    device = Device(100 * MIB, reservations=None if shared else Rising(0))
    copy = device.copy()
    assert (copy.reservations is copy.segments) is shared
    assert copy.malloc(PAGE) == device.malloc(PAGE)
    assert copy.used_bytes == device.used_bytes == PAGE
