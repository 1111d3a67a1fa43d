"""A recording is read whole or refused with a clear reason; nothing of a hostile file is run."""

import gzip
import json
import os
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allocscope.allocator.errors import (
    AllocatorError,
    CutOffError,
    HostilePickleError,
    NotASnapshotError,
    RecordingError,
    SnapshotError,
    TooLargeError,
)
from allocscope.allocator.plain import load_plain
from allocscope.allocator.recording import read_recording
from allocscope.allocator.settings import AllocatorSettings
from allocscope.allocator.snapshot import Snapshot, read_snapshot, unpack
from tests.allocator.made import MIB, SHIPPED, START_US, alloc, got, write_recording

A = 0x7F0000000000
ENTRIES = [got(A, 2 * MIB), alloc(A, 1000, time_us=START_US + 5)]


def test_a_recording_that_ships_is_read():
    recording = read_recording(SHIPPED / "leak-1-3771.run.json")
    assert recording.name == "leak-1-3771"
    assert recording.start_us == START_US
    assert recording.end_us == START_US + 609_948_710
    assert recording.device_total_bytes == 3_954_180_096
    assert recording.other_used == ((START_US, 536_870_912),)
    assert len(recording.trace) == 36_475
    assert recording.trace[0] == got(0x100000000000, recording.trace[0].size)
    assert recording.settings == AllocatorSettings()
    assert recording.conf == ""


def test_what_others_use_goes_by_steps(tmp_path):
    steps = [[START_US, 100], [START_US + 10, 300], [START_US + 20, 200]]
    recording = read_recording(write_recording(tmp_path, ENTRIES, other_used=steps))
    seen = [recording.other_used_at(START_US + after) for after in (-5, 0, 9, 10, 19, 20, 1000)]
    assert seen == [100, 100, 100, 300, 300, 200, 200]
    assert recording.outside_bytes == 100


@pytest.mark.parametrize(
    ("described", "message"),
    [
        ({"device_total": None, "start_us": None}, "lacks device_total, start_us"),
        ({"device_total": -1}, "device_total is -1, not a whole number from 1 on"),
        ({"device_total": True}, "device_total is True, not a whole number"),
        ({"start_us": "now"}, "start_us is 'now', not a whole number"),
        ({"other_used": []}, "other_used is not a list of one or more"),
        ({"other_used": [[5, 1], [4, 1]]}, "other_used is not a list of one or more"),
        ({"other_used": [[5]]}, "other_used is not a list of one or more"),
        ({"other_used": [[5, 1.5]]}, "other_used is 1.5, not a whole number"),
        ({"snapshot": "../made.pickle.gz"}, "not the name of a file beside it"),
        ({"snapshot": "made\0.pickle.gz"}, "not the name of a file beside it"),
        ({"snapshot": "gone.pickle.gz"}, "cannot be read"),
    ],
)
def test_a_description_that_cannot_be_is_refused(tmp_path, described, message):
    with pytest.raises(RecordingError, match=message):
        read_recording(write_recording(tmp_path, ENTRIES, **described))


@pytest.mark.parametrize(
    ("text", "message"), [("{", "is not JSON"), ("[" * 100_000, "is not JSON"), ("[]", "holds a list")]
)
def test_a_description_that_is_not_an_object_is_refused(tmp_path, text, message):
    path = tmp_path / "x.run.json"
    path.write_text(text)
    with pytest.raises(RecordingError, match=message):
        read_recording(path)


def test_a_snapshot_in_the_place_of_its_description_is_told_apart(tmp_path):
    write_recording(tmp_path, ENTRIES)
    with pytest.raises(RecordingError, match=r"name its RUN\.run\.json"):
        read_recording(tmp_path / "made.pickle.gz")


@pytest.mark.parametrize("name", ["none.run.json", "none"])
def test_a_recording_that_is_not_there_is_told_whatever_its_name(tmp_path, name):
    with pytest.raises(RecordingError, match=r"cannot be read \(No such file or directory\)"):
        read_recording(tmp_path / name)


