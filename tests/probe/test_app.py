"""The probe in a process: begun once, waiting for CUDA without initializing it, never in the job's way."""

import logging
import threading
from pathlib import Path

import pytest

from allocscope.model import EventKind
from allocscope.probe import app, torch_cuda
from allocscope.probe.app import Probe, socket_of
from allocscope.probe.clock import Clock
from allocscope.probe.identity import Place
from tests.probe.fake_torch import FakeTorch
from tests.probe.receiver import LONG_S, Receiver


class Waiting(threading.Event):
    """An Event whose waiting a test steps through: each `wait` notes the delay, and after the last one the probe is ended."""

    def __init__(self, rounds: int) -> None:
        super().__init__()
        self.delays: list[float] = []
        self._rounds = rounds
        self.ended = threading.Event()

    def wait(self, timeout: float | None = None) -> bool:
        self.delays.append(timeout or 0)
        if len(self.delays) <= self._rounds:
            return self.is_set()
        self.ended.set()
        return super().wait(LONG_S)


@pytest.fixture
def socket(tmp_path: Path) -> Path:
    return tmp_path / "d.sock"


@pytest.fixture
def observers(monkeypatch):
    monkeypatch.setattr(app, "_observes_oom", False)


def texts(caplog) -> list[str]:
    return [record.getMessage().removeprefix("allocscope: ") for record in caplog.records]


def run_rounds(probe_modules, rounds: int, caplog, environ=None) -> Waiting:
    caplog.set_level(logging.INFO, "allocscope.probe")
    waiting = Waiting(rounds)
    probe = Probe(environ or {}, stirred=waiting, modules=probe_modules, clock=Clock(wall_us=lambda: 5))
    probe.start()
    assert waiting.ended.wait(LONG_S)
    probe.stop(0.1)
    return waiting


def test_without_torch_it_looks_on_and_says_so_once(caplog):
    waiting = run_rounds({}, 20, caplog)
    assert texts(caplog) == ["does nothing: torch is not imported, yet"]
    assert waiting.delays[1:] == [0.25] * 20


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda torch: delattr(torch.modules["torch._C"], "_cuda_memoryStats"), "this torch was built without CUDA"),
        (lambda torch: torch.fails.update(device_count=RuntimeError("x")), "torch's calls fail"),
    ],
)
def test_where_nothing_is_to_come_it_looks_seldom_and_says_so_once(caplog, change, text):
    torch = FakeTorch()
    change(torch)
    waiting = run_rounds(torch.modules, 20, caplog)
    assert texts(caplog) == [f"does nothing: {text}"]
    assert waiting.delays[1:] == [10.0] * 20


def test_a_round_that_fails_is_said_once_and_the_next_follows(caplog, monkeypatch):
    monkeypatch.setattr(torch_cuda, "look", lambda modules: 1 / 0)
    waiting = run_rounds({}, 5, caplog)
    assert texts(caplog) == ["a round failed, the next follows: ZeroDivisionError('division by zero')"]
    assert len(waiting.delays) == 6


def test_once_cuda_is_there_it_introduces_itself_and_samples(socket, observers):
    torch = FakeTorch()
    torch.is_initialized = False
    torch.conf = "max_split_size_mb:64"
    with Receiver(socket) as receiver:
        probe = Probe(
            {"RANK": "1", "WORLD_SIZE": "2"},
            job="j",
            place=Place(local_rank=0),
            socket=str(socket),
            modules=torch.modules,
        )
        assert probe.step() == 0.25
        torch.is_initialized = True
        assert probe.step() == 0
        assert 0.9 < probe.step() <= 1
        receiver.wait_for(lambda: receiver.samples() and receiver.block_maps())
        probe.stop(LONG_S)
    process = receiver.hellos()[-1]
    assert (process.job, process.rank, process.world_size, process.local_rank) == ("j", 1, 2, 0)
    assert (process.torch_version, process.allocator_conf) == ("2.14.0", "max_split_size_mb:64")
    assert [device.uuid for device in process.devices] == ["GPU-00000000"]
    assert receiver.samples()[0].reserved_bytes == 1
    assert [event.kind for event in receiver.events()] == [EventKind.STOPPED]


