"""`allocscope replay` tells in one line what cannot be used, and answers in JSON or for people."""

import gzip
import json

import pytest

from allocscope.cli.replay import main as replay
from tests.allocator.made import SHIPPED, write_recording
from tests.simulator.test_history import ROUND

MIB = 1 << 20
CASE: dict[str, object] = {
    "conf": "",
    "memory_fraction": None,
    "device_total": 64 * MIB,
    "device_other": 0,
    "requests": [],
}
HEADER: dict[str, object] = {
    "torch": "2.14.1",
    "conf": "",
    "device_total": 64 * MIB,
    "device_used_before": 0,
    "stat_columns": ["num_ooms"],
}


def packed(folder, *told):
    path = folder / "x.json.gz"
    path.write_bytes(gzip.compress("\n".join(json.dumps(line) for line in told).encode()))
    return str(path)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"requests": [["a", 0, 512]]}, "request 0 is ['a', 0, 512], which is none of a, f, r, s, e with its numbers"),
        ({"requests": [["x"]]}, "request 0 is ['x'], which is none of a, f, r, s, e with its numbers"),
        ({"requests": [[[]]]}, "request 0 is [[]], which is none of a, f, r, s, e with its numbers"),
        ({"requests": [["a", 0, -5, 0]]}, "request 0 is ['a', 0, -5, 0], which is none of"),
        ({"requests": [["a", 0, int("9" * 4300), 0]]}, "request 0 is ['a', 0, 99999"),
        ({"memory_fraction": float("-inf")}, "memory_fraction is -inf, not a int or float or NoneType"),
        ({"memory_fraction": float("nan")}, "memory_fraction is nan, not a int or float or NoneType"),
        ({"device_total": 1 << 70}, "device_total is 1180591620717411303424, not a int"),
        ({"torch": "2." + "9" * 5000}, "is not a version of PyTorch, such as 2.14.1"),
        ({"requests": [["f", 3]]}, "request 0: nothing with the id 3 is allocated"),
        ({"requests": None}, "requests is None, not a list"),
        ({"device_total": -1}, "device_total is -1, not a int"),
        ({"torch": "nightly"}, "'nightly' is not a version of PyTorch, such as 2.14.1"),
        ({"conf": "max_split_size_mb:x"}, "max_split_size_mb cannot be 'x'"),
    ],
)
def test_a_case_that_cannot_be_used_is_refused_with_the_reason(tmp_path, capsys, change, problem):
    assert replay(["--requests", packed(tmp_path, {**CASE, **change}), "--json"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert problem in printed.err
    assert printed.err.count("\n") == 1


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        ([], "is empty"),
        ([[]], "holds a list where an object should be"),
        ([HEADER, {"op": "explode"}], "row 0 asks for 'explode'"),
        ([HEADER, {"op": []}], "row 0 asks for []"),
        (
            [HEADER, {"op": "alloc", "id": 1, "size": -5, "stream": 0}],
            "size and stream are whole numbers, a size from 0 on",
        ),
        (
            [HEADER, {"op": "alloc", "id": 1, "size": 5, "stream": "x"}],
            "size and stream are whole numbers, a size from 0 on",
        ),
        ([HEADER, {"op": "alloc", "id": 1, "size": int("9" * 4300), "stream": 0}], "size and stream are whole numbers"),
        ([HEADER, {"op": "free", "id": 1}], "row 0 is {'op': 'free', 'id': 1}"),
        ([{**HEADER, "stat_columns": None}], "stat_columns is None"),
    ],
)
def test_a_golden_run_that_cannot_be_used_is_refused_with_the_reason(tmp_path, capsys, lines, problem):
    assert replay(["--golden", packed(tmp_path, *lines), "--json"]) == 2
    assert problem in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--requests", "--golden"])
@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"plain", "cannot be read as gzip"),
        (gzip.compress(b"{", mtime=0), "is not JSON"),
        (gzip.compress(b"[" * 100_000, mtime=0), "is not JSON"),
        (gzip.compress(b'{"a": 1}', mtime=0)[:-9], "cannot be read as gzip"),
    ],
)
def test_a_file_that_is_something_else_is_refused(tmp_path, capsys, option, data, problem):
    path = tmp_path / "x.gz"
    path.write_bytes(data)
    assert replay([option, str(path), "--json"]) == 2
    assert problem in capsys.readouterr().err


def test_a_file_that_is_not_there_is_told(tmp_path, capsys):
    for arguments in (["--requests", str(tmp_path / "no")], [str(tmp_path / "no")]):
        assert replay(arguments) == 2
        assert "No such file" in capsys.readouterr().err


def test_one_thing_at_a_time(capsys):
    for arguments in ([], ["x", "--golden", "y"]):
        with pytest.raises(SystemExit):
            replay(arguments)
        assert "name a FILE, or --requests, or --golden" in capsys.readouterr().err


def test_a_case_for_people(tmp_path, capsys):
    requests = [["a", 0, 40 * MIB, 0], ["f", 0], ["a", 1, 50 * MIB, 0], ["a", 2, 30 * MIB, 0]]
    assert replay(["--requests", packed(tmp_path, {**CASE, "requests": requests})]) == 0
    printed = capsys.readouterr().out
    assert "4 requests, torch 2.14.1, settings default: OutOfMemoryError at request 3: CUDA out of memory." in printed
    assert "reserved at most 50.0 MiB, allocated at most 50.0 MiB" in printed
    assert "2 retries; 2 segments or page ranges got from the driver, 1 given back" in printed


