"""Who a process is: what its caller says, what torch.distributed says, what its launcher said; and that a rank is nobody else's."""

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from allocscope.daemon import claims
from allocscope.model import wire
from allocscope.probe import app, identity
from allocscope.probe.identity import Place, Standing, Who
from allocscope.probe.rank_claim import RankClaim
from tests.probe.fake_torch import FakeTorch
from tests.probe.receiver import LONG_S, Receiver

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "TORCHELASTIC_RUN_ID": "exp-7"}
PROGRAM = identity.program


@pytest.fixture
def daemon(tmp_path: Path) -> str:
    """Ranks are claimed toward one daemon; each test has its own."""
    return str(tmp_path / "d.sock")


@pytest.fixture(autouse=True)
def named(monkeypatch):
    monkeypatch.setattr(identity, "program", lambda: "train.py")


class FakeDistributed:
    """torch.distributed's state, in a test's hand."""

    def __init__(self, rank: int | None = None, world_size: int = 2) -> None:
        self.rank, self.world_size = rank, world_size
        self.fails: Exception | None = None
        self.modules = {
            "torch.distributed": SimpleNamespace(
                is_initialized=lambda: self.rank is not None,
                get_rank=self._rank,
                get_world_size=lambda: self.world_size,
            )
        }

    def _rank(self):
        if self.fails:
            raise self.fails
        return self.rank


# all of it


def test_a_process_says_who_it_is(daemon):
    who = Who({**TORCHRUN, "ALLOCSCOPE_JOB": " j "}, daemon=daemon, modules={})
    process = who.process(5, "2.14.1", "")
    assert (process.job, process.rank, process.world_size, process.local_rank) == ("j", 3, 8, 1)
    assert (process.pid, process.host, process.started_us) == (os.getpid(), socket.gethostname(), 5)
    assert (process.torch_version, process.allocator_conf, process.devices) == ("2.14.1", "", ())
    assert process.program == "train.py"
    assert re.fullmatch("[0-9a-f]{32}", process.process_id)
    assert wire.process_from_wire(wire.process_to_wire(process)) == process


@pytest.mark.parametrize("odd", ["a\nb", "a\0b", "a\x1bb", "a\udcffb", "a\u202eb", "a" * 100_000])
def test_names_that_a_daemon_would_refuse_are_made_such_as_it_takes(daemon, monkeypatch, odd):
    monkeypatch.setattr(identity, "program", lambda: odd)
    for who in (Who({}, daemon=daemon, modules={}), Who({}, daemon=daemon, job=odd, modules={})):
        process = who.process(5, "2.14.1", "")
        claims.check_size(wire.process_to_wire(process))
        claims.check_process(process)
        assert (process.job[0], (process.program or "")[0]) == ("a", "a")


@pytest.mark.parametrize("argv", [[], [None], [b"x.py"], [5], ["\udcff.py"], None])
def test_whatever_a_program_makes_of_its_arguments_it_has_a_name(daemon, monkeypatch, argv):
    monkeypatch.setattr(identity, "program", PROGRAM)
    monkeypatch.setattr(sys, "argv", argv)
    monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace())
    process = Who({}, daemon=daemon, modules={}).process(5)
    claims.check_size(wire.process_to_wire(process))
    claims.check_process(process)


def test_no_two_processes_have_one_id(daemon):
    assert len({Who({}, daemon=daemon, modules={}).process(1).process_id for _ in range(100)}) == 100


def test_alone_it_is_called_by_its_program_and_itself(daemon):
    process = Who({}, daemon=daemon, modules={}).process(1)
    assert (process.job.partition(":")[0], process.rank) == (f"train.py@{socket.gethostname()}", None)


def test_what_the_caller_says_wins(daemon):
    environ = {**TORCHRUN, "ALLOCSCOPE_JOB": "j"}
    who = Who(
        environ, daemon=daemon, job="given", place=Place(rank=0, world_size=2), modules=FakeDistributed(1).modules
    )
    process = who.process(1)
    assert (process.job, process.rank, process.world_size, process.local_rank) == ("given", 0, 2, 1)


@pytest.mark.parametrize("given", [Place("x", -2, True), Place(9, 4, 0)])  # type: ignore[arg-type]
def test_a_caller_who_lies_is_not_believed(daemon, given):
    process = Who({}, daemon=daemon, place=given, modules={}).process(1)
    assert (process.rank, process.world_size) == (None, None)


def test_a_name_is_bounded(daemon):
    assert len(Who({"ALLOCSCOPE_JOB": "x" * 10_000}, daemon=daemon, modules={}).process(1).job) == 200