def test_an_oom_goes_to_the_daemon_and_nothing_to_the_job(socket, observers, monkeypatch):
    torch = FakeTorch()
    with Receiver(socket) as receiver:
        probe = Probe({}, socket=str(socket), modules=torch.modules)
        probe.step()
        monkeypatch.setattr(app, "_probe", probe)
        [observer] = torch.observers
        observer(0, 20 << 20, 80 << 30, 5)
        monkeypatch.setattr(Probe, "on_oom", lambda *figures: 1 / 0)
        observer(0, 20 << 20, 80 << 30, 5)
        probe.stop(LONG_S)
    assert [(e.kind, e.requested_bytes, e.device_free_bytes) for e in receiver.events()] == [
        (EventKind.OOM, 20 << 20, 5), (EventKind.STOPPED, None, None),
    ]  # fmt: skip


def test_one_observer_serves_all_probes_of_a_process(observers, tmp_path):
    torch = FakeTorch()
    for _ in range(3):
        probe = Probe({}, socket=str(tmp_path / "none"), modules=torch.modules)
        probe.step()
        probe.stop(0.01)
    assert len(torch.observers) == 1


def test_a_stopped_probe_ignores_ooms(observers, tmp_path):
    torch = FakeTorch()
    probe = Probe({}, socket=str(tmp_path / "none"), modules=torch.modules)
    probe.step()
    probe.stop(0.01)
    calls = len(torch.calls)
    torch.observers[0](0, 1, 2, 3)
    assert len(torch.calls) == calls


def test_a_job_that_goes_elsewhere_leaves_nothing_there(tmp_path, monkeypatch, observers):
    here, elsewhere, torch = tmp_path / "here", tmp_path / "elsewhere", FakeTorch()
    for folder in (here, elsewhere):
        (folder / "captures").mkdir(parents=True)
    monkeypatch.chdir(here)
    probe = Probe({"ALLOCSCOPE_SOCKET": "d.sock"}, modules=torch.modules)
    monkeypatch.chdir(elsewhere)
    with Receiver(here / "d.sock") as receiver:
        probe.step()
        monkeypatch.setattr(app, "_probe", probe)
        torch.observers[0](0, 20 << 20, 80 << 30, 5)
        receiver.wait_for(receiver.events)
        probe.stop(LONG_S)
    assert list((elsewhere / "captures").iterdir()) == []
    assert list((here / "captures").glob("*.note"))


def test_where_the_daemon_listens(tmp_path, monkeypatch):
    own = tmp_path / "allocscope" / "daemon.sock"
    monkeypatch.setattr(app, "SYSTEM_SOCKET", str(tmp_path / "system.sock"))
    user = {"XDG_RUNTIME_DIR": str(tmp_path)}
    assert socket_of({}) == str(tmp_path / "system.sock")
    assert socket_of(user) == str(tmp_path / "system.sock")
    own.parent.mkdir()
    own.touch()
    assert socket_of(user) == str(own)
    (tmp_path / "system.sock").touch()
    assert socket_of(user) == str(tmp_path / "system.sock")
    assert socket_of({**user, "ALLOCSCOPE_SOCKET": "/told"}) == "/told"


@pytest.fixture
def raising_handler():
    """A handler of the job's that raises whatever it is given."""

    class Raising(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise ValueError("a handler of the job's")

    logger, handler = logging.getLogger("allocscope.probe"), Raising()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    yield logger
    logger.removeHandler(handler)
    logger.setLevel(level)


def test_a_log_handler_of_the_jobs_that_raises_is_no_matter(socket, observers, monkeypatch, raising_handler):
    torch = FakeTorch()
    with pytest.raises(ValueError, match="of the job's"):
        raising_handler.info("x")
    with Receiver(socket) as receiver:
        probe = Probe({}, socket=str(socket), modules=torch.modules)
        probe.start()
        receiver.wait_for(receiver.samples)
        monkeypatch.setattr(app, "_probe", probe)
        torch.fails["memory_snapshot"] = RuntimeError("no")
        [observer] = torch.observers
        observer(0, 20 << 20, 80 << 30, 5)  # no daemon that takes captures: the probe would say so
        receiver.wait_for(receiver.events)
        monkeypatch.setattr(Probe, "on_oom", lambda *figures: 1 / 0)
        observer(0, 20 << 20, 80 << 30, 5)
        app.stop(LONG_S)
    assert [event.kind for event in receiver.events()] == [EventKind.OOM, EventKind.STOPPED]
