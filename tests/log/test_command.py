"""`allocscope log` as people call it: what it prints, and how it ends."""

import gzip
import io
import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from allocscope.cli.app import main
from allocscope.cli.log_options import stamp_us
from tests.allocator.made import SHIPPED
from tests.log.test_lines import POST
from tests.snapshots.made import DATA, MIB, TIME_US, A, block, entry, live, pickled, segment, snapshot

TRACE = [
    entry("segment_alloc", A, 20 * MIB, time_us=TIME_US),
    entry("alloc", A, 5 * MIB, time_us=TIME_US + 1_000_000),
    entry("alloc", A + 5 * MIB, 3 * MIB - 5, time_us=TIME_US + 2_000_000),
    entry("free_requested", A, 5 * MIB, time_us=TIME_US + 3_000_000),
    entry("free_completed", A, 5 * MIB, time_us=TIME_US + 3_500_000),
]
AFTER = segment(A, [block(5 * MIB), live(3 * MIB, 3 * MIB - 5), block(12 * MIB)])
WHOLE = snapshot(segments=[AFTER], device_traces=[TRACE])
TEXT = """\
device 0: 5 entries from 2023-11-14T22:13:20.000000Z, 3.500 s; nothing reserved before that
     seconds dev event         address           requested        block stream pool  what
   -3.500000 0   segment_alloc 0x7f0000000000                 20.00 MiB 0      large got from the driver
   -2.500000 0   alloc         0x7f0000000000     5.00 MiB     5.00 MiB 0      large from the driver; 15.00 MiB of 20.00 MiB is left
   -1.500000 0   alloc         0x7f0000500000     3.00 MiB     3.00 MiB 0      large splits a free block of 15.00 MiB; 12.00 MiB is left
    0.000000 0   free          0x7f0000000000     5.00 MiB     5.00 MiB 0      large back in the large pool
device 0: what this came to is what the snapshot says, every block to the byte
"""


@pytest.fixture
def log(tmp_path, capsys):
    """Write a file, call the command, and give its exit status and what it printed."""

    def call(content, *options, name="dump.pickle"):
        path = tmp_path / name
        path.write_bytes(content)
        status = main(["log", str(path), *options])
        out, err = capsys.readouterr()
        return status, out, err.replace(str(path), "FILE")

    return call


def lines_of(out):
    return [json.loads(line) for line in out.splitlines()]


@pytest.mark.parametrize(
    "content",
    [
        pickled(WHOLE),
        gzip.compress(pickled(WHOLE, 2)),
        json.dumps(WHOLE).encode(),
        gzip.compress(json.dumps(WHOLE).encode()),
    ],
    ids=["pickle", "pickle.gz", "json", "json.gz"],
)
def test_a_history_line_by_line(log, content):
    assert log(content) == (0, TEXT, "")


def test_an_object_a_line(log):
    status, out, _ = log(pickled(WHOLE), "--json")
    told = lines_of(out)
    assert status == 0
    assert [each["kind"] for each in told] == ["segment_alloc", "alloc", "alloc", "free", "end"]
    assert told[2] == {
        "kind": "alloc",
        "entry": 2,
        "time_us": TIME_US + 2_000_000,
        "device": 0,
        "stream": 0,
        "pool": "large",
        "address": A + 5 * MIB,
        "requested_bytes": 3 * MIB - 5,
        "block_bytes": 3 * MIB,
        "driver": False,
        "served_by": "split",
        "hole_bytes": 15 * MIB,
        "left_bytes": 12 * MIB,
    }
    assert told[4] == {
        "kind": "end",
        "device": 0,
        "entries": 5,
        "exact": True,
        "estimate_from_entry": None,
        "contradictions": 0,
        "different_blocks": 0,
    }


@pytest.mark.parametrize(
    ("options", "entries"),
    [
        (["--kind", "alloc,free"], [1, 2, 4]),
        (["--size", "4MiB"], [0, 1, 4]),
        (["--size", "3MiB:5MiB"], [1, 2, 4]),
        (["--size", ":3MiB"], [2]),
        (["--stream", "0x0", "--kind", "split"], [2]),
        (["--pool", "small"], []),
        (["--pool", "0.1"], []),
        (["--since", "2s"], [2, 4]),
        (["--since=-2s", "--until", "1000ms"], [2]),
        (["--until", "2023-11-14T22:13:21"], [0, 1]),
        (["--since", "2023-11-14 22:13:22.000001Z"], [4]),
        (["--address", "0x7f0000000001"], [0, 1, 4]),
        (["--device", "0", "--last", "2"], [2, 4]),
    ],
)
def test_filters(log, options, entries):
    status, out, _ = log(pickled(WHOLE), "--json", *options)
    assert (status, [each["entry"] for each in lines_of(out) if each["kind"] != "end"]) == (0, entries)


def test_moments_as_utc(log):
    _, out, _ = log(pickled(WHOLE), "--utc", "--last", "1")
    assert "\n2023-11-14T22:13:23.500000Z 0   free " in out


