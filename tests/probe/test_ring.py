"""What is kept until it is acknowledged, and what is given up first."""

import pytest

from allocscope.probe.ring import Item, Kind, Ring

M, S, E = Kind.BLOCK_MAP, Kind.SAMPLE, Kind.EVENT


def item(sequence: int, kind: Kind, allocator: str = "a", *, size: int = 0, stands_for: int = 1) -> Item:
    return Item(sequence, kind, (allocator, sequence), size, stands_for)


def ring_of(*items: Item, capacity: int = 100, map_bytes: int = 1000) -> Ring:
    ring = Ring(capacity, map_bytes)
    for each in items:
        ring.add(each)
    return ring


def take_all(ring: Ring, limit: int = 10) -> list[list[int]]:
    taken = []
    while ring.has_waiting:
        taken.append([each.sequence for each in ring.take(limit)])
    return taken


def test_goes_out_in_order_with_consecutive_samples_of_one_allocator_together():
    ring = ring_of(item(1, S), item(2, S), item(3, M), item(4, S), item(5, S, "b"), item(6, S, "b"), item(7, E))
    assert take_all(ring) == [[1, 2], [3], [4], [5, 6], [7]]


def test_a_chunk_is_no_longer_than_allowed():
    assert take_all(ring_of(*(item(n, S) for n in range(1, 8))), limit=3) == [[1, 2, 3], [4, 5, 6], [7]]


def test_the_oldest_maps_go_first_then_the_oldest_samples_then_events():
    ring = ring_of(item(1, E), item(2, S), item(3, M), item(4, M), capacity=4)
    gone = []
    for sequence in (5, 6, 7, 8):
        before = {each.sequence for lane in ring._lanes for each in lane.waiting}
        ring.add(item(sequence, E))
        gone += sorted(before - {each.sequence for lane in ring._lanes for each in lane.waiting})
    assert gone == [3, 4, 2, 1]
    assert (len(ring), ring.take_lost_count(), ring.take_lost_count()) == (4, 4, 0)


def test_losing_the_word_of_a_loss_counts_what_it_stood_for():
    ring = ring_of(item(1, E, stands_for=7), item(2, E), capacity=1)
    assert ring.take_lost_count() == 7


def test_only_what_was_sent_is_acknowledged():
    """A sample that is handed on late, under a lower number than one already acknowledged, is not lost."""
    ring = ring_of(item(2, S))
    assert take_all(ring) == [[2]]
    ring.add(item(1, S))
    ring.acknowledge(2)
    assert (len(ring), take_all(ring)) == (1, [[1]])


def test_a_new_stream_starts_with_everything_unacknowledged_in_order():
    ring = ring_of(item(1, S), item(2, M), item(3, S), item(4, E))
    take_all(ring)
    ring.acknowledge(1)
    ring.add(item(5, S))
    ring.rewind()
    assert take_all(ring) == [[2], [3], [4], [5]]
    ring.acknowledge(5)
    assert len(ring) == 0


def test_sent_and_unacknowledged_items_count_to_the_capacity():
    ring = ring_of(item(1, S), item(2, S), capacity=2)
    take_all(ring)
    ring.add(item(3, S))
    assert (len(ring), take_all(ring)) == (2, [[3]])


@pytest.mark.parametrize(
    ("happens", "lost"),
    [
        pytest.param(lambda ring: None, 0, id="nobody knows yet"),
        pytest.param(lambda ring: ring.acknowledge(2), 0, id="it arrived"),
        pytest.param(lambda ring: ring.acknowledge(1), 0, id="a part of it arrived"),
        pytest.param(lambda ring: ring.rewind(), 6, id="the stream broke"),
        pytest.param(lambda ring: (ring.acknowledge(1), ring.rewind()), 5, id="a part of it arrived, then it broke"),
        pytest.param(lambda ring: (ring.rewind(), ring.acknowledge(2)), 6, id="it broke, and then it was too late"),
    ],
)
def test_what_was_given_up_after_it_was_sent_is_lost_only_if_the_stream_breaks(happens, lost):
    ring = ring_of(item(1, E), item(2, E, stands_for=5), capacity=2)
    take_all(ring)
    for sequence in (3, 4):
        ring.add(item(sequence, E))
    happens(ring)
    assert ring.take_lost_count() == lost


def test_no_more_is_remembered_of_what_was_given_up_than_of_what_is_kept():
    ring = ring_of(capacity=3)
    for sequence in range(1, 11):
        ring.add(item(sequence, S))
        take_all(ring)
    assert (len(ring), ring.take_lost_count()) == (3, 4)


def test_block_maps_are_bounded_in_bytes():
    ring = ring_of(*(item(n, M, size=400) for n in (1, 2, 3)), item(4, M, size=1001), map_bytes=1000)
    assert (take_all(ring), ring.take_lost_count()) == ([[2], [3]], 2)
    ring.acknowledge(3)
    for sequence in (5, 6):
        ring.add(item(sequence, M, size=500))
    assert (len(ring), ring.lost_count) == (2, 0)


def test_what_cannot_be_sent_is_withdrawn_and_counted():
    ring = ring_of(item(1, S), item(2, S))
    take_all(ring)
    ring.withdraw(1)
    assert (len(ring), ring.lost_count) == (1, 1)
