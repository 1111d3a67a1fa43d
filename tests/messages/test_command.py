"""`allocscope oom` reads logs as they lie about, and answers people and programs."""

import gzip
import io
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from allocscope.allocator.messages import read_log
from allocscope.cli import app, oom
from allocscope.cli.oom_text import as_text

TEXT = (
    "epoch 1\n[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 448.00 MiB. GPU 1 has a total capacity of"
    " 79.10 GiB of which 364.31 MiB is free. Process 175080 has 1.46 GiB memory in use. Process 175356 has 77.26 GiB memory in use."
    " Of the allocated memory 72.12 GiB is allocated by PyTorch, and 3.78 GiB is reserved by PyTorch but unallocated.\n"
)
OBJECT = {
    "is_oom": True,
    "requested_bytes": 469762048,
    "device": 1,
    "total_bytes": 84932978278,
    "free_bytes": 382006723,
    "allowed_bytes": None,
    "this_process_bytes": None,
    "other_processes": [{"pid": 175080, "used_bytes": 1567663063}, {"pid": 175356, "used_bytes": 82957293322}],
    "allocated_bytes": 77438260347,
    "reserved_bytes": None,
    "unallocated_bytes": 4058744095,
    "private_pools_bytes": None,
    "cached_bytes": None,
    "active_bytes": None,
    "other_bytes": None,
    "limit_bytes": None,
    "verdict": "fragmentation",
    "why": (
        "3.78 GiB lay free in holes of what PyTorch reserved, and 364.31 MiB on the device: more than the 448.00 MiB asked for;"
        " no hole was large enough; Process 175356 is this job itself, seen from inside a container: what it holds fits nowhere else on the device"
    ),
    "try": [
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
        "make the sizes steadier (pad to a few lengths), or allocate the largest first",
    ],
    "own_pid": 175356,
    "origin": "allocator",
    "kind": "cuda",
    "rank": 1,
    "worker": None,
    "line": 2,
    "times": 1,
}


def asked(capsys, *arguments):
    status = oom.main([*map(str, arguments)])
    return status, capsys.readouterr()


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(TEXT.encode(), id="UTF-8"),
        pytest.param(b"\xef\xbb\xbf" + TEXT.encode(), id="UTF-8 with a mark"),
        pytest.param(TEXT.encode("utf-16"), id="a PowerShell redirection"),
        pytest.param(gzip.compress(TEXT.encode()), id="packed"),
        pytest.param(TEXT.replace("\n", "\r\n").encode(), id="Windows"),
    ],
)
def test_a_log_is_answered_in_json(tmp_path, capsys, content):
    (tmp_path / "log").write_bytes(content)
    status, said = asked(capsys, tmp_path / "log", "--json")
    assert status == 0
    assert json.loads(said.out) == {"messages": [OBJECT], "retries": 0, "lines": 2, "left_out": 0}


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(TEXT.encode() + b"\xff\xfe\x00", id="plain"),
        pytest.param(gzip.compress(TEXT.encode()), id="packed"),
    ],
)
def test_the_standard_input_is_read(monkeypatch, capsys, content):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BufferedReader(io.BytesIO(content))))
    status, said = asked(capsys, "-", "--json")
    assert (status, [m["line"] for m in json.loads(said.out)["messages"]]) == (0, [2])


@pytest.mark.parametrize("content", [TEXT.encode(), gzip.compress(TEXT.encode())], ids=["plain", "packed"])
def test_a_pipe_is_read_though_it_cannot_go_back(capsys, content):
    """As of `allocscope oom <(kubectl logs …)`."""
    reading, writing = os.pipe()
    os.write(writing, content)
    os.close(writing)
    try:
        status, said = asked(capsys, f"/dev/fd/{reading}", "--json")
    finally:
        os.close(reading)
    assert (status, [m["line"] for m in json.loads(said.out)["messages"]]) == (0, [2])


def test_the_summary_counts_in_words_that_fit(tmp_path, capsys):
    retry = "[W812 16:00:28.643448608 CUDACachingAllocator.cpp:3933] memory allocation failed with OOM on device 1 while trying to"
    retry += " allocate 20971520 bytes (free: 15794176, total: 150111977472).\n"
    (tmp_path / "log").write_text(TEXT + TEXT.replace("rank1", "rank2") + retry * 2, encoding="utf-8")
    first, *_ = asked(capsys, tmp_path / "log")[1].out.splitlines()
    assert first == "2 out-of-memory texts in 6 lines, 2 failed attempts that PyTorch made again"


