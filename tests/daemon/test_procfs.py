"""A job's process is found among the driver's by its own pid and its start, in whatever pid namespace it runs."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from allocscope.daemon.procfs import AGAIN_US, LONGEST_READ_BYTES, HostProcess, Hosts, Procfs, is_same, join
from allocscope.model import Process
from tests.daemon.fakes import Reads

BOOT_S = 1_700_000_000
TICKS = os.sysconf("SC_CLK_TCK")


TREES = Path(__file__).parent / "trees"


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


def test_a_process_is_told_as_a_real_kernel_writes_it():
    started_us = (BOOT_S * TICKS + 61234) * 1_000_000 // TICKS
    procfs = Procfs(TREES / "kubernetes_systemd_v2")
    assert procfs.look_up(48210) == HostProcess(48210, 7, started_us, "python3", frozenset({1000}), 1000)


def test_a_pid_in_nested_namespaces_is_the_innermost():
    """Of a pod on a node that is a container itself: the machine's pid, the node's, its own."""
    nested = Procfs(TREES / "kind_v2").look_up(30123)
    assert nested is not None
    assert nested.own_pid == 1


def test_a_name_is_a_name_and_nothing_more(proc):
    add(proc, 4711, own_pid=7, started_s=100, name="x\r)\x1b[2J\x0bNSpid:\t9 (")
    (proc / "4711" / "status").write_bytes(
        b"Name:\tx\rNSpid:\t1\x0bUid:\t0\t0\t0\t0\xff\nNSpid:\t4711\t7\nUid:\t5\t6\t7\t6\n"
    )
    found = Procfs(proc).look_up(4711)
    name = "x?)?[2J?NSpid:?9 ("
    assert found == HostProcess(4711, 7, (BOOT_S + 100) * 1_000_000, name, frozenset({5, 6, 7}), 6)


@pytest.mark.parametrize(
    ("stat", "status"),
    [
        (b"", b""),
        (b"4711 (python3) S 1", b"NSpid:\nUid:\n"),
        (b"\xff" * 100, b"\xff" * 100),
        (b"4711 (python3) " + b"x " * 40, b"NSpid:\tx y\nUid:\t-1 1e3\n"),
    ],
)
def test_of_what_is_no_figure_nothing_is_told(proc, stat, status):
    (proc / "4711").mkdir()
    (proc / "4711" / "stat").write_bytes(stat)
    (proc / "4711" / "status").write_bytes(status)
    found = Procfs(proc).look_up(4711)
    assert found is not None
    assert (found.own_pid, found.started_us, found.uids, found.uid) == (None, None, frozenset(), None)


def test_a_file_without_end_is_read_to_its_last_whole_line(proc):
    (proc / "4711").mkdir()
    (proc / "4711" / "cgroup").write_bytes(b"0::/job_1\n" + b"1:x:/" + b"a" * LONGEST_READ_BYTES)
    assert Procfs(proc).read(4711, "cgroup") == "0::/job_1\n"


@pytest.mark.parametrize("kind", ["loop", "folder", "pipe"])
def test_what_is_no_file_is_not_read(proc, kind):
    (proc / "4711").mkdir()
    file = proc / "4711" / "cgroup"
    make = {"loop": lambda: file.symlink_to("cgroup"), "folder": file.mkdir, "pipe": lambda: os.mkfifo(file)}
    make[kind]()
    assert Procfs(proc).read(4711, "cgroup") in (None, "")


def test_of_an_environment_only_what_is_asked_for_is_kept():
    procfs = Procfs(TREES / "kubernetes_systemd_v2")
    assert procfs.environ(48210, ["HOSTNAME", "SLURM_JOB_ID"]) == {"HOSTNAME": "llama-worker-0"}
    assert procfs.environ(3100, ["HOSTNAME"]) == {}


def test_a_process_stuck_in_the_kernel_is_not_asked_for_its_environment(tmp_path):
    """Reading it may never return."""
    shutil.copytree(TREES / "slurm_v2", tmp_path / "proc")
    stat = tmp_path / "proc" / "20200" / "stat"
    stat.write_text(stat.read_text().replace(") S ", ") D "))
    procfs = Procfs(tmp_path / "proc")
    assert procfs.environ(20200, ["SLURM_JOB_ID"]) == {}
    assert procfs.environ(20001, ["SLURM_JOB_ID"]) == {"SLURM_JOB_ID": "8812"}


def test_where_other_users_processes_are_hidden_that_is_known(proc):
    assert Procfs(proc).hides_processes
    assert not Procfs(TREES / "slurm_v2").hides_processes


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
    assert join([100, 200, 300, 400], jobs, Procfs(proc).look_up) == {200: "b" * 32, 300: "c" * 32, 100: "a" * 32}


def test_a_pid_that_this_daemon_cannot_see_is_joined_by_its_number(proc):
    assert join([100, 200], [process("a", 200, 1)], Procfs(proc).look_up) == {200: "a" * 32}


def test_a_process_is_read_when_it_is_new_and_once_a_minute(proc):
    add(proc, 100, own_pid=7, started_s=10)
    hosts = Hosts(procfs := Reads(proc))
    first = hosts.look_up(100)
    for second in range(60):
        hosts.begin(second * 1_000_000)
        assert hosts.look_up(100) is hosts.look_up(100)
        assert hosts.look_up(100) == first
    assert procfs.count == {"stat": 1, "status": 1}
    (proc / "100" / "stat").write_text((proc / "100" / "stat").read_text().replace("python3", "trainer"))
    hosts.begin(AGAIN_US)
    again = hosts.look_up(100)
    assert again is not None
    assert again.name == "trainer"
    assert procfs.count == {"stat": 2, "status": 2}


def test_a_pid_that_another_process_took_is_seen_at_once(proc):
    add(proc, 100, own_pid=7, started_s=10)
    hosts = Hosts(Procfs(proc))
    hosts.begin(1)
    before = hosts.look_up(100)
    (proc / "100").rename(proc / "gone")  # so that its inode is not used again
    add(proc, 100, own_pid=8, started_s=20)
    hosts.begin(2)
    after = hosts.look_up(100)
    assert before is not None
    assert after is not None
    assert (before.own_pid, after.own_pid) == (7, 8)


def test_who_vanishes_is_gone_in_the_next_round(proc):
    add(proc, 100, started_s=10)
    hosts = Hosts(Procfs(proc))
    hosts.begin(1)
    assert hosts.look_up(100) is not None
    shutil.rmtree(proc / "100")
    hosts.begin(2)
    assert hosts.look_up(100) is None
    assert hosts.look_up(100) is None


def test_one_that_goes_while_it_is_read_is_not_told(proc):
    """What was read of two processes, the one before and the one after, is of neither."""

    class Swaps(Procfs):
        def read(self, pid, name):
            told = super().read(pid, name)
            if name == "stat" and (proc / "next").exists():
                (proc / "100").rename(proc / "gone")
                (proc / "next").rename(proc / "100")
            return told

    add(proc, 100, own_pid=7, started_s=10)
    shutil.copytree(proc / "100", proc / "next")
    hosts = Hosts(Swaps(proc))
    assert hosts.look_up(100) is None
    hosts.begin(1)
    assert hosts.look_up(100) is not None
