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
        None,
        check=lambda value: (
            None if 0 < len(value) <= 253 and value.isprintable() else "must have 1 to 253 printable letters"
        ),
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

    collector_tls: bool = False
    """Whether to speak TLS to a collector whose certificate is of a CA that this machine trusts; collector_ca switches it on, too."""

    collector_ca: Path | None = None
    """PEM of the CA (or CAs) of the collector's certificate. This and the files below are read anew for each connection, so that they may
    be exchanged while the daemon runs."""

    collector_certificate: Path | None = None
    """PEM of this daemon's certificate with its chain, where the collector asks for one; it must name the node."""

    collector_key: Path | None = None
    """PEM of its private key, not encrypted."""

    collector_token_file: Path | None = None
    """A file with one token, sent to the collector over TLS, where it asks for one."""

    collector_server_name: str | None = setting(
        None, check=lambda value: None if value else "must be a name, not empty"
    )
    """The name that the collector's certificate must have, where it is not the address's HOST."""

    spool: Path | None = None
    """The folder of what the collector has not acknowledged; by default /var/lib/allocscope/spool, without root under
    $XDG_STATE_HOME (~/.local/state)."""

    spool_limit_bytes: int = setting(1 << 30, at_least=1 << 20)
    """At which size the oldest block maps are dropped, and once there are none, the oldest batches. A GiB holds some days of a
    node with 16 jobs."""

    spool_limit_age_s: float = setting(7 * 86400.0, at_least=3600)
    """A batch that the collector has not taken for so long is dropped."""

    backlog_bytes_per_s: int = setting(256 << 10, at_least=1 << 10)
    """How fast batches that waited go to the collector at most, once it is back; new ones go first. A node with 16 jobs makes some
    KB a second, so that an hour's outage is made up for in about a minute; a collector with a whole fleet may take longer."""

    captures_limit_bytes: int = setting(2 << 30, at_least=1 << 20)
    """At which size the oldest captures, compressed, that the collector has not taken are dropped; they lie in the spool's folder. What
    jobs leave beside the socket may have four times as much, until it is compressed."""

    capture_largest_bytes: int = setting(1 << 30, at_least=1 << 16)
    """The largest snapshot that is taken, as PyTorch writes it; of a larger one, only what is known without it."""

    capture_bytes_per_s: int = setting(16 << 20, at_least=1 << 16)
    """How fast captures go to the collector at most, compressed, so that they are in nobody's way."""

    metrics_listen: str = setting(f"127.0.0.1:{METRICS_PORT}", check=host_port)
    """HOST:PORT of /metrics. Loopback by default: nothing is open to a network that nobody asked for; port 0: any free one."""

    metrics_address: str | None = setting(None, check=host_port)
    """HOST:PORT at which Prometheus finds /metrics, told to the collector for its service discovery; by default what it
    listens on, with the host's name where that is every interface."""

    addresses_file: Path | None = None
    """A file to write, once everything is ready: JSON with metrics (HOST:PORT as bound), socket and pid."""

    interval_s: float = setting(2.0, at_least=0.05, at_most=10)
    """Between two batches: bills are made, the batch is written to disk and goes to the collector. What happened in a job (an OOM, its
    end) does not wait for it. About half of a daemon's cost goes by it."""

    nvml: bool = True
    """Whether to read NVML; without, the daemon knows what the jobs know of their devices."""

    nvml_interval_s: float = setting(2.0, at_least=0.1, at_most=300)
    """Between two readings of each device by NVML; bills are made no oftener by default (`interval_s`)."""

    nvml_timeout_s: float = setting(5.0, at_least=0.1, at_most=300)
    """How long a device may take before its figures count as not known; a driver in trouble answers after minutes, or never."""

    proc: Path = Path("/proc")
    """Where the processes of the node are to be seen. In a container that has a pid namespace of its own /proc shows only its own;
    mount the node's somewhere else and name that."""

    kubelet_socket: Path = Path("/var/lib/kubelet/pod-resources/kubelet.sock")
    """Where the kubelet tells which pod was given which device (PodResources), to put names to the pods of processes; where there is
    none, nobody is asked."""

    pod_logs: Path = Path("/var/log/pods")
    """The kubelet's folder of logs: the names of its folders, and no more is read, say the name of a pod whose UID is known."""

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