def test_several_devices_are_told_in_the_order_of_time(log):
    other = [each | {"time_us": each["time_us"] + 100} for each in TRACE]
    both = snapshot(segments=[AFTER, AFTER | {"device": 2}], device_traces=[TRACE, [], other])
    _, out, _ = log(pickled(both), "--json", "--kind", "alloc")
    assert [(each["device"], each.get("entry")) for each in lines_of(out)] == [
        (0, 1),
        (2, 1),
        (0, 2),
        (2, 2),
        (0, None),
        (2, None),
    ]


def test_the_summary_of_a_recorded_run(log, capsys):
    assert main(["log", str(SHIPPED / "neighbour-2-6562.run.json"), "--summary", "--json"]) == 0
    (told,) = json.loads(capsys.readouterr().out)["devices"]
    assert told["history"] == {
        "entries": 59182,
        "exact": True,
        "estimate_from_entry": None,
        "contradictions": 0,
        "different_blocks": 0,
    }
    assert (told["allocations"], told["frees"], told["flush"]["count"], told["ooms"]) == (19793, 19642, 8, 1)
    assert sum(told["served_by"].values()) == told["allocations"]
    assert {finding["about"]: finding["normal"] for finding in told["findings"]}["flushes"] is False


def test_the_summary_for_people_fits_80_columns_but_for_sentences(capsys):
    assert main(["log", str(SHIPPED / "streams-2-3890.run.json"), "--summary"]) == 0
    out = capsys.readouterr().out
    told = [line for line in out.splitlines() if not line.startswith(("device", "  normal", "  NOT NORMAL"))]
    assert max(map(len, told)) <= 80
    assert "frees that waited" in out


@pytest.mark.parametrize(
    "content", [POST.encode(), gzip.compress(POST.encode()), POST.encode("utf-16")], ids=["text", "gz", "utf-16"]
)
def test_lines_of_a_post_are_told_and_it_is_said_that_pytorch_prints_none(log, content):
    status, out, _ = log(content, name="job.log")
    assert status == 0
    assert out.startswith("PyTorch itself prints no such lines")
    assert [line.split()[0] for line in out.splitlines()[2:5]] == ["alloc", "free", "merge"]
    assert out.endswith("4 lines; out-of-memory texts: 0 (allocscope oom explains them); failed attempts: 0\n")


def test_the_summary_of_lines_leaves_out_what_they_do_not_tell(log):
    _, out, _ = log(POST.encode(), "--summary", "--json")
    (told,) = json.loads(out)["devices"]
    assert (told["lines"], told["allocations"], told["frees"], told["merges"]) == (4, 1, 1, 1)
    not_told = (
        "splits",
        "served_by",
        "waits",
        "segments",
        "flush",
        "empty_cache",
        "duration_s",
        "allocations_per_s",
        "reserved_bytes",
    )
    assert [told[key] for key in not_told] == [None] * len(not_told)
    _, text, _ = log(POST.encode(), "--summary")
    assert "splits" not in text
    assert "PyTorch itself prints no such lines" in text


def test_warnings_and_errors_in_the_same_log_are_counted(log):
    warning = "memory allocation failed with OOM on device 0 while trying to allocate 20971520 bytes (free: 0, total: 85899345920)."
    error = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 80.00 GiB of which 1.00 MiB is free."
    _, out, _ = log(f"{POST}{warning}\nepoch\n{warning}\n{error}\n".encode(), "--summary", "--json")
    (told,) = json.loads(out)["devices"]
    assert (told["retries"], told["ooms"]) == (2, 1)


WANTED = (
    "allocscope log wants a snapshot with its history (torch.cuda.memory._dump_snapshot(); see allocscope log --help), RUN.run.json, or a "
    "log with lines such as: Allocator: block 0x7f8c4a000000 (size 1024 MB) allocated to stream 0\n"
)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        pytest.param(b"", f"FILE: tells nothing of an allocator in 0 lines; {WANTED}", id="empty"),
        pytest.param(
            b"epoch 1\nepoch 2\n", f"FILE: tells nothing of an allocator in 2 lines; {WANTED}", id="another log"
        ),
        pytest.param(b"\x7fELF\x00\x01", f"FILE: is a binary file; {WANTED}", id="a program"),
        pytest.param(
            pickled(snapshot(device_traces=[])),
            "FILE: has no history; call torch.cuda.memory._record_memory_history() early, and _dump_snapshot() when the run is over\n",
            id="no history",
        ),
        pytest.param(
            gzip.compress(pickled(WHOLE))[:-40],
            "FILE: cut off: its gzip ends in the middle; copy or record it again\n",
            id="cut",
        ),
        pytest.param(
            b'{"a": 1}',
            "FILE: has no list 'segments'; was it made by torch.cuda.memory._dump_snapshot()?\n",
            id="other JSON",
        ),
        pytest.param(
            b"PK\x03\x04", "FILE: is a zip file, as torch.save() makes; dump the snapshot by pickle instead\n", id="zip"
        ),
        pytest.param(
            gzip.compress(b"epoch 1\n" * 1000)[:-10],
            "FILE: cannot be read (its gzip ends in the middle; copy it again)",
            id="a cut log",
        ),
    ],
)
def test_what_is_none_is_told_what_it_is_and_what_would_be_right(log, content, problem):
    status, out, err = log(content)
    assert (status, out) == (2, "")
    assert err.startswith(f"allocscope log: {problem}")


