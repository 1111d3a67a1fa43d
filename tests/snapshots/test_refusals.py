"""What is no snapshot is refused with a clear reason, in bounded time and memory; nothing of a hostile file is run."""

import contextlib
import gzip
import json
import os
import pickle
import subprocess
import sys
import time
import zipfile
from io import BytesIO

import pytest

from allocscope.allocator.errors import CutOffError, HostilePickleError, NotASnapshotError, SnapshotError, TooLargeError
from allocscope.allocator.plain import load_plain
from allocscope.allocator.snapshot import read_snapshot
from tests.snapshots.made import pickled, snapshot


class Hostile:
    def __reduce__(self):
        return (os.getpid, ())


def zipped() -> bytes:
    file = BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", pickled(snapshot()))
    return file.getvalue()


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        pytest.param(b"", NotASnapshotError, "is empty", id="an empty file"),
        pytest.param(gzip.compress(b""), NotASnapshotError, "is empty", id="an empty file, packed"),
        pytest.param(pickled(snapshot(), 0), NotASnapshotError, "protocol 0 or 1", id="protocol 0"),
        pytest.param(pickled(snapshot(), 1), NotASnapshotError, "protocol 0 or 1", id="protocol 1"),
        pytest.param(b"\x1f\x8b", CutOffError, "gzip ends in the middle", id="the beginning of gzip"),
        pytest.param(b"Traceback (most recent call last)", NotASnapshotError, "is not a pickle", id="text"),
        pytest.param(zipped(), NotASnapshotError, "is a zip file", id="torch.save"),
        pytest.param(b'{"a": ', NotASnapshotError, "neither a pickle nor JSON", id="JSON, cut"),
        pytest.param(b"[" * 200_000, NotASnapshotError, "neither a pickle nor JSON", id="JSON, deep"),
        pytest.param(b'{"a": 1}', NotASnapshotError, "has no list 'segments'", id="other JSON"),
        pytest.param(b"[1]", NotASnapshotError, r"segments\[0\] is not as PyTorch", id="a list of numbers"),
        pytest.param(pickled(Hostile()), HostilePickleError, "getpid to be imported", id="a call"),
        pytest.param(pickled({1, 2}), HostilePickleError, "a set", id="a set"),
        pytest.param(
            b"\x80\x04})" + b"\x85" * 200_000 + b"Ns.", HostilePickleError, "deep inside one another",
            id="a key whose hash exhausts the stack",
        ),
    ],
)  # fmt: skip
def test_what_is_no_snapshot_is_refused(data, error, message):
    with pytest.raises(error, match=message):
        read_snapshot(data, "x")


@pytest.mark.parametrize("code", [b"]", b"}", b"N", b"(", b")\x85", b"]\x94", b"h\0", b"}\x94a"])
def test_what_its_values_take_is_bounded(code):
    """2 MB of instructions that would take 16 MB and more."""
    with pytest.raises(TooLargeError, match="unpacks to more than 10000000 bytes"):
        load_plain(
            b"\x80\x04]\x94" + code * (2_000_000 // len(code)),
            "x",
            on_list=len,
            memory_limit_bytes=10_000_000,
        )


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("packed", [False, True])
def test_a_file_that_is_cut_anywhere_is_refused(protocol, packed):
    data = pickled(snapshot(), protocol)
    data = gzip.compress(data) if packed else data
    for length in range(1, len(data), 97):
        with pytest.raises(SnapshotError, match="x: "):
            read_snapshot(data[:length], "x")


def test_the_end_of_a_packed_file_is_checked_too():
    data = gzip.compress(pickled(snapshot()))
    with pytest.raises(CutOffError):
        read_snapshot(data[:-1], "x")
    with pytest.raises(NotASnapshotError, match="damaged gzip"):
        read_snapshot(data[:-8] + b"\0" * 8, "x")


def test_what_a_file_unpacks_to_is_bounded():
    data = gzip.compress(pickled(snapshot()))
    with pytest.raises(TooLargeError, match="more than 1000 bytes"):
        read_snapshot(data, "x", limit_bytes=1000)


@pytest.mark.parametrize("unit", [b"[],", b"{},", b'"a",', b"777,"])
def test_what_json_comes_to_in_memory_is_bounded(unit):
    """200 KB that unpack to 200 MB and would take twenty times as much."""
    data = gzip.compress(b"[" + unit * (200_000_000 // len(unit)) + b"0]", 1)
    with pytest.raises(TooLargeError, match="more than 2147483648 bytes"):
        read_snapshot(data, "x")


def long_lines(count):
    """As many frames, of lines that all have one hash."""
    frames = [{"name": "f", "filename": "x.py", "line": at * ((1 << 61) - 1)} for at in range(9, count)]
    return {
        "segments": [],
        "device_traces": [[{"action": "alloc", "addr": 0, "size": 1, "stream": 0, "frames": frames}]],
    }


@pytest.mark.parametrize("data", [pickle.dumps(long_lines(20_000), 4), json.dumps(long_lines(20_000)).encode()])
def test_numbers_of_one_hash_take_no_longer_than_others(data):
    started = time.process_time()
    with contextlib.suppress(SnapshotError):
        assert len(read_snapshot(data, "x").traces[0]) == 1
    assert time.process_time() - started < 1


def test_many_empty_members_take_no_longer_than_their_bytes():
    started = time.process_time()
    with pytest.raises(NotASnapshotError, match="is empty"):
        read_snapshot(gzip.compress(b"") * 100_000, "x")
    assert time.process_time() - started < 2


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_the_screen_finds_its_way_whatever_the_pieces(protocol):
    """Every way of cutting one pickle in two gives the same value: no instruction is misread where a piece ends."""
    value = {
        "k": [1, -2, 300, 70_000, 1 << 40, 1 << 47, 1 << 62, 1.5, "é" * 100, "x", (0, 3), (1 << 30, 2), None, True],
        "d": {},
    }
    data = pickle.dumps(value, protocol)
    for cut in range(1, len(data)):
        assert load_plain([data[:cut], data[cut:]], "x") == value


MEASURED = """
import sys
from pathlib import Path
from allocscope.cli.inspect import main
status = main([sys.argv[1], "--json"])
print(next(line.split()[1] for line in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in line), file=sys.stderr)
sys.exit(status)
"""


def test_a_large_history_takes_little_memory(tmp_path):
    """40,000 entries, each with its stack written out, take 0.7 KiB each; as the dicts that they are they would take 1.5 KiB."""
    frames = [{"name": "f", "filename": "f.py", "line": 1}, {"name": "g", "filename": "f.py", "line": 2}]
    rest = {"stream": 0, "compile_context": "N/A", "user_metadata": ""}
    entries = [
        {"action": "alloc", "addr": k << 9, "size": 512, "time_us": k, "frames": [dict(f) for f in frames]} | rest
        for k in range(40_000)
    ]
    path = tmp_path / "large.pickle"
    path.write_bytes(pickle.dumps({"segments": [], "device_traces": [entries]}))
    done = subprocess.run([sys.executable, "-c", MEASURED, path], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["devices"]["0"]["bill"]["reserved"] == 0
    assert int(done.stderr) < 30 * 1024 + 40_000 * 7 // 10
