"""Made-up runs: the same name is the same run, and one of two siblings dies where the other one stops."""

import pytest

from allocscope.model import Event, EventKind
from tests.foresight import jobs
from tests.foresight.runs import Run
from tests.foresight.unseen import GOES_ON, GROWING, HELD_OUT, LEVEL, STOPS, Kind, Wanted, make, wanted

LENGTHS = Kind(jobs.Lengths, "line")


def _made(kind: Kind, fate: str) -> Run:
    return make(Wanted(kind, fate, seed=3))


def test_the_same_name_is_the_same_run():
    assert _made(Kind(jobs.Job), STOPS) == _made(Kind(jobs.Job), STOPS)


@pytest.mark.parametrize("kind", [LENGTHS, Kind(jobs.Leak, "line")], ids=lambda kind: kind.name)
def test_of_two_siblings_the_one_that_goes_on_dies(kind):
    stops, goes_on = _made(kind, STOPS), _made(kind, GOES_ON)
    assert stops.healthy
    assert stops.oom_us is None
    assert goes_on.foreseeable
    assert stops.device_total_bytes == goes_on.device_total_bytes
    ooms = [each for each in goes_on.seen if isinstance(each, Event) and each.kind is EventKind.OOM]
    assert [each.time_us for each in ooms] == [goes_on.oom_us]
    assert goes_on.causes[0] == kind.job.causes[0]


def test_each_kind_is_made_with_each_seed_and_half_of_the_families_are_held_out():
    names = [run.name for run in wanted(range(2))]
    assert len(names) == len(set(names)) == 2 * (2 * len(GROWING) + len(LEVEL))
    assert len(HELD_OUT) == len(GROWING) // 2