def test_a_file_that_is_not_there(capsys, tmp_path):
    assert main(["log", str(tmp_path / "none")]) == 2
    assert "cannot be read (No such file or directory)" in capsys.readouterr().err


@pytest.mark.parametrize("epochs", [0, 200_000])
def test_lines_that_were_read_before_a_log_breaks_off_are_told(log, epochs):
    text = POST + "epoch\n" * epochs
    status, out, err = log(gzip.compress(text.encode())[:-10])
    assert (status, out.count(" alloc ")) == (2, 1)
    assert "cannot be read" in err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no device that is always full")
@pytest.mark.parametrize("content", [POST.encode(), pickled(WHOLE)])
def test_an_answer_that_cannot_be_written_is_not_the_files_fault(tmp_path, content):
    path = tmp_path / "FILE"
    path.write_bytes(content)
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "allocscope.cli", "log", path],
            check=False,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert (done.returncode, done.stderr) == (1, "allocscope: the answer cannot be written: No space left on device\n")


def test_settings_that_cannot_be_read_are_told_and_the_history_too(log):
    odd = snapshot(
        segments=[AFTER],
        device_traces=[TRACE],
        allocator_settings={"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:lots"},
    )
    status, out, err = log(pickled(odd))
    assert (status, out) == (0, TEXT)
    assert err.startswith("allocscope log: FILE: its settings cannot be read (allocator settings")


def test_a_device_that_has_no_history(log):
    assert log(pickled(WHOLE), "--device", "3") == (
        2,
        "",
        "allocscope log: FILE: has no history of device 3, but of 0\n",
    )


def test_before_the_end_is_nothing_where_times_are_not_told(log):
    old = snapshot(segments=[AFTER], device_traces=[[each | {"time_us": 0} for each in TRACE]])
    status, out, err = log(pickled(old), "--since", "5s")
    assert (status, out) == (2, "")
    assert "give --since and --until in UTC" in err


@pytest.mark.parametrize(
    ("option", "value", "problem"),
    [
        ("--kind", "alloc,melt", "there is no 'melt'; choose from alloc, free"),
        ("--size", "10MiB:1MiB", "is not MIN[:MAX]"),
        ("--size", ":", "is not MIN[:MAX]"),
        ("--stream", "zero", "is not a number"),
        ("--pool", "medium", "is none of small, large, private, and A.B"),
        ("--since", "yesterday", "is neither a time before the end, such as 30s, nor one of UTC"),
        ("--last", "0", "is not a number from 1 on"),
    ],
)
def test_options_that_cannot_be(capsys, option, value, problem):
    with pytest.raises(SystemExit) as ended:
        main(["log", "FILE", option, value])
    assert ended.value.code == 2
    assert problem in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "first"),
    [
        pytest.param(POST.encode(), "PyTorch itself", id="a log"),
        pytest.param(gzip.compress(POST.encode()), "PyTorch itself", id="a packed log"),
        pytest.param(pickled(WHOLE), "device 0: 5 entries", id="a snapshot"),
        pytest.param(gzip.compress(json.dumps(WHOLE).encode()), "device 0: 5 entries", id="a packed snapshot in JSON"),
    ],
)
def test_the_standard_input(monkeypatch, capsys, content, first):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
    assert main(["log", "-"]) == 0
    assert capsys.readouterr().out.startswith(first)


def test_a_reader_that_has_seen_enough_ends_it_quietly(tmp_path):
    """As `| head` does."""
    many = [each for _ in range(20_000) for each in (entry("alloc", A, MIB), *_freed(A, MIB))]
    path = tmp_path / "many.pickle"
    path.write_bytes(pickle.dumps(snapshot(segments=[segment(A, [block(2 * MIB)])], device_traces=[many])))
    command = [sys.executable, "-m", "allocscope.cli", "log", str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline().startswith(b"device 0: 60,000 entries")
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 0


def _freed(address, size):
    return [entry("free_requested", address, size), entry("free_completed", address, size)]


@pytest.mark.parametrize(
    ("line", "moment"),
    [
        ("2026-01-31T12:00:00Z x", 1_769_860_800_000_000),
        ("[2026-01-31 12:00:00,25] x", 1_769_860_800_250_000),
        ("INFO 2026/01/31 13:00:00.000001 +01:00", 1_769_860_800_000_001),
        ("2026-13-31T12:00:00Z", None),
        ("12:00:00 x", None),
        ("", None),
    ],
)
def test_the_moment_that_a_line_tells(line, moment):
    assert stamp_us(line) == moment


def test_every_real_snapshot_at_hand_is_told_in_both_ways(capsys):
    for path in sorted(DATA.glob("*.pickle*")):
        for options in ([], ["--json"], ["--summary"], ["--summary", "--json"]):
            assert main(["log", str(path), *options]) in (0, 2)
            out, err = capsys.readouterr()
            assert bool(out) != bool(err)