def test_mpichs_ranks_on_several_nodes_are_called_by_where_its_mpiexec_listens(daemon, monkeypatch):
    proxy = SimpleNamespace(
        pid=7, arguments=("/usr/bin/hydra_pmi_proxy", "--control-port", "head:46055", "--rmk", "user")
    )
    monkeypatch.setattr(identity, "root_of", lambda pid, variable: proxy)
    process = Who({"PMI_RANK": "1", "PMI_SIZE": "2"}, daemon=daemon, modules={}).process(1)
    assert (process.job, process.rank) == ("train.py@head:46055", 1)


# torch.distributed


@pytest.mark.parametrize(
    ("environ", "world", "place"),
    [
        pytest.param({}, Place(1, 2), Place(1, 2, None), id="nobody launched it: mp.spawn"),
        pytest.param({"LOCAL_RANK": "1"}, Place(1, 2), Place(1, 2, 1), id="Lightning's ddp_spawn"),
        pytest.param({"RANK": "0", "WORLD_SIZE": "2"}, Place(1, 2), Place(1, 2, None), id="ranks in another order"),
        pytest.param(
            {"RANK": "1", "WORLD_SIZE": "2"}, Place(9, 16), Place(9, 16, None), id="one launched for each node"
        ),
        pytest.param(
            {"RANK": "5", "WORLD_SIZE": "8"}, Place(1, 4), Place(5, 8, None), id="a part of the launcher's world"
        ),
        pytest.param({"RANK": "5", "WORLD_SIZE": "8"}, Place(0, 1), Place(5, 8, None), id="a world of its own"),
        pytest.param(
            {"JOB_COMPLETION_INDEX": "1"}, Place(2, 4), Place(2, 4, None), id="a launcher that knows no world"
        ),
        pytest.param({}, Place(-1, 2), Place(), id="not of the group"),
        pytest.param({}, Place(2, 2), Place(), id="a rank beyond the world"),
    ],
)
def test_the_larger_world_tells_the_rank(daemon, environ, world, place):
    modules = FakeDistributed(world.rank, world.world_size or 0).modules
    who = Who(environ, daemon=daemon, job="j", modules=modules)
    who.look()
    assert who.standing == Standing("j", *place)


def test_a_rank_that_is_learnt_late_is_news_once(daemon):
    distributed, environ = FakeDistributed(), {"MASTER_ADDR": "localhost"}
    who = Who(environ, daemon=daemon, modules=distributed.modules)
    assert who.process(1).rank is None
    assert not who.look()
    distributed.rank = 1
    assert [who.look(), who.look()] == [True, False]
    assert who.standing[1:] == (1, 2, None)


def test_a_rank_that_is_learnt_late_reaches_the_daemon_by_a_new_hello(tmp_path, monkeypatch):
    monkeypatch.setattr(app, "_observes_oom", True)
    distributed, path = FakeDistributed(), tmp_path / "d.sock"
    modules = {**FakeTorch().modules, **distributed.modules}
    probe = app.Probe({}, job="j", socket=str(path), modules=modules)
    with Receiver(path) as receiver:
        probe.step()
        probe.step()
        receiver.wait_for(lambda: receiver.hellos() and receiver.hellos()[-1].devices)
        distributed.rank = 1
        probe.step()
        receiver.wait_for(lambda: receiver.hellos()[-1].rank == 1)
        probe.stop(LONG_S)
    first, *_, last = receiver.hellos()
    assert (first.rank, last.world_size, last.process_id, len(last.devices)) == (None, 2, first.process_id, 1)


def test_a_group_that_is_ended_takes_no_rank_away_and_another_one_gives_another(daemon):
    distributed = FakeDistributed(1)
    who = Who({}, daemon=daemon, job="j", modules=distributed.modules)
    who.look()
    distributed.rank = None
    assert (who.look(), who.standing.rank) == (False, 1)
    distributed.rank = 0
    assert (who.look(), who.standing.rank) == (True, 0)


def test_an_environment_that_is_set_late_is_news_too(daemon):
    """As by a worker of Ray Train."""
    environ = {"RAY_JOB_ID": "01000000"}
    who = Who(environ, daemon=daemon, modules={})
    assert who.process(1).job == "ray-01000000"
    environ.update(RANK="1", WORLD_SIZE="2", LOCAL_RANK="1", MASTER_ADDR="192.0.2.2", MASTER_PORT="54799")
    assert who.look()
    assert who.standing == Standing("ray-01000000:54799", 1, 2, 1)


