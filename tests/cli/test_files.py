"""Files that are not what a command wants: each is told in a line on standard error, by its name, with status 2."""

from __future__ import annotations

import gzip
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from allocscope.cli.app import main

READERS = ("inspect", "replay", "log", "capture --read")
OTHERS = ("rehearse", "play", "replay --requests", "replay --golden")

FORMS: dict[str, Callable[[Path], object]] = {
    "empty": lambda path: path.write_bytes(b""),
    "a log": lambda path: path.write_text("hello\n"),
    "bytes": lambda path: path.write_bytes(bytes(range(128, 256)) * 100),
    "a cut-off gzip": lambda path: path.write_bytes(gzip.compress(b'{"segments": []}' * 50)[:-20]),
    "gzip's magic alone": lambda path: path.write_bytes(b"\x1f\x8b"),
    "a cut-off pickle": lambda path: path.write_bytes(pickle.dumps({"segments": []})[:-4]),
    "another pickle": lambda path: path.write_bytes(pickle.dumps([1, 2])),
    "another object": lambda path: path.write_text('{"a": 1}'),
    "cut-off JSON": lambda path: path.write_text('{"segments": ['),
    "deep JSON": lambda path: path.write_text("[" * 100_000),
    "a folder": lambda path: path.mkdir(),
    "nothing": lambda path: None,
    "a link to itself": lambda path: path.symlink_to(path),
}


@pytest.mark.parametrize("command", [*READERS, *OTHERS])
@pytest.mark.parametrize("form", FORMS)
def test_what_is_something_else_is_told_in_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, form: str
) -> None:
    FORMS[form](tmp_path / "x")
    assert main([*command.split(), str(tmp_path / "x")]) == 2
    said = capsys.readouterr()
    name = command.split(maxsplit=1)[0]
    assert (said.out, said.err.count("\n")) == ("", 1)
    assert said.err.startswith(f"allocscope {name}: {tmp_path / 'x'}")


BLOCK = {"address": 4096, "size": 2 << 20, "requested_size": 2 << 20, "state": "active_allocated", "frames": []}
SEGMENT = {
    "device": 0,
    "address": 4096,
    "total_size": 2 << 20,
    "stream": 0,
    "segment_type": "small",
    "segment_pool_id": (0, 0),
    "is_expandable": False,
    "blocks": [BLOCK],
}
TRACE = [
    {"action": action, "addr": 4096, "size": 2 << 20, "stream": 0, "time_us": at, "frames": []}
    for at, action in enumerate(("segment_alloc", "alloc"), 1)
]


@pytest.mark.parametrize("command", ["inspect", "log", "replay"])
def test_a_pipe_is_read_as_a_file_is(tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str) -> None:
    """As what the shell's <(zcat …) gives; a pickle is read more than once."""
    data = pickle.dumps({"segments": [SEGMENT], "device_traces": [TRACE]})
    (tmp_path / "file").write_bytes(data)
    assert main([command, str(tmp_path / "file")]) == 0
    of_file = capsys.readouterr()
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(target=(tmp_path / "pipe").write_bytes, args=(data,), daemon=True)
    writer.start()
    assert main([command, str(tmp_path / "pipe")]) == 0
    writer.join()
    assert capsys.readouterr() == of_file


def test_of_a_large_file_no_more_than_pieces_are_in_memory(tmp_path: Path) -> None:
    """A file of 4 GiB, all holes, is refused by a process that may have 2 GiB of addresses."""
    with (tmp_path / "huge").open("wb") as file:
        file.truncate(4 << 30)
    limited = "import resource, sys; resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30)); from allocscope.cli.app import main; "
    for command in (["inspect"], ["replay"], ["capture", "--read"]):
        answer = subprocess.run(
            [sys.executable, "-c", f"{limited}sys.exit(main(sys.argv[1:]))", *command, str(tmp_path / "huge")],
            capture_output=True,
            text=True,
            check=False,
        )
        assert (answer.returncode, answer.stderr.count("\n")) == (2, 1), answer.stderr
        assert "is not a pickle, nor JSON" in answer.stderr
