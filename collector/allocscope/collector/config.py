"""What a collector is told: from flags, ALLOCSCOPE_… variables and a TOML file, read once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from allocscope.model.settings import host_port, setting

GRPC_PORT = 9465
HTTP_PORT = 9464


def _database(value: str) -> str | None:
    if value.startswith("sqlite:///") and len(value) > len("sqlite:///"):
        return None
    return "must be sqlite:///PATH, such as sqlite:////var/lib/allocscope/collector.db"


def _addresses(values: tuple[str, ...]) -> str | None:
    """A check: addresses that can be told of alerts."""
    if not values:
        return None
    from allocscope.alerts.notify_http import wrong_with  # brings an HTTP client, which takes a moment

    return next((wrong for value in values if (wrong := wrong_with(value))), None)


@dataclass(frozen=True, slots=True)
class CollectorSettings:
    """One collector process."""

    database: str | None = setting(None, check=_database)
    """Where everything is kept, as a URL: sqlite:///PATH. By default a file of its own, so that one machine needs no server:
    /var/lib/allocscope/collector.db, without root under $XDG_STATE_HOME (~/.local/state)."""

    grpc_listen: str = setting(f"127.0.0.1:{GRPC_PORT}", check=host_port)
    """HOST:PORT for daemons. Loopback by default: nothing is open to a network that nobody asked for; port 0: any free one."""

    http_listen: str = setting(f"127.0.0.1:{HTTP_PORT}", check=host_port)
    """HOST:PORT for the page, the API and /metrics."""

    alertmanager: tuple[str, ...] = setting((), check=_addresses)
    """Alertmanagers to tell of alerts, each at its base address; all of them are told, as Prometheus does it."""

    webhook: tuple[str, ...] = setting((), check=_addresses, secret=True)
    """Addresses that get each change of an alert as a POST of JSON."""

    page_address: str | None = setting(None, check=lambda value: _addresses((value,)))
    """Where people reach the page, for links in alerts; by default http:// and what it listens on."""

    addresses_file: Path | None = None
    """A file to write, once everything is ready: JSON with grpc, http (HOST:PORT as bound) and pid."""

    retire_after_s: float = setting(300.0, at_least=5, at_most=7 * 86400)
    """How long an allocator may be silent before its alerts resolve and its series go. Longer than a node's reconnecting."""

    queue_bytes: int = setting(32 << 20, at_least=1 << 16)
    """What may wait for the database, of all nodes together; beyond it the daemons wait, and keep the rest on their disks."""

    commit_batches: int = setting(64, at_least=1, at_most=4096)
    """At most so many batches in one transaction: more are cheaper a batch, and later acknowledged."""

    keep_days: float = setting(7.0, at_least=0.01, at_most=3650)
    """How long samples, block maps and bills are kept. Jobs, events, alerts and changes of forecasts stay."""

    drain_s: float = setting(5.0, at_least=0, at_most=60)
    """At the end, how long the database and the receivers of alerts are given; what was not stored, daemons send again."""

    log_format: str = setting("console", choices=("console", "json"))
    """How the log reads, on standard error."""

    log_level: str = setting("info", choices=("debug", "info", "warning", "error"))
    """What is logged: this and worse."""


def default_database(environ: Mapping[str, str], *, root: bool) -> str:
    """Where the database is, if nobody says otherwise."""
    if root:
        return "sqlite:////var/lib/allocscope/collector.db"
    state = environ.get("XDG_STATE_HOME") or str(Path(environ.get("HOME", "/tmp"), ".local", "state"))
    return f"sqlite:///{Path(state, 'allocscope', 'collector.db')}"