def test_people_get_it_in_words(tmp_path, capsys):
    (tmp_path / "log").write_text(TEXT, encoding="utf-8")
    status, said = asked(capsys, tmp_path / "log")
    assert status == 0
    assert said.out == (
        "1 out-of-memory text in 2 lines\n"
        "\n"
        "line 2, rank 1, device 1: out of memory: FRAGMENTATION\n"
        "  3.78 GiB lay free in holes of what PyTorch reserved, and 364.31 MiB on the device: more than the 448.00 MiB asked for\n"
        "  no hole was large enough\n"
        "  Process 175356 is this job itself, seen from inside a container: what it holds fits nowhere else on the device\n"
        "  asked for                  448.00 MiB\n"
        "  device                      79.10 GiB\n"
        "  free on the device         364.31 MiB\n"
        "  allocated                   72.12 GiB\n"
        "  free in holes                3.78 GiB\n"
        "  process 175080               1.46 GiB\n"
        "  process 175356              77.26 GiB (this job itself)\n"
        "  try: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True\n"
        "  try: make the sizes steadier (pad to a few lengths), or allocate the largest first\n"
    )


def on_many_ranks(ranks=64):
    """A process that is this job itself, and a little less free, on each."""
    return "".join(
        TEXT.replace("rank1", f"rank{rank}")
        .replace("GPU 1", f"GPU {rank % 8}")
        .replace("175356", str(9000 + rank))
        .replace("364.31", f"{364 - rank % 8}.31")
        for rank in range(ranks)
    )


def test_the_same_failure_on_many_ranks_is_one_block(tmp_path, capsys):
    (tmp_path / "log").write_text(on_many_ranks(), encoding="utf-8")
    assert asked(capsys, tmp_path / "log")[1].out == (
        "64 out-of-memory texts in 128 lines\n"
        "\n"
        "lines 2 to 128, ranks 0-63, devices 0-7, 64 times: out of memory: FRAGMENTATION\n"
        "  3.78 GiB lay free in holes of what PyTorch reserved, and 364.31 MiB on the device: more than the 448.00 MiB asked for\n"
        "  no hole was large enough\n"
        "  Process 9000 is this job itself, seen from inside a container: what it holds fits nowhere else on the device\n"
        "  (these are the figures of line 2)\n"
        "  asked for                  448.00 MiB\n"
        "  device                      79.10 GiB\n"
        "  free on the device         357.31 MiB to 364.31 MiB\n"
        "  allocated                   72.12 GiB\n"
        "  free in holes                3.78 GiB\n"
        "  the processes that they name differ: see --json\n"
        "  try: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True\n"
        "  try: make the sizes steadier (pad to a few lengths), or allocate the largest first\n"
    )
    assert len(json.loads(asked(capsys, tmp_path / "log", "--json")[1].out)["messages"]) == 64


@pytest.mark.parametrize(
    ("change", "titles"),
    [
        pytest.param(("rank1", "rank5"), ["lines 2 to 4, ranks 1, 5, device 1"], id="another rank"),
        pytest.param(("364.31", "365.31"), ["line 2, rank 1, device 1", "line 4, rank 1, device 1"], id="again"),
        pytest.param(("448.00", "449.00"), ["line 2, rank 1, device 1", "line 4, rank 1, device 1"], id="another request"),
        pytest.param(("3.78", "0.01"), ["line 2, rank 1, device 1", "line 4, rank 1, device 1"], id="another verdict"),
    ],
)  # fmt: skip
def test_what_differs_in_more_than_the_rank_stands_apart(tmp_path, capsys, change, titles):
    (tmp_path / "log").write_text(TEXT + TEXT.replace(*change), encoding="utf-8")
    out = asked(capsys, tmp_path / "log")[1].out
    assert [block.split(":")[0].removesuffix(", 2 times") for block in out.split("\n\n")[1:]] == titles


def test_sentences_are_folded_to_the_terminal():
    text = as_text(read_log([TEXT]), 60)
    assert max(map(len, text.splitlines())) <= 60
    assert (
        "  3.78 GiB lay free in holes of what PyTorch reserved, and\n    364.31 MiB on the device: more than the 448.00 MiB asked\n    for\n"
        in text
    )


