"""Where steps end is found in what a job asks for."""

import pytest

from allocscope.allocator.advice.steps import step_ends
from allocscope.allocator.recording import read_recording
from allocscope.allocator.simulator.history import Asked
from tests.advice.made import MIB
from tests.allocator.made import SHIPPED

STEP_US = 10_000_000
"""In what ships with the command every step takes ten seconds; here it is only what is held against, never what is gone by."""


def asked_of(path):
    run = read_recording(path)
    keys, asked = {}, []
    for at, entry in enumerate(run.trace):
        if entry.action == "alloc":
            keys[entry.address] = at
            asked.append(Asked("malloc", entry.time_us, at, entry.size, entry.stream, entry.pool_id))
        elif entry.action == "free_requested":
            asked.append(Asked("free", entry.time_us, keys.pop(entry.address), 0, 0, (0, 0)))
    return run.start_us, asked


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("steady-1-2216", 99),
        ("varlen-1-3372", 99),
        ("longtail-1-7723", 99),
        ("streams-2-3890", 99),
        ("leak_small-1-3570", 76),
        ("neighbour-2-6562", 54),
        ("kv_serve-1-4114", 0),
    ],
)
def test_steps_end_where_what_they_used_is_gone(name, found):
    """Fixed shapes and drawn ones, streams, leaks; serving has no steps. All but two lie right before the next step begins."""
    start_us, asked = asked_of(SHIPPED / f"{name}.run.json")
    ends = step_ends(asked)
    late = [at for at in ends if (asked[at - 1].time_us - start_us) % STEP_US > 0.9 * STEP_US]
    assert len(ends) == found
    assert len(ends) - len(late) <= 2


def test_a_few_requests_show_no_steps():
    asked = [Asked("malloc", at, at, MIB, 0, (0, 0)) for at in range(10)]
    assert step_ends(asked) == ()
    assert step_ends([]) == ()
