"""Whatever is done to a snapshot: it is inspected, or refused by an error of ours, and its bill adds up."""

import copy
import json
import pickle
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from allocscope.allocator.diagnosis import diagnose
from allocscope.allocator.errors import SnapshotError
from allocscope.allocator.snapshot import read_snapshot
from allocscope.cli.inspect import as_json
from allocscope.cli.inspect_text import Look, as_text
from tests.snapshots.made import DATA, MIB, entry, pickled, snapshot

OOM = {"action": "oom", "device_free": MIB, "size": 20 * MIB, "stream": 0, "time_us": 7}
WHOLE = snapshot(device_traces=[[*snapshot()["device_traces"][0], OOM, entry("alloc", 1 << 40, 512)]])
REAL = [pickle.loads((DATA / name).read_bytes()) for name in ("snapshot-2.14.1-expandable.pickle",)]
SOUND = [pickled(WHOLE, 2), pickled(WHOLE, 4), json.dumps(WHOLE).encode(), *map(pickled, REAL)]
JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 1 << 70),
    st.floats(),
    st.text(max_size=9),
    st.binary(max_size=4),
    st.sampled_from(
        [[], {}, [[]], (0, 1), [0, 1], (1, 2, 3), "inactive", "active_allocated", [None], {"action": "oom"}]
    ),
)


def inspect(data: bytes) -> None:
    try:
        read: Any = read_snapshot(data, "x", tolerant=True)
    except SnapshotError as error:
        read = error
    if isinstance(read, SnapshotError):
        assert str(read).startswith("x: ")
        return
    diagnosis = diagnose(read)
    told = json.loads(json.dumps(as_json(diagnosis, read)))
    for device in told["devices"].values():
        lines = [amount for line, amount in device["bill"].items() if line != "reserved"]
        assert all(amount is None or amount >= 0 for amount in lines)
        assert None in lines or sum(lines) == device["bill"]["reserved"]
    assert "\x1b" not in as_text(diagnosis, read, Look(width=80))


@given(
    sound=st.sampled_from(SOUND),
    damage=st.lists(st.tuples(st.floats(0, 1), st.integers(0, 9), st.binary(max_size=6)), min_size=1, max_size=6),
    length=st.none() | st.floats(0, 1),
)
@settings(max_examples=80, deadline=None)
def test_bytes_cut_out_put_in_or_changed(sound, damage, length):
    data = bytearray(sound)
    for place, cut, put_in in damage:
        at = int(place * len(data))
        data[at : at + cut] = put_in
    inspect(bytes(data if length is None else data[: int(length * len(data))]))


@given(whole=st.sampled_from([WHOLE, *REAL]), changes=st.lists(st.tuples(st.data(), JUNK), min_size=1, max_size=3))
@settings(max_examples=60, deadline=None)
def test_values_that_are_something_else(whole, changes):
    whole = copy.deepcopy(whole)
    for data, junk in changes:
        place, key = data.draw(st.sampled_from(places(whole)), label="where")
        place[key] = junk
    inspect(pickled(whole))


def places(value) -> list:
    """Every place in a value, as what holds it and its key there."""
    found, left = [], [value]
    while left:
        holder = left.pop()
        keys = list(holder) if isinstance(holder, dict) else range(len(holder)) if isinstance(holder, list) else ()
        found += [(holder, key) for key in keys]
        left += [holder[key] for key in keys]
    return found or [({}, "")]


@given(st.binary(max_size=60), st.sampled_from([b"", b"\x80\x04", b"\x80\x02", b"\x1f\x8b\x08", b"{", b"["]))
@settings(max_examples=80, deadline=None)
def test_random_bytes(data, start):
    inspect(start + data)
