"""`allocscope replay` tells in one line what cannot be used, and answers in JSON or for people."""

import gzip
import json
import pickle

import pytest

from allocscope.cli.replay import main as replay
from tests.allocator.made import SHIPPED, as_pytorch_writes, write_recording
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
        (b"plain", "is not JSON, packed by gzip or not"),
        (gzip.compress(b"{", mtime=0), "is not JSON"),
        (gzip.compress(b"[" * 100_000, mtime=0), "is not JSON"),
        (gzip.compress(b'{"a": 1}', mtime=0)[:-9], "cut off: its gzip ends in the middle"),
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
    assert "reserved at most 50.00 MiB, allocated at most 50.00 MiB" in printed
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
    assert text.splitlines() == [
        "device 0, of 80.00 MiB: 3 requests, by the rules of torch 2.14.1",
        "exact: all 7 entries of the history are explained to the byte",
        "",
        "settings                      reserved   stranded flushes got/returned failed at",
        "default (as recorded)        60.00 MiB    0 bytes       1          2/1         –",
        "expandable_segments:True     60.00 MiB    0 bytes       0          2/0         –",
    ]


def test_a_snapshot_needs_the_device_s_size_for_anything_to_fail(capsys):
    snapshot = str(SHIPPED / "steady-1-2216.pickle.gz")
    assert replay([snapshot]) == 0
    assert "of unknown size, so nothing can fail (--device-total)" in capsys.readouterr().out
    assert replay([snapshot, "--device-total", str(512 * MIB), "--json"]) == 0
    (recorded,) = json.loads(capsys.readouterr().out)["devices"]["0"]["replays"]
    assert recorded["failed_at"] is not None
    assert "out of memory" in recorded["message"]


def test_the_same_settings_are_tried_once_however_they_are_written(tmp_path, capsys):
    path = write_recording(tmp_path, ROUND, device_total=80 * MIB, other_used=[[0, 0]])
    told = ["", "expandable_segments:True", "expandable_segments: True", "roundup_power2_divisions:1", "backend:native"]
    assert replay([str(path), "--json", *(word for conf in told for word in ("--conf", conf))]) == 0
    found = json.loads(capsys.readouterr().out)["devices"]["0"]
    assert [each["conf"] for each in found["replays"]] == ["", "expandable_segments:True", "roundup_power2_divisions:1"]


