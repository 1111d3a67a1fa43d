"""Many allocators side by side: each is foreseen as if it were alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from allocscope.alerts.forecast import Outlook, Outlooks, of_samples
from allocscope.model import (
    BlockGroup,
    BlockMap,
    Device,
    DeviceReading,
    Event,
    EventKind,
    Forecast,
    Pool,
    Sample,
    SizeClass,
    State,
)
from tests.forecast.streams import GIB, START_US, TOTAL, Job, S, always, criticals, foretell, outlook, rising, worst

JOBS = {
    "leaks": Job(trough=rising(20 * GIB, 2 * GIB / 60), blocks=rising(1000, 1)),
    "grows": Job(swing=rising(20 * GIB, 3 * GIB / 60)),
    "is full": Job(swing=always(57 * GIB), reserves=always(79 * GIB)),
    "has a neighbour": Job(others=rising(GIB, GIB / 10, since_s=200)),
    "flushes": Job(reserves=always(78 * GIB), swing=always(57 * GIB), retries=lambda t: t // 100),
}
SECONDS = 560


def _add(outlooks: Outlooks) -> int:
    return outlooks.add(device_total_bytes=None, allowed_bytes=None, allocator_conf="")


def _together(jobs: list[Job]) -> list[Forecast]:
    """What is foreseen of each in the end, told a sample of each at a time."""
    outlooks = Outlooks()
    rows = np.array([_add(outlooks) for _ in jobs])
    forecasts: list[Forecast] = []
    for samples in zip(*(job.samples(SECONDS) for job in jobs), strict=True):
        figures = of_samples(samples)
        assert outlooks.observe(rows, figures).all()
        forecasts = list(outlooks.forecast(rows, figures.time_us).forecasts())
    return forecasts


def test_each_of_many_is_foreseen_as_if_it_were_alone():
    alone = [foretell(job.samples(SECONDS))[-1][1] for job in JOBS.values()]
    assert {forecast.state for forecast in alone} >= {State.OK, State.CRITICAL}
    assert _together(list(JOBS.values())) == alone
    assert _together([job for job in JOBS.values() for _ in range(30)]) == [f for f in alone for _ in range(30)]


def test_one_takes_less_than_two_kilobytes():
    assert Outlooks().row_bytes < 2048


def test_who_comes_into_the_place_of_one_that_ended_begins_anew():
    outlooks = Outlooks()
    row = _add(outlooks)
    for sample in JOBS["leaks"].samples(1000):
        outlooks.observe(np.array([row]), of_samples([sample]))
        outlooks.forecast(np.array([row]), np.array([sample.time_us]))
    end_us = START_US + 1000 * S
    assert outlooks.forecast(np.array([row]), np.array([end_us])).forecast(0).state is State.CRITICAL
    outlooks.drop(row)
    assert _add(outlooks) == row
    assert outlooks.forecast(np.array([row]), np.array([end_us])).forecast(0) == Forecast(end_us, State.OK)


def test_what_is_not_known_of_one_is_no_matter_to_the_others():
    outlooks = Outlooks()
    rows = np.array([_add(outlooks) for _ in range(3)])
    states: list[State] = []
    for sample in JOBS["leaks"].samples(1000):
        nothing = Sample(sample.sequence, sample.time_us)
        new = outlooks.observe(rows, of_samples([nothing, sample, replace(sample, device_total_bytes=None)]))
        assert new.all()
        states = [f.state for f in outlooks.forecast(rows, np.full(3, sample.time_us)).forecasts()]
    assert states == [State.OK, State.CRITICAL, State.OK]


def test_a_device_that_became_smaller_is_no_neighbour_that_grows():
    """As where a MIG instance takes the place of a larger one: what was reserved fits."""
    first = Job(reserves=always(30 * GIB), swing=always(5 * GIB))
    second = replace(first, total=TOTAL // 2)
    samples = [*list(first.samples(600))[:300], *list(second.samples(600))[300:]]
    told = foretell(samples)
    assert not criticals(told)
    assert told[-1][1].state is State.OK


@pytest.mark.parametrize(("allowed_bytes", "state"), [(60 * GIB, State.OK), (41 * GIB, State.CRITICAL)])
def test_a_memory_fraction_that_is_set_while_it_runs_is_the_end_of_the_room(allowed_bytes, state):
    """Live memory grows by 1 GiB a minute from 30 GiB on."""
    into: Outlook = outlook()
    states: list[State] = []
    for sample in Job(trough=rising(10 * GIB, GIB / 60)).samples(600):
        if sample.sequence == 300:
            into.amend(allowed_bytes=allowed_bytes, allocator_conf="")
        into.observe(sample)
        states.append(into.forecast(sample.time_us).state)
    assert State.CRITICAL not in states[:299]
    assert (states[-1] is State.CRITICAL) == (state is State.CRITICAL)


def test_a_sample_from_the_future_is_the_present_once_it_is_reached():
    """A clock that was an hour ahead for one sample: then it is set back, and what is foreseen begins anew."""
    samples = [replace(s, time_us=s.time_us + 3600 * S) if s.sequence == 500 else s for s in Job().samples(900)]
    told = foretell(samples)
    assert worst(told) is State.OK
    assert told[-1][1].time_us == START_US + 900 * S


LARGEST = 2**63 - 1
"""The largest figure that a sample can bring."""


@pytest.mark.parametrize("name", ["device_free_bytes", "reserved_bytes", "device_total_bytes", "active_bytes"])
def test_one_that_says_the_largest_figures_is_no_matter_to_the_others(name):
    """Nor is one that says nothing but such; maps, errors and readings may say them, too."""
    outlooks = Outlooks()
    rows = np.array([_add(outlooks) for _ in range(3)])
    states: list[State] = []
    for sample in JOBS["leaks"].samples(1000):
        one = replace(sample, **{name: LARGEST})
        all_of_it = Sample(sample.sequence, sample.time_us, **dict.fromkeys(_FIGURES, LARGEST))
        assert outlooks.observe(rows, of_samples([one, sample, all_of_it])).all()
        outlooks.observe_map(2, _map_of(LARGEST, sample))
        outlooks.observe_event(2, Event("p", 1, sample.time_us, EventKind.OOM, requested_bytes=LARGEST))
        device = Device("GPU", 0, total_bytes=LARGEST)
        outlooks.observe_device(2, DeviceReading(device, sample.time_us, True, free_bytes=0))
        states = [f.state for f in outlooks.forecast(rows, np.full(3, sample.time_us)).forecasts()]
    assert states[1] is State.CRITICAL


_FIGURES = of_samples([])._fields[2:]


def _map_of(size_bytes: int, sample: Sample) -> BlockMap:
    """Two groups, so that their sum is beyond eight bytes."""
    holes = (SizeClass(size_bytes, 1, size_bytes, size_bytes),)
    live = (SizeClass(2 * size_bytes, 1, 2 * size_bytes, 2 * size_bytes),)
    group = BlockGroup(
        Pool.LARGE, 0, None, True, 1, size_bytes, 0, 0, 0, 0, size_bytes, 0, 0, holes, (), live, size_bytes
    )
    return BlockMap(sample.sequence, sample.time_us, (group, group))
