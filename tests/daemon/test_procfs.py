"""A job's process is found among the driver's by its own pid and its start, in whatever pid namespace it runs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from allocscope.daemon.procfs import HostProcess, Procfs, is_same, join
from allocscope.model import Process

BOOT_S = 1_700_000_000
TICKS = os.sysconf("SC_CLK_TCK")


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    (tmp_path / "stat").write_text(f"cpu  1 2 3\nbtime {BOOT_S}\nprocesses 9\n")
    return tmp_path


def add(proc: Path, pid: int, *, own_pid: int | None = None, started_s: int, name: str = "python3") -> None:
    folder = proc / str(pid)
    folder.mkdir()
    fields = ["S", *["0"] * 18, str(started_s * TICKS), "0"]
    (folder / "stat").write_text(f"{pid} ({name}) {' '.join(fields)}\n")
    pids = f"{pid}\t{own_pid}" if own_pid else str(pid)
    (folder / "status").write_text(f"Name:\t{name}\nNSpid:\t{pids}\nThreads:\t1\n")


def process(letter: str, pid: int, started_s: int) -> Process:
    return Process(letter * 32, "train", pid, "host", (BOOT_S + started_s) * 1_000_000)


def test_a_process_is_told_with_its_start_and_the_pid_that_it_sees_itself(proc):
    add(proc, 4711, own_pid=7, started_s=100, name="a (b) c")
    assert Procfs(proc).look_up(4711) == HostProcess(4711, 7, (BOOT_S + 100) * 1_000_000, "a (b) c")


def test_this_very_process_is_found_in_the_real_proc():
    host = Procfs().look_up(os.getpid())
    assert host is not None
    assert host.own_pid == os.getpid()


def test_who_is_not_there_is_nobody(proc):
    assert Procfs(proc).look_up(1) is None


@pytest.mark.parametrize(
    ("host", "same"),
    [
        pytest.param(HostProcess(4711, 7, BOOT_S * 1_000_000), True, id="in a container"),
        pytest.param(HostProcess(4711, 8, BOOT_S * 1_000_000), False, id="another pid"),
        pytest.param(
            HostProcess(7, 7, (BOOT_S + 900) * 1_000_000), False, id="started after the probe: the pid was used again"
        ),
        pytest.param(HostProcess(7, 7, None), True, id="start not known"),
        pytest.param(HostProcess(7, None, None), False, id="own pid not known"),
    ],
)
def test_who_can_be_whom(host, same):
    assert is_same(host, process("a", 7, 100)) is same


def test_the_drivers_pids_are_joined_to_processes_and_the_rest_are_others(proc):
    add(proc, 100, started_s=10)
    add(proc, 200, own_pid=7, started_s=20)
    add(proc, 300, own_pid=7, started_s=30)
    jobs = [process("b", 7, 25), process("c", 7, 35), process("a", 100, 12)]
    assert join([100, 200, 300, 400], jobs, Procfs(proc)) == {200: "b" * 32, 300: "c" * 32, 100: "a" * 32}


def test_a_pid_that_this_daemon_cannot_see_is_joined_by_its_number(proc):
    assert join([100, 200], [process("a", 200, 1)], Procfs(proc)) == {200: "a" * 32}
