"""A snapshot is read whatever its form: PyTorch 1.13 to 2.14, pickle or JSON, packed or not; the same memory has the same bill."""

import gzip
import json
from typing import Any

import pytest

from allocscope.allocator.diagnosis import diagnose
from allocscope.allocator.snapshot import Frame, Snapshot, read_snapshot
from tests.snapshots.made import (
    BILL,
    FRAMES,
    MIB,
    SEGMENTS,
    SETTINGS,
    TIME_US,
    TRACE,
    A,
    entry,
    live,
    pickled,
    segment,
    snapshot,
    without,
)


def bill_of(read: Snapshot, device: int = 0) -> dict[str, int | None]:
    moment = next(d for d in diagnose(read).devices if d.device == device).now
    return {e.line.value: e.bytes if e.exact else None for e in moment.lines} | {"reserved": moment.reserved_bytes}


def old_form() -> dict:
    """PyTorch 1.13: blocks in order without addresses, each with the history of its allocations; no times, no settings."""
    segments = without(SEGMENTS[:4], "segment_pool_id", "is_expandable", "requested_size", "frames")
    for told, modern in zip(segments, SEGMENTS, strict=False):
        for block, known in zip(told["blocks"], modern["blocks"], strict=True):
            del block["address"]
            older = {"addr": 1, "real_size": 9 * MIB, "frames": []}
            newest = {"addr": known["address"], "real_size": known["requested_size"], "frames": FRAMES}
            block["history"] = [newest, older]
    return {"segments": segments, "device_traces": [without(TRACE, "time_us", "pool_id", "frames")]}


OLD_BILL = BILL | {"requested": BILL["requested"] - 6 * MIB, "private": 0, "reserved": 72 * MIB}

FORMS = {
    "2.14": (pickled(snapshot()), BILL),
    "protocol 2": (pickled(snapshot(), 2), BILL),
    "protocol 3": (pickled(snapshot(), 3), BILL),
    "protocol 5": (pickled(snapshot(), 5), BILL),
    "gzip": (gzip.compress(pickled(snapshot())), BILL),
    "gzip in two members": (gzip.compress(pickled(snapshot())[:999]) + gzip.compress(pickled(snapshot())[999:]), BILL),
    "JSON": (json.dumps(snapshot()).encode(), BILL),
    "JSON, indented, with a byte order mark": (b"\xef\xbb\xbf" + json.dumps(snapshot(), indent=1).encode(), BILL),
    "JSON, gzip": (gzip.compress(json.dumps(snapshot()).encode()), BILL),
    "JSON of the bare list": (json.dumps(SEGMENTS).encode(), BILL),
    "the bare list of memory_snapshot()": (pickled(SEGMENTS), BILL),
    "pools as lists": (pickled(json.loads(json.dumps(snapshot()))), BILL),
    "2.3: no annotations": (pickled(without(snapshot(), "external_annotations", "host_segments", "host_traces")), BILL),
    "2.2: no settings, no times": (pickled(without(snapshot(), "allocator_settings", "time_us", "pool_id")), BILL),
    "no history": (pickled(snapshot(device_traces=[])), BILL),
    "1.13": (pickled(old_form()), OLD_BILL),
}


@pytest.mark.parametrize(("data", "bill"), FORMS.values(), ids=FORMS)
def test_the_same_memory_has_the_same_bill_in_every_form(data, bill):
    read = read_snapshot(data, "x")
    assert bill_of(read) == bill
    assert diagnose(read).findings == ()


@pytest.mark.parametrize("piece", [1, 7, 1000])
@pytest.mark.parametrize("form", ["2.14", "protocol 2", "gzip", "JSON", "1.13"])
def test_it_does_not_matter_in_what_pieces_a_file_comes(form, piece):
    data, bill = FORMS[form]
    read = read_snapshot(lambda: (data[at : at + piece] for at in range(0, len(data), piece)), "x")
    assert bill_of(read) == bill


def test_what_live_blocks_were_asked_for_is_not_known_where_nothing_tells():
    read = read_snapshot(pickled(without(snapshot(), "requested_size")), "x")
    assert bill_of(read) == BILL | {"requested": None, "rounding": None}


def test_a_history_keeps_pytorchs_words():
    read = read_snapshot(pickled(snapshot()), "x")
    (trace,) = read.traces
    assert [e.action for e in trace] == ["segment_alloc", "alloc", "free_requested", "free_completed"]
    assert (trace[1].address, trace[1].size, trace[1].time_us) == (A + 64 * MIB, 5 * MIB, TIME_US)
    assert trace[1].stack is not None
    assert trace[1].stack.frames[2] == Frame("forward", "/home/me/model.py", 12)
    assert trace[0].stack is None