def test_changes_to_the_program_and_advice_are_told_beside_the_settings(tmp_path, capsys):
    path = write_recording(tmp_path, ROUND, device_total=80 * MIB, other_used=[[0, 0]])
    arguments = [str(path), "--change", "one_stream", "--advise"]
    assert replay([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["devices"]["0"]
    assert [(each["change"], each["num_alloc_retries"]) for each in found["changes"]] == [("one_stream", 1)]
    assert found["advice"]["kind"] == "no_change"
    assert replay(arguments) == 0
    text = capsys.readouterr().out
    assert "with one_stream" in text
    assert "advice: no change" in text


def test_a_change_that_there_is_not_is_refused(tmp_path, capsys):
    path = write_recording(tmp_path, ROUND, device_total=80 * MIB, other_used=[[0, 0]])
    assert replay([str(path), "--change", "bigger"]) == 2
    printed = capsys.readouterr()
    assert (printed.out, printed.err.count("\n")) == ("", 1)
    assert "bigger" in printed.err


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
    assert "cannot be read (Error -3" in capsys.readouterr().err


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
    _, _, _, _, recorded, other, _, failure, _, _, note = capsys.readouterr().out.splitlines()
    assert recorded.endswith("37,000")
    assert other.endswith("–")
    assert failure == "default (as recorded): OutOfMemoryError at request 37,000 for 1.03 GiB, after 934.9 s:"
    assert note.startswith("the recorded job ran out at request ")
    assert replay([run]) == 0
    assert "is not known" not in capsys.readouterr().out


def test_it_says_where_a_replay_is_not_what_was_recorded(tmp_path, capsys):
    """A neighbour grew meanwhile: a snapshot alone does not tell that, a recording does."""
    run = SHIPPED / "neighbour-2-6562.run.json"
    assert replay([str(run)]) == 0
    assert "estimate" not in capsys.readouterr().out
    assert replay([str(SHIPPED / "neighbour-2-6562.pickle.gz")]) == 0
    title, note, *_ = capsys.readouterr().out.splitlines()
    assert title.startswith(
        "device 0, of 2.73 GiB for this allocator, as its last OutOfMemoryError shows: 39,436 requests"
    )
    assert note.startswith("an estimate: 59,182 of 59,182 entries are explained to the byte; bytes reserved at most: ")


@pytest.mark.parametrize(("told", "bytes_"), [("536870912", 512 * MIB), ("512MiB", 512 * MIB), ("0.5 GiB", 512 * MIB)])
def test_a_size_comes_in_bytes_or_with_its_unit(capsys, told, bytes_):
    assert replay([str(SHIPPED / "steady-1-2216.pickle.gz"), "--device-total", told, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["devices"]["0"]["device_total_bytes"] == bytes_


@pytest.mark.parametrize("told", ["1GB", "-1", "", "0.5", "much"])
def test_what_is_no_size_is_refused_with_an_example(capsys, told):
    with pytest.raises(SystemExit):
        replay(["x", f"--device-total={told}"])
    assert f"{told!r} is not a number of bytes, such as 25769803776 or 24GiB" in capsys.readouterr().err


def changed_settings(folder, **told):
    """A recording of ROUND's whose snapshot says other settings than its environment."""
    path = write_recording(folder, ROUND, device_total=80 * MIB, other_used=[[0, 0]])
    packed_snapshot = folder / "made.pickle.gz"
    snapshot = pickle.loads(gzip.decompress(packed_snapshot.read_bytes()))
    packed_snapshot.write_bytes(gzip.compress(pickle.dumps({**snapshot, "allocator_settings": told})))
    return path


def test_the_settings_in_force_are_those_of_the_snapshot_whatever_the_environment_said(tmp_path, capsys):
    path = changed_settings(tmp_path, PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True", expandable_segments=False)
    assert replay([str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["devices"]["0"]
    assert (found["replays"][0]["conf"], found["exact"], found["estimates"]) == (
        "expandable_segments:False",
        True,
        False,
    )
    assert ["something changed it at run time" in hazard for hazard in found["replays"][0]["hazards"]] == [True]
    assert replay([str(path), "--conf", "expandable_segments:True"]) == 0
    assert "\nexpandable_segments:True " in capsys.readouterr().out


def test_what_is_known_against_settings_is_told_beside_what_they_come_to(tmp_path, capsys):
    path = write_recording(tmp_path, ROUND, device_total=80 * MIB, other_used=[[0, 0]])
    confs = [
        "expandable_segments:True",
        "expandable_segments:True,max_split_size_mb:64",
        "garbage_collection_threshold:0.8",
    ]
    arguments = [str(path), *(word for conf in confs for word in ("--conf", conf))]
    assert replay([*arguments, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["devices"]["0"]["replays"]
    assert [each["hazards"] for each in told] == [
        [],
        [],
        [
            (
                "expandable_segments with max_split_size_mb: a free block of that size or more, which is what expandable "
                "segments grow together to, then serves no smaller request"
            )
        ],
        ["garbage_collection_threshold does nothing without a memory fraction below 1"],
    ]
    assert replay([*arguments, "--memory-fraction", "0.9"]) == 0
    text = capsys.readouterr().out
    assert "expandable_segments:True,max_split_size_mb:64: expandable_segments with max_split_size_mb" in text
    assert "does nothing without" not in text
    assert replay([str(path), "--conf", confs[1], "--torch", "2.11.0"]) == 0
    assert "serves no smaller request" not in capsys.readouterr().out


def test_what_a_job_is_said_to_have_forbids_settings(tmp_path, capsys):
    path = write_recording(tmp_path, ROUND, device_total=80 * MIB, other_used=[[0, 0]])
    both = "expandable_segments:True,max_split_size_mb:64"
    assert replay([str(path), "--conf", both, "--has", "pools", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["devices"]["0"]["replays"][1]["hazards"]
    assert [each.partition(":")[0] for each in told] == [
        "expandable_segments with MemPools or CUDA graphs' pools",
        "expandable_segments with max_split_size_mb",
    ]
    for option, thing, says in (
        ("--has", "ipc", "expandable_segments with CUDA IPC"),
        ("--has", "pools", "expandable_segments with MemPools"),
        ("--lacks", "nvml", "expandable_segments without libnvidia-ml.so.1"),
        ("--lacks", "virtual-memory", "expandable_segments on a device without virtual memory"),
    ):
        assert replay([str(path), "--conf", "expandable_segments:True", option, thing]) == 0
        assert f"expandable_segments:True: {says}" in capsys.readouterr().out
    assert replay([str(path), "--conf", "expandable_segments:True", "--lacks", "ipc,pools", "--has", "nvml"]) == 0
    assert "expandable_segments:True: " not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("told", "says"),
    [
        (["--has", "ipc,nvml", "--lacks", "ipc"], "--has and --lacks both name ipc"),
        (["--has", "mps"], "there is no 'mps'; choose from pools, ipc, virtual-memory, nvml"),
        (["--device-total", "0"], "'0' is no device's size, such as 24GiB"),
    ],
)
def test_what_cannot_be_is_not_taken(capsys, told, says):
    with pytest.raises(SystemExit) as ended:
        replay(["FILE", *told])
    assert ended.value.code == 2
    assert says in capsys.readouterr().err


def test_settings_that_cannot_be_read_are_told_and_the_defaults_are_taken(tmp_path, capsys):
    path = tmp_path / "dump.pickle"
    history = as_pytorch_writes(ROUND)
    told = {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:lots"}
    path.write_bytes(pickle.dumps({"segments": [], "device_traces": [history], "allocator_settings": told}))
    assert replay([str(path), "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["devices"]["0"]["exact"]
    assert "its settings cannot be read (" in printed.err
    assert "), and are taken to be the defaults" in printed.err
