"""Replays in several processes come to the same as in one, and end with the command, whoever ends it."""

import json
import multiprocessing
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from allocscope.cli.replay import main as replay
from allocscope.cli.replay_workers import WorkerDied, Workers
from tests.allocator.made import write_recording
from tests.simulator.test_history import ROUND

MIB = 1 << 20
CONFS = ("expandable_segments:True", "max_split_size_mb:64", "roundup_power2_divisions:8")


@pytest.fixture
def run(tmp_path):
    return str(write_recording(tmp_path, ROUND, device_total=80 * MIB, other_used=[[0, 0]]))


def doubled(held, job, done):
    done(0.5)
    return held, 2 * job, os.getpid()


def died(held, job, done):
    os.kill(os.getpid(), signal.SIGKILL)


def stopped(held, job, done):
    """Says who it is, and then waits for what never comes."""
    Path(held).write_text(str(os.getpid()))
    signal.pause()


def nothing(done, of):
    pass


def test_jobs_come_back_in_their_order_from_processes_that_hold_what_they_need():
    told = []
    with Workers(doubled, "held", 2, lambda done, of: told.append((done, of))) as workers:
        made = list(workers.each([1, 2, 3]))
        again = list(workers.each([4]))
    assert [(held, job) for held, job, _ in [*made, *again]] == [("held", 2), ("held", 4), ("held", 6), ("held", 8)]
    assert os.getpid() not in {pid for _, _, pid in made}


def test_one_process_is_this_one():
    told = []
    with Workers(doubled, "held", 1, lambda done, of: told.append((done, of))) as workers:
        assert list(workers.each([1, 2])) == [("held", 2, os.getpid()), ("held", 4, os.getpid())]
    assert told == [(0.5, 2), (1.5, 2)]


def test_a_worker_that_is_killed_is_told_and_leaves_no_other_behind():
    with (
        pytest.raises(
            WorkerDied, match="a worker process was killed, perhaps because the machine has too little memory"
        ),
        Workers(died, "", 2, nothing) as workers,
    ):
        list(workers.each([1]))
    assert multiprocessing.active_children() == []


def test_several_processes_say_the_same_as_one(run, capsys):
    arguments = [run, "--json", *(word for conf in CONFS for word in ("--conf", conf))]
    assert replay([*arguments, "--processes", "1"]) == 0
    alone = json.loads(capsys.readouterr().out)
    assert replay([*arguments, "--processes", "3"]) == 0
    assert json.loads(capsys.readouterr().out) == alone
    assert [each["conf"] for each in alone["devices"]["0"]["replays"]] == ["", *CONFS]


def test_a_worker_that_is_killed_is_told_in_one_line(run, monkeypatch, capsys):
    monkeypatch.setattr("allocscope.cli.replay._replayed", died)
    assert replay([run, "--conf", CONFS[0], "--processes", "2"]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("allocscope replay: a worker process was killed")
    assert printed.err.count("\n") == 1


INTERRUPTED = """
import sys
from allocscope.cli import replay
from tests.replay.test_workers import stopped

run, where = sys.argv[1:]
workers = replay.Workers
replay._replayed = stopped
replay.Workers = lambda do, script, processes, tell: workers(do, where, processes, tell)
if __name__ == "__main__":
    sys.exit(replay.main([run, "--conf", "expandable_segments:True", "--processes", "2"]))
"""


@pytest.mark.parametrize(("sent", "status"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_workers_end_with_the_command(run, tmp_path, sent, status):
    """A file that a worker writes tells that it works, and who it is."""
    where = tmp_path / "worker"
    os.mkfifo(where)
    program = tmp_path / "program.py"
    program.write_text(INTERRUPTED)
    root = Path(__file__).resolve().parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    with subprocess.Popen([sys.executable, program, run, where], cwd=root, env=environment) as command:
        try:
            with where.open() as worker:  # waits for one that writes
                pid = int(worker.read().split()[0][:20])
            command.send_signal(sent)
            assert command.wait(60) == status
        finally:
            command.kill()
    assert ended(pid)


def ended(pid):
    """Waits until there is no such process; the test's own time limit is what ends it otherwise."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], 60)[0])
    finally:
        os.close(descriptor)