def test_a_log_without_any_says_so(tmp_path, capsys):
    (tmp_path / "log").write_text("epoch 1\nepoch 2\n", encoding="utf-8")
    assert asked(capsys, tmp_path / "log")[1].out == "no out-of-memory text in 2 lines\n"


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "No such file or directory"),
        (b"\x1f\x8bnot gzip at all", "Unknown compression method"),
        (gzip.compress(b"")[:10] + b"\xff" * 20, "Error -3 while decompressing data: invalid block type"),
    ],
)
def test_what_cannot_be_read_is_said(tmp_path, capsys, content, problem):
    if content is not None:
        (tmp_path / "log").write_bytes(content)
    status, said = asked(capsys, tmp_path / "log", "--json")
    assert (status, said.out) == (2, "")
    assert said.err == f"allocscope oom: cannot read {tmp_path / 'log'}: {problem}\n"


def test_a_packed_log_that_breaks_off_is_told_as_far_as_it_goes(tmp_path, capsys):
    rest = "".join(f"step {number} of a job that goes on\n" for number in range(20_000))
    packed = gzip.compress((TEXT + rest).encode())
    (tmp_path / "log").write_bytes(packed[: len(packed) * 3 // 4])
    status, said = asked(capsys, tmp_path / "log", "--json")
    report = json.loads(said.out)
    assert (status, [message["line"] for message in report["messages"]]) == (2, [2])
    assert said.err == (
        f"allocscope oom: cannot read {tmp_path / 'log'} further than line {report['lines']}:"
        " its gzip ends in the middle; copy it again\n"
    )


@pytest.mark.parametrize(
    ("content", "what"),
    [
        pytest.param(pickle.dumps({"segments": []}), "a pickle", id="pickle"),
        pytest.param(gzip.compress(pickle.dumps({"segments": []})), "a pickle", id="packed pickle"),
        pytest.param(b"PK\x03\x04\x00\x00data.pkl", "a zip archive (as .pt files are)", id="pt"),
        pytest.param(b"\x89PNG\r\n\x1a\n", "a picture", id="png"),
    ],
)
def test_what_is_no_log_is_told_with_the_command_for_snapshots(tmp_path, capsys, content, what):
    (tmp_path / "given").write_bytes(content)
    status, said = asked(capsys, tmp_path / "given")
    assert (status, said.out) == (2, "")
    assert said.err == (
        f"allocscope oom: {tmp_path / 'given'} is no log, but {what}; a PyTorch memory snapshot is read by allocscope inspect,"
        " and oom wants a job's output\n"
    )


def test_a_closed_standard_input_is_told(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", None)
    status, said = asked(capsys, "-")
    assert (status, said.out, said.err) == (2, "", "allocscope oom: cannot read -: the standard input is closed\n")


@pytest.mark.parametrize("command", ["oom", "inspect", "replay"])
@pytest.mark.parametrize("name", ["none", "."])
def test_a_file_that_cannot_be_read_ends_every_command_alike(tmp_path, capsys, command, name):
    assert app.main([command, str(tmp_path / name)]) == 2
    said = capsys.readouterr()
    assert (said.out, said.err.count("\n")) == ("", 1)


@pytest.mark.parametrize("times", [1, 2000], ids=["a small answer", "a large answer"])
@pytest.mark.parametrize("unbuffered", ["", "1"], ids=["buffered", "unbuffered"])
def test_an_answer_that_cannot_be_written_is_told(tmp_path, monkeypatch, times, unbuffered):
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    path = tmp_path / "log"
    path.write_text("".join(TEXT.replace("448.00", f"{100 + at}.00") for at in range(times)), encoding="utf-8")
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "allocscope.cli", "oom", path], stdout=full, stderr=subprocess.PIPE, check=False
        )
    assert (done.returncode, done.stderr) == (1, b"allocscope: the answer cannot be written: No space left on device\n")


def test_what_goes_wrong_elsewhere_is_not_taken_for_an_answer_that_cannot_be_written(monkeypatch):
    def broken(arguments):
        raise OSError("of something else")

    monkeypatch.setattr(oom, "main", broken)
    with pytest.raises(OSError, match="of something else"):
        app.main(["oom", "log"])
