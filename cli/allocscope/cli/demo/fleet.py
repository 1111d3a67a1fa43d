"""A fleet on this machine: one collector, daemons as pretend nodes, recorded jobs, each a process of its own."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from allocscope.model.figures import duration

READY_WITHIN_S = 30.0
"""A service that has not told its addresses by then has failed; it takes one second on an idle machine."""
STOP_WITHIN_S = 10.0
PLAYED = (0, 1, 3)
"""Exit statuses of `allocscope play`: the recorded job ended in order, or died, or not all of it was acknowledged."""
LONGEST_SOCKET = 100
"""A unix socket's path may have 107 bytes (unix(7))."""
PR_SET_PDEATHSIG = 1
"""prctl(2): a child is told when its parent dies, so that a killed demo leaves nothing behind."""


NODES = ("node-a", "node-b", "node-c")


class FleetError(Exception):
    """A process of the fleet did not start or did not stay; the message holds what it said last."""


@dataclass(frozen=True, slots=True)
class Player:
    """A recorded job and the place where it runs."""

    job: str
    recording: Path
    """RUN.run.json"""
    node: str
    gpu_index: int

    @property
    def gpu_uuid(self) -> str:
        return f"GPU-{self.node}-{self.gpu_index}"


@dataclass(slots=True)
class Service:
    """A running process and what it told when it was ready."""

    process: subprocess.Popen[str]
    log: Path
    addresses: dict[str, str] = field(default_factory=dict)
    last: dict[str, object] | None = None
    """What a recorded job said at its end."""

    def end_by(self, deadline: float) -> None:
        """Wait for its end until that monotonic time, then kill it."""
        try:
            self.process.wait(max(deadline - time.monotonic(), 0))
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self.process.stdout:
            self.process.stdout.close()


def _socket(folder: Path, node: str) -> Path:
    """In a folder of its own: a daemon takes the captures that it finds beside its socket."""
    return folder / node / "daemon.sock"


class Fleet:
    """Starts and stops the processes; everything they write lies in `folder`."""

    def __init__(self, folder: Path) -> None:
        longest = len(str(_socket(folder, max(NODES, key=len))))
        if longest > LONGEST_SOCKET:
            raise FleetError(f"{folder} is too long for the sockets in it; set TMPDIR to a folder with a shorter name")
        self.folder = folder
        self.services: list[Service] = []
        self.players: dict[str, Service] = {}

    @property
    def database(self) -> str:
        return f"sqlite:///{self.folder / 'allocscope.db'}"

    def start_collector(self, *options: str) -> dict[str, str]:
        """Start the collector on free ports of loopback, and return its addresses: "grpc" and "http"."""
        listen = ("--database", self.database, "--grpc-listen", "127.0.0.1:0", "--http-listen", "127.0.0.1:0")
        nothing_to_capture = ("--capture-at-risk", "false")  # a recording that plays has no allocator
        return self._serve("collector", "collector", *listen, *nothing_to_capture, *options)

    def start_daemon(self, node: str, collector: str) -> dict[str, str]:
        """Start a daemon as the pretend node `node`, and return its addresses: "socket" and "metrics"."""
        spool, socket = self.folder / f"spool-{node}", _socket(self.folder, node)
        places = ("--node", node, "--socket", str(socket), "--spool", str(spool), "--collector", collector)
        return self._serve(f"daemon-{node}", "daemon", *places, "--metrics-listen", "127.0.0.1:0")

    def start_player(self, player: Player, socket: str, speed: float, start_at_s: float) -> None:
        """Start a recorded job, whose recording begins at that unix time; its last words are read by `ended`."""
        where = (
            "--socket",
            socket,
            "--job",
            player.job,
            "--gpu-uuid",
            player.gpu_uuid,
            "--gpu-index",
            str(player.gpu_index),
        )
        how = ("--speed", str(speed), "--start-at", f"{start_at_s:.6f}", "--json")
        command = ("play", str(player.recording), *where, *how)
        self.players[player.job] = self._spawn(f"play-{player.job}", command, output=subprocess.PIPE)

    def ended(self, job: str) -> dict[str, object] | None:
        """What a recorded job said at its end (`allocscope play --json`); None: it still runs."""
        service = self.players[job]
        if service.last is None and service.process.poll() is not None:
            assert service.process.stdout is not None
            lines = service.process.stdout.read().splitlines()
            if not lines or service.process.returncode not in PLAYED:
                raise FleetError(f"job {job} ended with status {service.process.returncode}: {tail(service.log)}")
            service.last = json.loads(lines[-1])
        return service.last

    def check(self) -> None:
        """FleetError where a service has ended by itself."""
        for service in self.services:
            if service.process.poll() is not None:
                raise FleetError(
                    f"{service.log.stem} ended with status {service.process.returncode}: {tail(service.log)}"
                )

    def stop(self) -> None:
        """End all of them in order: jobs, then daemons, then the collector."""
        collector, daemons = self.services[:1], self.services[1:]
        for ending in (list(self.players.values()), daemons, collector):
            for service in ending:
                service.process.send_signal(signal.SIGTERM)
            deadline = time.monotonic() + STOP_WITHIN_S
            for service in ending:
                service.end_by(deadline)

    def _serve(self, name: str, command: str, *options: str) -> dict[str, str]:
        addresses = self.folder / f"{name}.json"
        addresses.unlink(missing_ok=True)
        service = self._spawn(name, (command, *options, "--addresses-file", str(addresses)))
        self.services.append(service)
        deadline = time.monotonic() + READY_WITHIN_S
        while not addresses.exists():
            self.check()
            if time.monotonic() > deadline:
                raise FleetError(f"{name} was not ready within {duration(READY_WITHIN_S)}: {tail(service.log)}")
            time.sleep(0.02)
        service.addresses = json.loads(addresses.read_text())
        return service.addresses

    def _spawn(self, name: str, command: Sequence[str], output: int | IO[str] | None = None) -> Service:
        log = self.folder / f"{name}.log"
        with log.open("w") as errors:
            process = subprocess.Popen(
                [sys.executable, "-m", "allocscope.cli", *command],
                stdin=subprocess.DEVNULL,
                stdout=errors if output is None else output,
                stderr=errors,
                env={k: v for k, v in os.environ.items() if not k.startswith("ALLOCSCOPE_")},
                preexec_fn=_die_with_parent,  # noqa: PLW1509 (this process has one thread)
                text=True,
            )
        return Service(process, log)


def _die_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def tail(log: Path) -> str:
    """The last that a process said, in one line."""
    lines = log.read_text(errors="replace").strip().splitlines()
    return " / ".join(lines[-3:]) or "(it said nothing)"