@pytest.mark.parametrize("part", [0.02, 0.5, 0.99])
def test_a_recording_that_is_cut_off_is_refused(tmp_path, part):
    path = write_recording(tmp_path, ENTRIES * 50)
    packed = (tmp_path / "made.pickle.gz").read_bytes()
    (tmp_path / "made.pickle.gz").write_bytes(packed[: max(int(len(packed) * part), 3)])
    with pytest.raises(CutOffError, match=r"made\.pickle\.gz: cut off: its gzip ends in the middle"):
        read_recording(path)


def test_a_recording_that_is_not_gzip_is_refused(tmp_path):
    path = write_recording(tmp_path, ENTRIES)
    (tmp_path / "made.pickle.gz").write_bytes(b"version https://git-lfs.example/spec/v1")
    with pytest.raises(NotASnapshotError, match="is not gzip"):
        read_recording(path)


def test_damaged_gzip_is_refused(tmp_path):
    packed = bytearray(gzip.compress(bytes(range(256)) * 40))
    packed[40] ^= 0xFF
    with pytest.raises(NotASnapshotError, match="is damaged gzip"):
        unpack(bytes(packed), "x")


def test_a_decompression_bomb_is_not_unpacked():
    with pytest.raises(TooLargeError, match="more than 1000000 bytes") as caught:
        unpack(gzip.compress(bytes(50_000_000)), "x", limit_bytes=1_000_000)
    assert caught.value.limit_bytes == 1_000_000


def test_gzip_of_several_members_counts_as_one():
    assert unpack(gzip.compress(b"ab") + gzip.compress(b"cd"), "x", limit_bytes=4) == b"abcd"
    with pytest.raises(TooLargeError):
        unpack(gzip.compress(b"ab") + gzip.compress(b"cde"), "x", limit_bytes=4)


