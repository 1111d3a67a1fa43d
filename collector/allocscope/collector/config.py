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

    grpc_certificate: Path | None = None
    """PEM of the certificate, with its chain, that daemons see: with it they speak TLS. This and the files below may be exchanged while
    the collector runs."""

    grpc_key: Path | None = None
    """PEM of its private key, not encrypted."""

    grpc_client_ca: Path | None = None
    """PEM of the CA (or CAs) of the daemons' certificates: with it only daemons that have one may send, and only as nodes that it names
    (in its SAN or CN)."""

    grpc_tokens_file: Path | None = None
    """Tokens, one a line, of which a daemon must send one; names or patterns of nodes behind it: it may send only as these."""

    http_certificate: Path | None = None
    """PEM of the certificate, with its chain, of the page, the API and /metrics: with it they are https."""

    http_key: Path | None = None
    """PEM of its private key, not encrypted."""

    http_tokens_file: Path | None = None
    """Tokens, one a line, of which whoever asks must send one: `Authorization: Bearer TOKEN`, or in a browser as the password. /healthz and
    /readyz stay open."""

    alertmanager: tuple[str, ...] = setting((), check=_addresses)
    """Alertmanagers to tell of alerts, each at its base address; all of them are told, as Prometheus does it."""

    webhook: tuple[str, ...] = setting((), check=_addresses, secret=True)
    """Addresses that get each change of an alert as a POST of JSON."""

    runbook_address: str | None = setting(None, check=lambda value: _addresses((value,)))
    """Where people read the repository's files, such as https://git.example/allocscope/blob/main: put before a runbook page's path
    (docs/runbook/NAME.md), which is all that alerts link to by default."""

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

    capture_largest_bytes: int = setting(1 << 30, at_least=1 << 20)
    """The largest snapshot that is kept, before compression: what `allocscope inspect` reads. Larger ones are refused for good."""

    captures_limit_bytes: int = setting(4 << 30, at_least=1 << 20)
    """What all snapshots together may take in the database, compressed; beyond it the oldest are dropped."""

    captures_keep_days: float = setting(30.0, at_least=0.01, at_most=3650)
    """How long snapshots are kept. That there was one is remembered."""

    capture_at_risk: bool = True
    """Whether a capture with history is taken of an allocator whose forecast turns at_risk: at most one in 15 minutes, few at a time."""

    advice: bool = True
    """Whether captures that have a history are replayed under other settings, to tell what would help: in a process of its own, one at
    a time, at low priority."""

    advice_time_limit_s: float = setting(120.0, at_least=1, at_most=3600)
    """How long one replay may take; it tells what it found by then."""

    advice_memory_bytes: int = setting(2 << 30, at_least=1 << 28)
    """How much memory (address space) one replay may take; one that needs more says so, and ends."""

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
