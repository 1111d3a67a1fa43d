"""Which events are chosen."""

import pytest

from allocscope.allocator.chronicle.choice import Choice
from tests.allocator.made import alloc, freed, gave_back, got
from tests.log.told import MIB, A, told

TRACE = [
    got(A, 20 * MIB, time_us=100),
    alloc(A, 5 * MIB, time_us=200),
    got(A + 32 * MIB, 2 * MIB, stream=7, time_us=300, pool_id=(0, 1)),
    alloc(A + 32 * MIB, 512, stream=7, time_us=400, pool_id=(0, 1)),
    *freed(A, time_us=500),
    alloc(A, 3 * MIB, time_us=600),
    *freed(A, time_us=700),
    gave_back(A, 20 * MIB, time_us=800),
]


@pytest.mark.parametrize(
    ("choice", "entries"),
    [
        pytest.param(Choice(), [0, 1, 2, 3, 5, 5, 6, 8, 8, 9, 9], id="all"),
        pytest.param(Choice(kinds=frozenset({"alloc"})), [1, 3, 6], id="allocations"),
        pytest.param(Choice(kinds=frozenset({"driver"})), [1, 3], id="allocations from the driver"),
        pytest.param(Choice(kinds=frozenset({"split"})), [6], id="allocations by splitting"),
        pytest.param(Choice(kinds=frozenset({"cached"})), [], id="allocations of a block as it was"),
        pytest.param(Choice(kinds=frozenset({"segment_free", "empty_cache"})), [9, 9], id="kinds"),
        pytest.param(Choice(stream=7), [2, 3], id="stream"),
        pytest.param(Choice(small=True), [2, 3], id="small pool"),
        pytest.param(Choice(small=False), [0, 1, 5, 5, 6, 8, 8, 9], id="large pool"),
        pytest.param(Choice(private=True), [2, 3], id="private pools"),
        pytest.param(Choice(private_pool=(0, 1)), [2, 3], id="a private pool"),
        pytest.param(Choice(private_pool=(0, 2)), [], id="another private pool"),
        pytest.param(Choice(least_bytes=5 * MIB, most_bytes=6 * MIB), [1, 5], id="sizes"),
        pytest.param(Choice(most_bytes=512), [3], id="sizes up to"),
        pytest.param(Choice(since_us=600, until_us=700), [6, 8, 8], id="times"),
        pytest.param(Choice(address=A + 4 * MIB), [0, 1, 5, 5, 8, 9], id="an address"),
    ],
)
def test_a_choice(choice, entries):
    assert [event.entry for event in told(TRACE) if choice.takes(event)] == entries


def test_what_tells_no_time_is_in_no_time():
    events = told([entry._replace(time_us=0) for entry in TRACE])
    assert [event for event in events if Choice(since_us=0).takes(event)] == []