def test_a_recording_under_other_settings(tmp_path, capsys):
    path = write_recording(tmp_path, ROUND, device_total=80 * MIB, other_used=[[0, 0]])
    arguments = [str(path), "--conf", "expandable_segments:True", "--json"]
    assert replay(arguments) == 0
    found = json.loads(capsys.readouterr().out)["devices"]["0"]
    assert (found["torch"], found["exact"], found["requests"]) == ("2.14.1", True, 3)
    assert [each["conf"] for each in found["replays"]] == ["", "expandable_segments:True"]
    assert [each["num_alloc_retries"] for each in found["replays"]] == [1, 0]
    assert [each["reserved_peak_bytes"] for each in found["replays"]] == [60 * MIB, 60 * MIB]
    assert replay(arguments[:-1]) == 0
    text = capsys.readouterr().out
    assert "every entry of the history is explained to the byte" in text
    assert "default (as recorded): every request served; reserved at most 60.00 MiB" in text


def test_a_snapshot_needs_the_device_s_size_for_anything_to_fail(capsys):
    snapshot = str(SHIPPED / "steady-1-2216.pickle.gz")
    assert replay([snapshot]) == 0
    assert "of unknown size, so nothing can fail (--device-total)" in capsys.readouterr().out
    assert replay([snapshot, "--device-total", str(512 * MIB), "--json"]) == 0
    (recorded,) = json.loads(capsys.readouterr().out)["devices"]["0"]["replays"]
    assert recorded["failed_at"] is not None
    assert "out of memory" in recorded["message"]


@pytest.mark.parametrize(
    "option", [["--conf", "backend:native"], ["--torch", "2.11"], ["--device-other", "0"], ["--device-total", "5"]]
)
def test_what_is_for_a_file_is_not_passed_over_with_requests(tmp_path, capsys, option):
    with pytest.raises(SystemExit) as ended:
        replay(["--requests", packed(tmp_path, CASE), *option])
    assert ended.value.code == 2
    assert "are for a FILE" in capsys.readouterr().err


def test_a_packed_file_that_is_damaged_is_told(tmp_path, capsys):
    path = tmp_path / "x.json.gz"
    path.write_bytes(gzip.compress(b"{}")[:10] + b"\xff" * 20)
    assert replay(["--requests", str(path)]) == 2
    assert "cannot be read as gzip (Error -3" in capsys.readouterr().err


def test_a_snapshot_without_a_history_is_refused(tmp_path, capsys):
    path = tmp_path / "x.json"
    path.write_text(json.dumps({"segments": [], "device_traces": [[]]}))
    assert replay([str(path)]) == 2
    assert "has no history" in capsys.readouterr().err
    assert replay([str(path), "--torch", "main"]) == 2
    assert "is not a version" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("conf", "problem"),
    [
        ("expandible_segments:True", "PyTorch has no expandible_segments (did you mean expandable_segments?)"),
        ("backend:cudaMallocAsync", "cudaMallocAsync is another allocator, which is not simulated"),
        ("max_split_size_mb:5", "max_split_size_mb must be at least 20"),
        ("garbage_collection_threshold:8", "garbage_collection_threshold must be between 0 and 1"),
        ("per_process_memory_fraction:2", "per_process_memory_fraction must be from 0 to 1"),
    ],
)
def test_settings_that_pytorch_would_refuse_are_not_tried(tmp_path, capsys, conf, problem):
    path = write_recording(tmp_path, ROUND, device_total=80 * MIB, other_used=[[0, 0]])
    assert replay([str(path), "--conf", "release_lock_on_cudamalloc:True", "--conf", conf]) == 2
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", f"allocscope replay: allocator settings {conf!r}: {problem}\n")


def test_settings_that_outlive_a_recorded_failure_are_not_said_to_save_the_job(capsys):
    run = str(SHIPPED / "islands_grow-4-5518.run.json")
    assert replay([run, "--conf", "expandable_segments:True"]) == 0
    *_, recorded, other, note = capsys.readouterr().out.splitlines()
    assert "OutOfMemoryError at request" in recorded
    assert "every request served" in other
    assert note.startswith("the recorded job ran out at request ")
    assert replay([run]) == 0
    assert "is not known" not in capsys.readouterr().out


def test_it_says_where_a_replay_is_not_what_was_recorded(tmp_path, capsys):
    """A neighbour grew meanwhile: a snapshot alone does not tell that, a recording does."""
    run = SHIPPED / "neighbour-2-6562.run.json"
    assert replay([str(run)]) == 0
    assert "estimate" not in capsys.readouterr().out
    assert replay([str(SHIPPED / "neighbour-2-6562.pickle.gz")]) == 0
    title, _, note, _ = capsys.readouterr().out.splitlines()
    assert title.startswith(
        "device 0, of 2.73 GiB for this allocator, as its last OutOfMemoryError shows: 39436 requests"
    )
    assert note == (
        "but 4.87 GiB was reserved at most then, and 2.72 GiB is here: what others held of the device changed, too; "
        "take it for an estimate"
    )


@pytest.mark.parametrize(("told", "bytes_"), [("536870912", 512 * MIB), ("512MiB", 512 * MIB), ("0.5 GiB", 512 * MIB)])
def test_a_size_comes_in_bytes_or_with_its_unit(capsys, told, bytes_):
    assert replay([str(SHIPPED / "steady-1-2216.pickle.gz"), "--device-total", told, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["devices"]["0"]["device_total_bytes"] == bytes_


@pytest.mark.parametrize("told", ["1GB", "-1", "", "0.5", "much"])
def test_what_is_no_size_is_refused_with_an_example(capsys, told):
    with pytest.raises(SystemExit):
        replay(["x", f"--device-total={told}"])
    assert f"{told!r} is not a number of bytes, such as 25769803776 or 24GiB" in capsys.readouterr().err
