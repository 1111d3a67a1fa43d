"""Which process began a run, and whether a rank came down from another one: from /proc, as a folder made for the test."""

import os
from pathlib import Path

import pytest

from allocscope.probe.ancestry import Ancestor, is_inherited, root_of

TORCH = "7f00-7f01 r-xp 00000000 08:01 1234 /venv/lib/python3/site-packages/torch/lib/libtorch_cpu.so\n"
SPAWNED = "python -B -c from multiprocessing.spawn import spawn_main; spawn_main(tracker_fd=6) --multiprocessing-fork"
FORKSERVER = "python -c from multiprocessing.forkserver import main; main(13, 14, ['__main__'])"


class Proc:
    """A /proc of processes, each one the child of the one before it: 1, 2, 3, …"""

    def __init__(self, folder: Path) -> None:
        self.folder, self.last = folder, 0

    def add(self, command: str, rank: str | None = None, *, torch: bool = False) -> int:
        self.last += 1
        own = self.folder / str(self.last)
        own.mkdir()
        words = command.split(" ", 2) if " -c " in command else command.split(" ")
        (own / "cmdline").write_text("".join(f"{word}\0" for word in words))
        (own / "environ").write_text("HOME=/\0" + (f"RANK={rank}\0" if rank is not None else "") + "PATH=/bin\0")
        (own / "stat").write_text(f"{self.last} (a ) b) S {self.last - 1} 1 1 0 -1\n")
        (own / "maps").write_text(TORCH if torch else "55aa-55ab r--p 00000000 08:01 99 /usr/bin/python3\n")
        return self.last


@pytest.fixture
def proc(tmp_path: Path) -> Proc:
    return Proc(tmp_path)


LAUNCHED = [("python torchrun train.py", None)]


@pytest.mark.parametrize(
    ("line", "root"),
    [
        pytest.param([("bash", None), ("python train.py", None)], 2, id="alone"),
        pytest.param([("torchrun", None), ("python train.py", "1")], 1, id="the launcher"),
        pytest.param([("torchrun", None), ("bash wrap.sh", "1"), ("python train.py", "1")], 1, id="past a shell"),
        pytest.param([("torchrun", None), ("python train.py", "1"), ("python eval.py", "1")], 1, id="past the rank"),
        pytest.param([("srun", "0"), ("torchrun", "0"), ("python train.py", "1")], 2, id="the inner launcher"),
        pytest.param([("python train.py", "1")], 1, id="the container's first process"),
        pytest.param([("sh", None), ("python train.py", None), (SPAWNED, None)], 2, id="mp.spawn"),
        pytest.param([("sh", None), ("python train.py", None), (SPAWNED, None), (SPAWNED, None)], 2, id="twice"),
        pytest.param([("python train.py", None), (FORKSERVER, None), (FORKSERVER, None)], 1, id="a fork server"),
        pytest.param([("python train.py", None), ("/usr/bin/python3.12 -u /x/train.py ddp", None)], 1, id="Lightning"),
        pytest.param([("python -m pkg.train", None), ("python -m pkg.train --x", None)], 1, id="and by module"),
        pytest.param([("python sweep.py", None), ("python train.py", None)], 2, id="another program"),
        pytest.param([("python -m a", None), ("python a", None), ("python -W error -X dev b", None)], 3, id="options"),
        pytest.param([("python", None), ("python", None)], 2, id="no program"),
        pytest.param([("python -c pass", None), ("python -c pass", None)], 2, id="nor these"),
        pytest.param([("train.py", None), ("train.py", None)], 2, id="no Python"),
    ],
)
def test_the_process_that_began_the_run(proc, line, root):
    for command, rank in line:
        proc.add(command, rank)
    assert root_of(proc.last, "RANK", proc.folder).pid == root


@pytest.mark.parametrize(
    ("line", "inherited"),
    [
        pytest.param([("torchrun", None, True), ("python train.py", "1", True)], False, id="the rank itself"),
        pytest.param(
            [("torchrun", None, True), ("python train.py", "1", True), ("python eval.py", "1", True)], True,
            id="a process of the rank",
        ),
        pytest.param(
            [("torchrun", None, True), ("python train.py", "1", True), ("sh", "1", False), ("python x", "1", True)],
            True, id="by way of a shell",
        ),
        pytest.param(
            [("torchrun", None, True), ("sh", "1", False), ("python train.py", "1", True)], False, id="a rank in a shell"
        ),
        pytest.param(
            [("srun", None, False), ("python conda run", "1", False), ("python train.py", "1", True)], False,
            id="a rank in a Python without torch",
        ),
        pytest.param(
            [("srun", "0", False), ("torchrun", "0", True), ("python train.py", "1", True)], False,
            id="a launcher that was launched",
        ),
        pytest.param([("python train.py", None, True), (SPAWNED, None, True)], False, id="set by itself since"),
    ],
)  # fmt: skip
def test_a_rank_is_inherited_from_whoever_has_torch(proc, line, inherited):
    for command, rank, torch in line:
        proc.add(command, rank, torch=torch)
    assert is_inherited(proc.last, "RANK", "1", proc.folder) is inherited


def test_what_cannot_be_read_is_not_of_this_run(proc):
    """As of other users' processes, and in a container whose /proc hides them."""
    for command, rank in (("python train.py", "1"), ("python train.py", "1")):
        proc.add(command, rank, torch=True)
    for name in ("environ", "maps", "cmdline"):
        (proc.folder / "1" / name).unlink()
    assert root_of(2, "RANK", proc.folder).pid == 1
    assert not is_inherited(2, "RANK", "1", proc.folder)
    assert root_of(2, None, proc.folder).pid == 2


def test_without_a_proc_a_process_stands_for_itself(tmp_path):
    assert root_of(7, "RANK", tmp_path / "none").pid == 7
    assert not is_inherited(7, "RANK", "1", tmp_path / "none")


def test_a_line_that_never_ends_is_followed_so_far(proc):
    proc.add("python train.py", "1")
    (proc.folder / "1" / "stat").write_text("1 (x) S 1 1")
    assert root_of(1, "RANK", proc.folder).pid == 1
    assert not is_inherited(1, "RANK", "1", proc.folder)


def test_of_a_real_process_all_of_it_is_read():
    own = Ancestor(os.getpid())
    assert own.parent is not None
    assert own.parent.pid == os.getppid()
    assert own.environ["PATH"]
    assert own.arguments
    assert not own.has_torch
