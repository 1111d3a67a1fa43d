"""Requests in columns are the same requests, in another process too."""

import pickle

from allocscope.allocator.simulator.asked import Asked, other_use, pack

ASKED = [
    Asked("malloc", 10, 1, 512, 0, (0, 0)),
    Asked("hole", 10, 2, 1 << 40, 94_000_000_000_000, (0, 3)),
    Asked("began", 10, 0, 0, 0, (0, 0)),
    Asked("malloc", 11, 3, 7, -5, (2, 0), survived=True),
    Asked("wait", 12, 1, 0, 0, (0, 0)),
    Asked("free", 12, 1, 0, 0, (0, 0)),
    Asked("done", 13, 1, 0, 0, (0, 0)),
    Asked("empty_cache", 14, 0, 0, 0, (0, 0)),
    Asked("end_pool", 14, 0, 0, 0, (2, 0)),
]


def test_requests_come_out_of_columns_as_they_went_in():
    packed = pickle.loads(pickle.dumps(pack(ASKED)))
    assert list(packed) == ASKED
    assert len(packed) == 9
    assert list(pack([])) == []


def test_what_others_used_is_known_at_the_moments_of_the_requests():
    used = {10: 5, 11: 5, 12: 7, 13: 7, 14: 0}
    steps = pickle.loads(pickle.dumps(other_use(ASKED, used.__getitem__)))
    assert [steps(time_us) for time_us in (10, 11, 12, 13, 14)] == [5, 5, 7, 7, 0]
    assert steps.since_us == (0, 10, 12, 14)
