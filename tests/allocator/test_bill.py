"""A bill accounts for every byte: its lines add up to the total, none is below zero, and what is not known to the byte says so."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allocscope.allocator.bill import (
    ALLOCATOR_LINES,
    ProcessUse,
    allocator_lines,
    device_bill,
    lines_from_counters,
    lines_from_map,
)
from allocscope.allocator.player import Player
from allocscope.allocator.recording import read_recording
from allocscope.model import BillEntry, BlockGroup, BlockMap, Line, Pool, PrivatePool, Sample
from tests.allocator.made import SHIPPED

P = "a" * 32
GROUP = BlockGroup(
    pool=Pool.LARGE,
    stream=0,
    private_pool=None,
    expandable=False,
    segment_count=1,
    reserved_bytes=1000,
    requested_bytes=400,
    rounding_bytes=50,
    allocated_bytes=450,
    awaiting_free_bytes=100,
    stranded_bytes=150,
    releasable_bytes=300,
    private_bytes=0,
    free_stranded=(),
    free_releasable=(),
    live=(),
)
SAMPLE = Sample(
    sequence=2,
    time_us=200,
    reserved_bytes=1000,
    active_bytes=600,
    allocated_bytes=600,
    requested_bytes=550,
    inactive_split_bytes=150,
    private_pools_reserved_bytes=0,
)


def told(lines):
    """Line: bytes, with a ~ where it is not exact."""
    return {entry.line.value: f"{'' if entry.exact else '~'}{entry.bytes}" for entry in lines}


def test_a_map_bills_every_line_exactly():
    private = replace(GROUP, private_pool=PrivatePool(0, 1), stranded_bytes=0, releasable_bytes=0, private_bytes=450)
    assert told(lines_from_map(P, BlockMap(1, 1, (GROUP, private)))) == {
        "requested": "800",
        "rounding": "100",
        "awaiting_free": "200",
        "stranded": "150",
        "releasable": "300",
        "private": "450",
    }


def test_a_map_that_does_not_know_what_was_asked_for_says_so():
    lines = lines_from_map(P, BlockMap(1, 1, (replace(GROUP, requested_bytes=None, rounding_bytes=None),)))
    assert (told(lines)["requested"], told(lines)["rounding"]) == ("~450", "~0")


@pytest.mark.parametrize(
    ("changed", "expandable", "expected"),
    [
        pytest.param({}, False, "550 50 0 150 250 0", id="nothing waits: exact"),
        pytest.param({"allocated_bytes": 500}, False, "~450 ~50 100 150 250 0", id="frees wait"),
        pytest.param({"allocated_bytes": 40}, False, "~0 ~40 560 150 250 0", id="more waits than is live"),
        pytest.param({"requested_bytes": None}, False, "~600 ~0 0 150 250 0", id="requests are not known"),
        pytest.param({"private_pools_reserved_bytes": 64}, False, "550 50 0 ~150 ~250 ~0", id="private pools"),
        pytest.param(
            {"private_pools_reserved_bytes": None}, False, "550 50 0 ~150 ~250 ~0", id="perhaps private pools"
        ),
        pytest.param({"inactive_split_bytes": 0}, True, "550 50 0 ~0 ~400 ~0", id="expandable segments"),
        pytest.param({}, None, "550 50 0 ~150 ~250 ~0", id="perhaps expandable segments"),
        pytest.param({"inactive_split_bytes": None}, False, "550 50 0 ~0 ~400 ~0", id="holes are not known"),
        pytest.param({"inactive_split_bytes": 900}, False, "550 50 0 ~400 ~0 0", id="more holes than free bytes"),
        pytest.param({"active_bytes": 1200}, False, "~0 ~600 ~400 ~0 ~0 0", id="more active than reserved"),
    ],
)
def test_counters_bill_what_they_can(changed, expandable, expected):
    lines = lines_from_counters(P, replace(SAMPLE, **changed), expandable=expandable)
    assert tuple(entry.line for entry in lines) == ALLOCATOR_LINES
    assert " ".join(told(lines).values()) == expected
    assert sum(entry.bytes for entry in lines) == 1000


@pytest.mark.parametrize("name", ["reserved_bytes", "active_bytes", "allocated_bytes"])
def test_counters_that_are_not_known_bill_nothing(name):
    unknown: dict[str, Any] = {name: None}
    assert lines_from_counters(P, replace(SAMPLE, **unknown), expandable=False) == ()


def test_the_newest_is_billed():
    older, same, newer = (BlockMap(1, time_us, (GROUP,)) for time_us in (199, 200, 201))
    from_map, from_counters = lines_from_map(P, same), lines_from_counters(P, SAMPLE, expandable=False)
    assert allocator_lines(P, SAMPLE, older, expandable=False) == from_counters
    assert allocator_lines(P, SAMPLE, same, expandable=False) == from_map
    assert allocator_lines(P, SAMPLE, newer, expandable=False) == from_map
    assert allocator_lines(P, None, older, expandable=False) == from_map
    assert allocator_lines(P, None, None, expandable=False) == ()


def test_an_older_map_helps_with_what_counters_cannot_tell():
    private = replace(GROUP, private_pool=PrivatePool(0, 1), stranded_bytes=0, releasable_bytes=0, private_bytes=120)
    pools = allocator_lines(
        P, replace(SAMPLE, private_pools_reserved_bytes=500), BlockMap(1, 1, (GROUP, private)), expandable=False
    )
    assert told(pools) == {
        "requested": "550",
        "rounding": "50",
        "awaiting_free": "0",
        "stranded": "~30",
        "releasable": "~250",
        "private": "~120",
    }
    growing = replace(GROUP, expandable=True, stranded_bytes=100, releasable_bytes=300)
    pages = allocator_lines(P, replace(SAMPLE, inactive_split_bytes=0), BlockMap(1, 1, (growing,)), expandable=True)
    assert (told(pages)["stranded"], told(pages)["releasable"]) == ("~100", "~300")


def test_a_device_with_nvml_is_billed_exactly():
    lines = lines_from_counters(P, SAMPLE, expandable=False)
    bill = device_bill(
        10_000, free_bytes=6_000, driver_bytes=500, probed=[ProcessUse(P, lines, 1_700)], others_used_bytes=1_800
    )
    assert bill.of(Line.OUTSIDE, P) == BillEntry(Line.OUTSIDE, 700, True, P)
    assert told(e for e in bill.entries if e.process_id is None) == {
        "other_processes": "1800",
        "driver": "500",
        "free": "6000",
    }
    assert all(entry.exact for entry in bill.entries)


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        pytest.param({"others_used_bytes": None}, {"other_processes": "1800"}, id="others are what is nobody else's"),
        pytest.param(
            {"others_used_bytes": None, "driver_bytes": None},
            {"other_processes": "~2300", "driver": None},
            id="without NVML the driver's part is among the others'",
        ),
        pytest.param({"others_used_bytes": 1_000}, {"other_processes": "~1800"}, id="what nobody shows is the others'"),
        pytest.param({"free_bytes": None}, {"free": "~6000", "other_processes": "1800"}, id="free is what is left"),
        pytest.param(
            {"free_bytes": 6_500}, {"other_processes": "~1300", "free": "6500"}, id="too much: others give way first"
        ),
        pytest.param(
            {"free_bytes": 8_300},
            {"other_processes": "~0", "outside": "~200", "free": "8300"},
            id="then what lies outside",
        ),
        pytest.param(
            {"free_bytes": 8_900},
            {"other_processes": "~0", "outside": "~0", "driver": "~100", "free": "8900"},
            id="then the driver",
        ),
        pytest.param(
            {"free_bytes": 20_000}, {"driver": "~0", "free": "~9000", "releasable": "250"}, id="then what is free"
        ),
    ],
)
def test_what_is_not_known_or_contradicts_is_told(changed, expected):
    lines = lines_from_counters(P, SAMPLE, expandable=False)
    known = {"free_bytes": 6_000, "driver_bytes": 500, "others_used_bytes": 1_800} | changed
    bill = device_bill(10_000, probed=[ProcessUse(P, lines, 1_700)], **known)
    assert {line: told(bill.entries).get(line) for line in expected} == expected
    assert sum(entry.bytes for entry in bill.entries) == 10_000


def test_outside_of_a_process_whose_use_is_not_known_is_among_the_others():
    lines = lines_from_counters(P, SAMPLE, expandable=False)
    bill = device_bill(
        10_000, free_bytes=6_000, driver_bytes=500, probed=[ProcessUse(P, lines)], others_used_bytes=None
    )
    assert bill.of(Line.OUTSIDE, P) is None
    assert bill.of(Line.OTHER_PROCESSES) == BillEntry(Line.OTHER_PROCESSES, 2_500, False)


def test_a_process_that_reserved_more_than_it_is_said_to_use_has_nothing_outside():
    """Counters and NVML are read at different moments."""
    lines = lines_from_counters(P, SAMPLE, expandable=False)
    bill = device_bill(
        10_000, free_bytes=9_000, driver_bytes=0, probed=[ProcessUse(P, lines, 900)], others_used_bytes=0
    )
    assert bill.of(Line.OUTSIDE, P) == BillEntry(Line.OUTSIDE, 0, False, P)


amounts = st.integers(-5_000, 50_000)
perhaps = st.none() | amounts
samples = st.builds(
    Sample,
    sequence=st.just(1),
    time_us=st.just(100),
    reserved_bytes=perhaps,
    active_bytes=perhaps,
    allocated_bytes=perhaps,
    requested_bytes=perhaps,
    inactive_split_bytes=perhaps,
    private_pools_reserved_bytes=perhaps,
)


@st.composite
def groups(draw):
    requested, rounding, waiting, stranded, releasable, private = draw(st.tuples(*[st.integers(0, 9_000)] * 6))
    known = draw(st.booleans())
    return replace(
        GROUP,
        expandable=draw(st.booleans()),
        reserved_bytes=requested + rounding + waiting + stranded + releasable + private,
        requested_bytes=requested if known else None,
        rounding_bytes=rounding if known else None,
        allocated_bytes=requested + rounding,
        awaiting_free_bytes=waiting,
        stranded_bytes=stranded,
        releasable_bytes=releasable,
        private_bytes=private,
    )


block_maps = st.builds(
    BlockMap, sequence=st.just(1), time_us=st.sampled_from([50, 150]), groups=st.lists(groups(), max_size=3).map(tuple)
)


@st.composite
def uses(draw):
    process_id = draw(st.sampled_from("abcdef")) * 32
    lines = allocator_lines(
        process_id,
        draw(st.none() | samples),
        draw(st.none() | block_maps),
        expandable=draw(st.sampled_from([None, True, False])),
    )
    return ProcessUse(process_id, lines, draw(perhaps))


@given(sample=samples, block_map=st.none() | block_maps, expandable=st.sampled_from([None, True, False]))
def test_an_allocators_lines_always_add_up_to_what_it_reserved(sample, block_map, expandable):
    lines = allocator_lines(P, sample, block_map, expandable=expandable)
    if block_map is not None and block_map.time_us >= sample.time_us:
        reserved = sum(g.reserved_bytes for g in block_map.groups)
    else:
        reserved = max(sample.reserved_bytes or 0, 0)
    assert not lines or sum(entry.bytes for entry in lines) == reserved
    assert all(entry.bytes >= 0 for entry in lines)


@given(
    total=st.integers(0, 100_000),
    free=perhaps,
    driver=perhaps,
    others=perhaps,
    probed=st.lists(uses(), max_size=3, unique_by=lambda use: use.process_id),
)
def test_a_devices_lines_always_add_up_to_its_total(total, free, driver, others, probed):
    bill = device_bill(total, free_bytes=free, driver_bytes=driver, probed=probed, others_used_bytes=others)
    assert sum(entry.bytes for entry in bill.entries) == total
    assert all(entry.bytes >= 0 for entry in bill.entries)
    assert len({(entry.line, entry.process_id) for entry in bill.entries}) == len(bill.entries)


def test_counters_and_blocks_of_a_recorded_run_bill_the_same():
    """Where counters call a line exact, the blocks of that moment say the same."""
    player = Player(read_recording(SHIPPED / "streams-2-3890.run.json"), seed=5)
    exact = 0
    for seen in player:
        if isinstance(seen, BlockMap):
            blocks = {entry.line: entry.bytes for entry in lines_from_map(P, seen)}
            for entry in lines_from_counters(P, player.state.sample(1, 1), expandable=False):
                assert not entry.exact or entry.bytes == blocks[entry.line]
                exact += entry.exact
    assert exact > 400
