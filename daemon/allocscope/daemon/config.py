"""What a daemon is told: from flags, ALLOCSCOPE_… variables and a TOML file, read once."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from allocscope.model.settings import host_port, setting

METRICS_PORT = 9466


def _mode(value: str) -> str | None:
    """A check: permission bits as chmod has them."""
    if 3 <= len(value) <= 4 and set(value) <= set("01234567") and int(value, 8) <= 0o777:
        return None
    return "must be octal, from 0000 to 0777, such as 0660"


@dataclass(frozen=True, slots=True)
class DaemonSettings:
    """One daemon process."""

    node: str | None = setting(
        None, check=lambda value: None if 0 < len(value) <= 253 else "must have 1 to 253 letters"
    )
    """The node's name, unique in the fleet; by default the host's name."""

    socket: Path | None = None
    """Where jobs connect; by default /run/allocscope/daemon.sock, without root $XDG_RUNTIME_DIR/allocscope/daemon.sock."""

    socket_group: str | None = setting(None, check=lambda value: None if value else "must be a group's name or number")
    """The socket's group, by name or number, whose members' jobs may report; by default the daemon's own."""

    socket_mode: str = setting("0660", check=_mode)
    """Who may report, octal as for chmod: who may write to the socket. 0666 lets every user of the node."""

    collector: str = setting("127.0.0.1:9465", check=host_port)
    """HOST:PORT of the collector's gRPC. While it is away everything waits in the spool."""

    spool: Path | None = None
    """The folder of what the collector has not acknowledged; by default /var/lib/allocscope/spool, without root under
    $XDG_STATE_HOME (~/.local/state)."""

    spool_limit_bytes: int = setting(1 << 30, at_least=1 << 20)
    """At which size the oldest batches are dropped. A GiB holds about a week of a node with 16 jobs."""

    metrics_listen: str = setting(f"127.0.0.1:{METRICS_PORT}", check=host_port)
    """HOST:PORT of /metrics. Loopback by default: nothing is open to a network that nobody asked for; port 0: any free one."""

    metrics_address: str | None = setting(None, check=host_port)
    """HOST:PORT at which Prometheus finds /metrics, told to the collector for its service discovery; by default what it
    listens on, with the host's name where that is every interface."""

    addresses_file: Path | None = None
    """A file to write, once everything is ready: JSON with metrics (HOST:PORT as bound), socket and pid."""

    interval_s: float = setting(1.0, at_least=0.05, at_most=10)
    """Between two batches: bills are made, the batch is written to disk, and the jobs' data in it acknowledged. A crash loses
    at most this much of what a job keeps no longer."""

    nvml: bool = True
    """Whether to read NVML; without, the daemon knows what the jobs know of their devices."""

    nvml_interval_s: float = setting(1.0, at_least=0.1, at_most=300)
    """Between two rounds of NVML readings; a round of eight devices takes some milliseconds."""

    nvml_timeout_s: float = setting(5.0, at_least=0.1, at_most=300)
    """How long a round may take before its figures count as not known; a driver in trouble answers after minutes, or never."""

    gone_after_s: float = setting(30.0, at_least=1, at_most=3600)
    """How long a job's process without a stream is kept in the bill; longer than a probe's pause between two attempts (5 s)."""

    silent_after_s: float = setting(300.0, at_least=5, at_most=86400)
    """How long a process with a stream may say nothing before its lines go from the bill; its program may be stopped."""

    drain_s: float = setting(2.0, at_least=0, at_most=60)
    """At the end, how long the collector is given to acknowledge; what it does not is in the spool for the next start."""

    log_format: str = setting("console", choices=("console", "json"))
    """How the log reads, on standard error."""

    log_level: str = setting("info", choices=("debug", "info", "warning", "error"))
    """What is logged: this and worse."""


def default_socket(environ: Mapping[str, str], *, root: bool) -> Path:
    """Where jobs look for the daemon, if nobody says otherwise."""
    runtime = environ.get("XDG_RUNTIME_DIR")
    return Path(runtime if runtime and not root else "/run", "allocscope", "daemon.sock")


def default_spool(environ: Mapping[str, str], *, root: bool) -> Path:
    """Where the spool is, if nobody says otherwise."""
    if root:
        return Path("/var/lib/allocscope/spool")
    state = environ.get("XDG_STATE_HOME") or os.path.join(environ.get("HOME", "/tmp"), ".local", "state")  # noqa: PTH118
    return Path(state, "allocscope", "spool")