def test_an_old_block_knows_its_newest_allocation():
    block = read_snapshot(pickled(old_form()), "x").segments[0].blocks[0]
    assert (block.address, block.requested_size) == (A, 100)
    assert block.stack is not None
    assert block.stack.frames[3] == Frame("step", "/home/me/train.py", 40)


def test_what_later_versions_add_is_no_reason_to_refuse():
    later = snapshot(
        device_traces=[[*TRACE, {"action": "annotate", "text": "x"}, entry("defragment", 3, 4, why="new")]],
        allocator_settings=SETTINGS | {"brand_new": [1, {"a": 2}]},
        tensors=[1, 2],
    )
    later["segments"][0]["colour"] = "red"
    read = read_snapshot(pickled(later), "x")
    assert [e.action for e in read.traces[0]][-2:] == ["annotate", "defragment"]
    assert read.more == ("tensors",)
    assert bill_of(read) == BILL


def test_host_memory_is_no_part_of_a_device():
    read = read_snapshot(pickled(snapshot(host_segments=[{"total_size": 4096}, {"size": 512}, "?"])), "x")
    assert read.host_segments == (4096, 512)
    assert bill_of(read) == BILL


@pytest.mark.parametrize("empty", [b"[]", pickled([]), pickled({"segments": [], "device_traces": [[], []]})])
def test_a_snapshot_of_nothing_has_no_devices(empty):
    assert diagnose(read_snapshot(empty, "x")).devices == ()


def test_each_device_has_its_own_bill():
    segments = snapshot()["segments"]
    segments[3]["device"] = 3
    read = read_snapshot(pickled(segments), "x")
    assert bill_of(read, 3)["reserved"] == 30 * MIB
    assert bill_of(read, 0)["reserved"] == 62 * MIB


def test_settings_that_cannot_be_read_are_told_where_that_is_wanted():
    read = read_snapshot(pickled(snapshot(allocator_settings={"PYTORCH_CUDA_ALLOC_CONF": "???"})), "x", tolerant=True)
    assert "cannot be read from '???' on" in str(read.settings_problem)
    assert [finding.kind for finding in diagnose(read).findings] == ["settings"]


SAME_ENTRY = entry("alloc", A, 512, frames=FRAMES)


@pytest.mark.parametrize(
    "trace",
    [
        pytest.param([SAME_ENTRY] * 3000, id="one entry in all places"),
        pytest.param([dict(SAME_ENTRY) for _ in range(3000)], id="entries that share their stack"),
        pytest.param([SAME_ENTRY | {"frames": list(FRAMES)} for _ in range(3000)], id="stacks that share their frames"),
        pytest.param(
            [SAME_ENTRY | {"frames": [dict(f) for f in FRAMES]} for _ in range(3000)], id="every frame written out"
        ),
        pytest.param(
            [SAME_ENTRY | {"frames": [*(dict(f) for f in FRAMES[:4]), FRAMES[4]]} for _ in range(3000)],
            id="some frames written out",
        ),
        pytest.param(
            [SAME_ENTRY | {"size": 512 + k % 2 * 0.0} for k in range(3000)], id="a number as JSON may have it"
        ),
    ],
)
@pytest.mark.parametrize("protocol", [2, 4])
def test_a_long_history_is_read_whole_however_it_was_written(trace, protocol):
    read = read_snapshot(pickled(snapshot(device_traces=[trace]), protocol), "x")
    assert {e[:7] for e in read.traces[0]} == {("alloc", A, 512, 0, TIME_US, (0, 0), None)}
    assert len(read.traces[0]) == 3000
    assert {e.stack.frames for e in read.traces[0] if e.stack} == {tuple(Frame(*f.values()) for f in FRAMES)}
    assert bill_of(read) == BILL


@pytest.mark.parametrize("place", ["last in a stack", "in the middle of a stack", "of a block"])
def test_a_frame_that_comes_again_after_thousands_written_out_is_not_lost(place):
    """What is written out again and again is emptied while it is read; this one would be missed."""
    shared = {"name": "shared", "filename": "s.py", "line": 7}
    anew = [SAME_ENTRY | {"frames": [dict(f) for f in FRAMES]} for _ in range(3000)]
    first = SAME_ENTRY | {"frames": [dict(FRAMES[0]), shared, dict(FRAMES[1])]}
    again = [shared, dict(FRAMES[0])] if place == "in the middle of a stack" else [dict(FRAMES[0]), shared]
    told: dict[str, Any] = {
        "device_traces": [[*anew, first, SAME_ENTRY | {"frames": [] if place == "of a block" else again}]]
    }
    told |= {"segments": [segment(A, [live(MIB)])]}
    if place == "of a block":
        told["segments"][0]["blocks"][0]["frames"] = again
    read = read_snapshot(pickled(told), "x")
    stack = read.segments[0].blocks[0].stack if place == "of a block" else read.traces[0][-1].stack
    assert stack is not None
    assert Frame("shared", "s.py", 7) in stack.frames
