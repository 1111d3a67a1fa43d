"""An OutOfMemoryError that is heard of late, after an outage: told while it is news, once, and as of its own moment."""

from dataclasses import replace

import pytest

from allocscope.alerts.states import AlertState
from allocscope.collector.fleet import Change, Fleet
from allocscope.model import Device, Event, EventKind, Process, Sample
from allocscope.storage.records import NodeBatch
from tests.collector.made import PROCESS_ID, RECEIVED_US, batch

SECOND_US = 1_000_000
PROCESS = Process(PROCESS_ID, "goes on", 4711, "host", 1, rank=0, devices=(Device("GPU-a", 0, total_bytes=100),))
CLOCK_OFF_US = 3600 * SECOND_US
"""The node's clock is an hour slow."""


def sample(sequence: int) -> Sample:
    """One each second."""
    time_us = RECEIVED_US - CLOCK_OFF_US + sequence * SECOND_US
    return Sample(sequence, time_us, allocated_bytes=5, reserved_bytes=6)


def oom(sequence: int, device_uuid: str | None = "GPU-a") -> Event:
    return Event(
        PROCESS_ID, sequence, sample(sequence).time_us, EventKind.OOM, device_uuid=device_uuid, requested_bytes=7
    )


def stopped(sequence: int) -> Event:
    return Event(PROCESS_ID, sequence, sample(sequence).time_us, EventKind.STOPPED)


def sent(number: int, *items: Sample | Event, late: bool = False, after: int = 0) -> NodeBatch:
    """A batch that is closed with the newest of them, or late: `after` so many seconds."""
    last = max((item.sequence for item in items), default=0)
    received_us = RECEIVED_US + (last + after) * SECOND_US
    one = batch(number, PROCESS, items, late=late, received_us=received_us)
    return replace(one, closed_us=received_us - CLOCK_OFF_US)


def told(changes: list[Change]) -> list[tuple[str, AlertState, int]]:
    return [(c.alert.condition.rule.name, c.alert.state, c.alert.fired_us or 0) for c in changes]


def after_an_outage(it: Fleet, seconds: int) -> list[Change]:
    """An OOM in the 11th second; the collector hears the newest sample, so many seconds later, before it."""
    it.take(sent(1, sample(10)))
    it.take(sent(100, sample(11 + seconds)))
    return it.take(sent(2, oom(11), sample(12), late=True, after=seconds))


@pytest.mark.parametrize("device_uuid", ["GPU-a", None], ids=["of its device", "of a device not known"])
def test_of_a_job_that_goes_on_it_is_told_as_of_its_moment_and_for_the_rest_of_ten_minutes(device_uuid):
    it = Fleet(retire_after_us=300 * SECOND_US)
    it.take(sent(1, sample(10)))
    it.take(sent(100, sample(400)))
    late = sent(2, oom(11, device_uuid), sample(12), late=True, after=388)
    assert told(it.take(late)) == [("AllocscopeOOM", AlertState.FIRING, oom(11).time_us)]
    assert it.take(late) == [], "it is sent again"
    assert list(it.ooms.values()) == [RECEIVED_US + 11 * SECOND_US], "when it would have been heard"
    then = [(second, told(it.take(sent(second, sample(second))))) for second in range(401, 800)]
    over = [("AllocscopeOOM", AlertState.RESOLVED, oom(11).time_us)]
    assert [(second, changes) for second, changes in then if changes] == [(611, over)]


def test_of_long_ago_it_is_kept_and_nobody_is_woken():
    assert after_an_outage(Fleet(retire_after_us=300 * SECOND_US), 599)
    assert after_an_outage(Fleet(retire_after_us=300 * SECOND_US), 600) == []


def test_it_neither_begins_nor_ends_what_stands():
    it = Fleet(retire_after_us=300 * SECOND_US)
    it.take(sent(1, sample(10)))
    it.take(sent(100, sample(100), oom(101)))
    standing = list(it.standing())
    assert len(standing) == 1
    assert it.take(sent(2, oom(11), late=True, after=91)) == []
    assert list(it.standing()) == standing


@pytest.mark.parametrize(
    ("seconds", "news"), [pytest.param(300, True, id="of late"), pytest.param(601, False, id="of long ago")]
)
def test_of_a_job_whose_end_was_heard_of_first_it_is_told_too(seconds, news):
    it = Fleet(retire_after_us=300 * SECOND_US)
    it.take(sent(1, sample(10)))
    it.take(sent(99, sample(13), stopped(14)))
    it.take(sent(100 + seconds, after=11 + seconds))
    late = sent(2, oom(11), sample(12), late=True, after=seconds)
    wanted = [("AllocscopeOOM", AlertState.FIRING, oom(11).time_us)] if news else []
    assert told(it.take(late)) == wanted
    assert it.take(late) == []
    assert it.watched == {}
    ticks = [it.tick(late.received_us + second * SECOND_US, {}) for second in range(1, 700)]
    over = [second for second, changes in enumerate(ticks, 1) for name, *_ in told(changes) if name == "AllocscopeOOM"]
    assert over == ([300] if news else [])
    assert it.ooms == {}
