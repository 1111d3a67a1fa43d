"""Real processes of Allocscope, started and ended by a test; and how a test waits for what they do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests.needs import REPO

RECORDINGS = REPO / "cli" / "allocscope" / "cli" / "recordings"
LAUNCH = Path(__file__).with_name("launch.py")
PATIENCE_S = 60.0
"""Of a condition that holds after a second or two on an idle machine."""
LISTENS = {"grpc": "--grpc-listen", "http": "--http-listen", "metrics": "--metrics-listen"}

Found = TypeVar("Found")


def until(condition: Callable[[], Found | None], what: str, within_s: float = PATIENCE_S) -> Found:
    """The condition's answer as soon as it is a true one; a failed test where it does not become so in time."""
    deadline, pause = time.monotonic() + within_s, threading.Event()
    while not (found := condition()):
        if time.monotonic() > deadline:
            pytest.fail(f"not within {within_s:.0f} s: {what}")
        pause.wait(0.05)
    return found


def recording(name: str) -> Path:
    """One of the recordings that the demo plays, by its name."""
    return RECORDINGS / f"{name}.run.json"


@dataclass(slots=True)
class Service:
    """A collector or a daemon."""

    name: str
    command: tuple[str, ...]
    log: Path
    process: subprocess.Popen[str]
    addresses: dict[str, Any] = field(default_factory=dict)

    @property
    def runs(self) -> bool:
        return self.process.poll() is None

    def said(self, *words: str) -> str | None:
        """The first line of its log that holds all these words."""
        lines = self.log.read_text(errors="replace").splitlines()
        return next((line for line in lines if all(word in line for word in words)), None)

    def get(self, path: str) -> Any:
        """What it answers over HTTP."""
        address = self.addresses.get("http") or self.addresses["metrics"]
        with urllib.request.urlopen(f"http://{address}{path}", timeout=10) as answer:
            text = answer.read().decode()
        return json.loads(text) if "json" in answer.headers["content-type"] else text


@dataclass(slots=True)
class Job:
    """A recorded job that plays."""

    recording: Path
    uuid: str
    process: subprocess.Popen[str]

    @property
    def runs(self) -> bool:
        return self.process.poll() is None

    def end(self) -> dict[str, Any]:
        """Wait for its end; what it said of itself then."""
        out, _ = self.process.communicate(timeout=PATIENCE_S)
        assert self.process.returncode in (0, 1), out
        summary: dict[str, Any] = json.loads(out.splitlines()[-1])
        return summary


class Machine:
    """Where the processes of one test run; what they write lies in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.database = folder / "allocscope.db"
        self._started: list[subprocess.Popen[str]] = []
        self._plays: dict[str, subprocess.Popen[str]] = {}
        self._logs: dict[str, Path] = {}

    def collector(self, *options: str) -> Service:
        """A collector on free ports, on this machine's one database."""
        places = ("--database", f"sqlite:///{self.database}", "--grpc-listen", "127.0.0.1:0")
        return self._serve("collector", ("collector", *places, "--http-listen", "127.0.0.1:0", *options))

    def daemon(self, node: str, collector: Service, *options: str, name: str = "", clock_off_s: float = 0) -> Service:
        """A daemon as the pretend node `node`; no NVML, so that it sees the same on any machine."""
        name = name or f"daemon-{node}"
        places = ("--socket", str(self.folder / name / "daemon.sock"), "--spool", str(self.folder / f"spool-{name}"))
        to = ("--collector", collector.addresses["grpc"], "--metrics-listen", "127.0.0.1:0", "--nvml", "false")
        return self._serve(name, ("daemon", "--node", node, *places, *to, *options), clock_off_s)

    def play(
        self, path: Path, daemon: Service, *options: str, job: str, speed: float, uuid: str = "", clock_off_s: float = 0
    ) -> Job:
        """A recorded job, `speed` times as fast, on a GPU of its own where none is named."""
        uuid = uuid or f"GPU-{job}"
        where = ("--socket", str(daemon.addresses["socket"]), "--job", job, "--gpu-uuid", uuid)
        command = ("play", str(path), "--speed", str(speed), *where, "--flush-timeout", "30", "--json", *options)
        process = self._plays[job] = self._spawn(f"play-{job}", command, clock_off_s, output=subprocess.PIPE)
        return Job(path, uuid, process)

    def until(self, condition: Callable[[], Found | None], what: str) -> Found:
        """As `until`; fails at once where a job could not play."""

        def answer() -> Found | None:
            self.assert_all_could_play()
            return condition()

        return until(answer, what)

    def assert_all_could_play(self) -> None:
        """Each job plays, or has come to its end."""
        broken = [name for name, process in self._plays.items() if process.poll() not in (None, 0, 1)]
        assert not broken, f"could not play: {', '.join(broken)}"

    def kill(self, service: Service) -> None:
        """As kill -9 does."""
        service.process.kill()
        service.process.wait()

    def end(self, service: Service) -> None:
        """As a service manager does: it has time, and ends by itself."""
        service.process.terminate()
        assert service.process.wait(PATIENCE_S) == 0

    def again(self, service: Service) -> Service:
        """Start it anew on what it had: addresses, folders, database."""
        bound = [(flag, str(service.addresses[key])) for key, flag in LISTENS.items() if key in service.addresses]
        return self._serve(service.name, (*service.command, *chain.from_iterable(bound)))

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """A command that ends by itself."""
        return subprocess.run(
            [sys.executable, "-P", str(LAUNCH), "0", *command],
            env=_environment(),
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            stdin=subprocess.DEVNULL,
            check=False,
        )

    def close(self) -> None:
        """End all that still runs."""
        for process in self._started:
            process.kill()
            process.wait()
            if process.stdout:
                process.stdout.close()

    def show_logs(self) -> None:
        """What the processes said, as pytest shows it where a test failed."""
        for name, log in self._logs.items():
            print(f"--- {name}\n" + "\n".join(log.read_text(errors="replace").splitlines()[-40:]))

    def _serve(self, name: str, command: tuple[str, ...], clock_off_s: float = 0) -> Service:
        addresses = self.folder / f"{name}.json"
        addresses.unlink(missing_ok=True)
        process = self._spawn(name, (*command, "--addresses-file", str(addresses)), clock_off_s)
        service = Service(name, command, self._logs[name], process)
        until(lambda: addresses.exists() or not service.runs, f"{name} is ready")
        assert service.runs, f"{name} ended with status {process.returncode}"
        service.addresses = json.loads(addresses.read_text())
        return service

    def _spawn(
        self, name: str, command: tuple[str, ...], clock_off_s: float, output: int | None = None
    ) -> subprocess.Popen[str]:
        log = self._logs[name] = self.folder / f"{name}.log"
        with log.open("a") as errors:
            process = subprocess.Popen(
                [sys.executable, "-P", str(LAUNCH), str(clock_off_s), *command],
                env=_environment(),
                stdin=subprocess.DEVNULL,
                stdout=output or errors,
                stderr=errors,
                text=True,
            )
        self._started.append(process)
        return process


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("ALLOCSCOPE_")}