class Hostile:
    """Would run a command when it is unpickled."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return (os.system, (f"touch {self.mark}",))


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_nothing_of_a_hostile_pickle_is_run(tmp_path, protocol):
    mark = tmp_path / "ran"
    with pytest.raises(HostilePickleError, match=r"asks for posix\.system to be imported.*nothing of it was run"):
        load_plain(pickle.dumps({"segments": Hostile(mark)}, protocol), "x")
    assert not mark.exists()


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        pytest.param(b"", NotASnapshotError, "is empty", id="nothing"),
        pytest.param(b"hello", NotASnapshotError, "is not a pickle", id="text"),
        pytest.param(
            b"\x80\x02}r\xff\xff\xff\xff.", HostilePickleError, "memory out of proportion", id="a memo of 64 GiB"
        ),
        pytest.param(
            b"\x80\x05\x96" + b"\xff" * 7 + b"\x7f.", HostilePickleError, "a bytearray", id="an endless bytearray"
        ),
        pytest.param(b"\x80\x04\x8d" + b"\xff" * 8 + b"}.", HostilePickleError, "one value of", id="an endless string"),
        pytest.param(b"\x80\x04", CutOffError, "ends in the middle", id="a beginning"),
        pytest.param(b"\x80\x04]\xff.", NotASnapshotError, "byte 3 is", id="no such instruction"),
        pytest.param(b"\x80\x04u.", NotASnapshotError, "damaged pickle", id="an empty stack"),
        pytest.param(b"\x80\x04h\x07.", NotASnapshotError, "damaged pickle", id="a memo that was never set"),
        pytest.param(b"\x80\x04K\x01Q.", HostilePickleError, "kept elsewhere", id="a persistent id"),
    ],
)
def test_a_pickle_that_is_none_is_refused(data, error, message):
    with pytest.raises(error, match=message):
        load_plain(data, "x")


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_every_plain_value_comes_through(protocol):
    value: dict[str, Any] = {
        "a": [1, -5, 1 << 70, 300, 70000, 1.5, None, True, False, ("x",), (1, 2, 3, 4), (), "é" * 300, "é"],
        "b": {},
    }
    value["c"] = [{"key": index, "same": value["a"]} for index in range(1000)]
    assert load_plain(pickle.dumps(value, protocol), "x") == value


def snapshot_of(**changed) -> bytes:
    whole = {"segments": [], "device_traces": [[]], "allocator_settings": {}} | changed
    return pickle.dumps({key: value for key, value in whole.items() if value is not None})


ENTRY = {"action": "alloc", "addr": 512, "size": 512, "stream": 0, "time_us": 1}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (pickle.dumps(7), "holds a int, not the dict"),
        (pickle.dumps([1]), r"segments\[0\] is not as PyTorch writes it"),
        (snapshot_of(segments=None), "has no list 'segments'"),
        (snapshot_of(device_traces={}), "has no list 'device_traces'"),
        (snapshot_of(device_traces=[[{"action": "alloc"}]]), r"device_traces\[0\]\[0\] has no 'size'"),
        (
            snapshot_of(device_traces=[[ENTRY, ENTRY | {"size": "8"}]]),
            r"device_traces\[0\]\[1\] .* an integer should be",
        ),
        (snapshot_of(device_traces=[[ENTRY | {"size": -8}]]), r"device_traces\[0\]\[0\] .* below 0"),
        (snapshot_of(device_traces=[[ENTRY | {"action": []}]]), r"device_traces\[0\]\[0\] .* a string should be"),
        (snapshot_of(device_traces=[[7]]), r"device_traces\[0\]\[0\] is not as PyTorch writes it"),
        (snapshot_of(device_traces=[7]), r"device_traces\[0\] is a int, not a list"),
        (snapshot_of(segments=[{"address": 1}]), r"segments\[0\] has no"),
        (snapshot_of(allocator_settings=[1]), "allocator_settings are not as PyTorch writes them"),
        (snapshot_of(allocator_settings={"PYTORCH_CUDA_ALLOC_CONF": "x"}), "allocator_settings are not as"),
    ],
)
def test_what_is_not_a_snapshot_is_refused(data, message):
    with pytest.raises(NotASnapshotError, match=message):
        read_snapshot(data, "x")


SOUND = snapshot_of(
    device_traces=[
        [ENTRY | {"size": 512 * k, "time_us": 1_700_000_000_000_000 + k, "pool_id": (0, k)} for k in range(40)]
    ],
    allocator_settings={"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64", "roundup_power2_divisions": {"1": 0}},
)


@given(
    damage=st.lists(
        st.tuples(st.integers(0, len(SOUND) - 1), st.integers(0, 6), st.binary(max_size=6)), min_size=1, max_size=5
    )
)
def test_damage_of_any_kind_is_told_as_such(damage):
    """Bytes cut out, put in or changed: either it is still a snapshot, or it is refused by an error of ours."""
    data = bytearray(SOUND)
    for at, cut, put_in in damage:
        data[at : at + cut] = put_in
    try:
        told: Any = read_snapshot(bytes(data), "damaged.pickle")
    except SnapshotError as error:
        told = error
    assert isinstance(told, Snapshot) or str(told).startswith("damaged.pickle: ")


def test_one_device_of_several_is_chosen(tmp_path):
    path = write_recording(tmp_path, ENTRIES)
    traces = [[], [ENTRY | {"addr": 1}], [ENTRY | {"addr": 2}]]
    (tmp_path / "made.pickle.gz").write_bytes(gzip.compress(snapshot_of(device_traces=traces)))
    assert read_recording(path, device_index=2).trace[0].address == 2
    with pytest.raises(NotASnapshotError, match=r"devices \[1, 2\] have a history, and one must be chosen"):
        read_recording(path)
    with pytest.raises(NotASnapshotError, match=r"no history of device 0 \(of \[1, 2\]\)"):
        read_recording(path, device_index=0)


def test_a_snapshot_without_history_is_no_recording(tmp_path):
    with pytest.raises(NotASnapshotError, match="has no history of any device"):
        read_recording(write_recording(tmp_path, []))


def test_every_error_is_of_one_tree():
    assert all(
        issubclass(error, AllocatorError)
        for error in (CutOffError, HostilePickleError, NotASnapshotError, RecordingError, TooLargeError)
    )


def test_the_recordings_that_ship_are_described():
    labels = json.loads((SHIPPED / "labels.json").read_text())
    assert sorted(labels) == sorted(path.name.removesuffix(".run.json") for path in SHIPPED.glob("*.run.json"))