def test_a_job_gets_no_other_name_before_its_ranks_know_each_other(daemon):
    environ, distributed = {"HOME": "/"}, FakeDistributed()
    who = Who(environ, daemon=daemon, modules=distributed.modules)
    first = who.process(1).job
    environ.update(MASTER_ADDR="head", MASTER_PORT="29500")
    assert (who.look(), who.standing.job) == (False, first)
    distributed.rank = 1
    assert (who.look(), who.standing.job) == (True, "train.py@head:29500")


@pytest.mark.parametrize("error", [ValueError("x"), RuntimeError("x"), AttributeError("x"), TypeError("x")])
def test_a_torch_that_fails_tells_nothing(daemon, error):
    distributed = FakeDistributed(1)
    distributed.fails = error
    who = Who({}, daemon=daemon, modules=distributed.modules)
    assert who.process(1).rank is None


@pytest.mark.parametrize("modules", [{}, {"torch.distributed": None}, {"torch.distributed": SimpleNamespace()}])
def test_a_torch_without_distributed_tells_nothing(daemon, modules):
    assert Who({}, daemon=daemon, modules=modules).process(1).rank is None


# nobody has a rank twice

CLAIM = """
import sys
from allocscope.probe.rank_claim import RankClaim
claim = RankClaim(sys.argv[1])
print(claim.take("j", 3), flush=True)
sys.stdin.readline()
"""


def claiming(daemon: str) -> tuple[subprocess.Popen, str]:
    command = [sys.executable, "-c", CLAIM, daemon]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, process.stdout.readline()


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_a_rank_is_one_processs_until_that_ends_however_it_ends(daemon, end):
    who = Who(TORCHRUN, daemon=daemon, job="j", modules={})
    process, said = claiming(daemon)
    try:
        assert said == "True\n"
        assert who.process(1).rank is None
        assert who.standing == Standing("j", None, 8, None)
        process.send_signal(end)
        process.communicate(timeout=LONG_S)
        assert who.look()
        assert who.standing == Standing("j", 3, 8, 1)
    finally:
        process.kill()
        process.communicate()


def test_a_rank_of_another_job_or_of_another_daemon_is_another_rank(daemon):
    claims = [RankClaim(daemon), RankClaim(daemon), RankClaim(daemon + "2")]
    assert [c.take(job, 3) for c, job in zip(claims, ("j", "k", "j"), strict=True)] == [True, True, True]
    assert [RankClaim(daemon).take("j", rank) for rank in (3, 4)] == [False, True]
    claims[0].release()
    assert RankClaim(daemon).take("j", 3)


def test_who_has_a_rank_keeps_it_and_who_gets_another_lets_it_go(daemon):
    claim = RankClaim(daemon)
    assert [claim.take("j", rank) for rank in (3, 3, 4)] == [True, True, True]
    assert RankClaim(daemon).take("j", 3)
    assert not RankClaim(daemon).take("j", 4)


def test_a_rank_ends_with_its_process_though_a_child_of_it_lives_on(daemon):
    script = CLAIM.replace("sys.stdin.readline()", (
        "import os, signal\n"
        "if os.fork() == 0:\n"
        "    signal.alarm(60)\n"
        "    os.close(1)\n"
        "    os.read(0, 1)\n"
        "    os._exit(0)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    ))  # fmt: skip
    process = subprocess.Popen([sys.executable, "-c", script, daemon], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.read() == b"True\n"
    assert process.wait(LONG_S) == -signal.SIGKILL
    assert RankClaim(daemon).take("j", 3)
    assert process.stdin is not None
    process.stdin.close()  # the child ends
    process.stdout.close()


def test_where_no_names_are_to_be_had_every_rank_is_believed(daemon, monkeypatch):
    class Closed:
        def __init__(self, *_):
            raise PermissionError(1, "not here")

    monkeypatch.setattr("allocscope.probe.rank_claim.socket.socket", Closed)
    assert [RankClaim(daemon).take("j", 3) for _ in range(2)] == [True, True]


# the program


@pytest.mark.parametrize(
    ("argv", "spec_name", "program"),
    [
        (["/home/me/train.py", "--lr", "1"], None, "train.py"),
        (["/x/pkg/__main__.py"], None, "pkg"),
        (["/x/pkg/__main__.py"], "pkg.__main__", "pkg"),
        (["/x/pkg/train.py"], "pkg.train", "pkg.train"),
        (["-c"], None, "python"),
        ([""], None, "python"),
        ([], None, "python"),
    ],
)
def test_the_program_is_named_without_its_arguments(monkeypatch, argv, spec_name, program):
    class Main:
        __spec__ = type("Spec", (), {"name": spec_name}) if spec_name else None

    monkeypatch.setitem(sys.modules, "__main__", Main)
    monkeypatch.setattr(sys, "argv", argv)
    assert PROGRAM() == program
