"""The daemon, by its jobs' socket and by its HTTP address: whether it runs, and does its work."""

from __future__ import annotations

import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from allocscope.cli.doctor_findings import Finding, State
from allocscope.cli.doctor_socket import NOBODY, SocketSight, look_at_socket, socket_finding
from allocscope.daemon.config import DaemonSettings
from allocscope.model import metrics
from allocscope.model.figures import duration

ABOUT = "daemon"
STANDS_STILL_AFTER_S = 60.0
"""Rounds and writes come each second; one that failed for so long does not only wait."""
WATCHED_LOOPS = ("bill", "spool_write")
LARGEST_ANSWER_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class HttpSight:
    """What is at the address of /metrics."""

    address: str
    problem: str | None = None
    hangs: bool = False
    status: Mapping[str, Any] | None = None
    """None: it tells none, as one that is no daemon, or not of this machine."""
    figures: Mapping[str, float] | None = None
    """By name and labels, as they stand in the text."""


@dataclass(frozen=True, slots=True)
class DaemonSight:
    """Both."""

    socket: SocketSight
    http: HttpSight | None
    """None: its address is not known."""
    now_s: float
    """Unix time."""


def look_at_daemon(settings: DaemonSettings, path: Path, within_s: float) -> DaemonSight:
    """Asks it; each question has half the time."""
    address = _http_address(settings)
    sight = look_at_socket(path, within_s / 4)
    return DaemonSight(sight, _ask(address, within_s / 4) if address else None, time.time())


def daemon_findings(seen: DaemonSight) -> Iterator[Finding]:
    """Whether it runs, who may report to it, and whether it does its work."""
    yield socket_finding(seen.socket)
    if seen.socket.problem in NOBODY and (seen.http is None or seen.http.problem):
        return
    if seen.http is None:
        yield Finding(
            ABOUT,
            State.NOTE,
            "the address of its /metrics is not known, as any free port was asked for",
            "give it --addresses-file, or --metrics-listen with a port",
        )
        return
    yield _of_http(seen.http)
    if seen.http.status and seen.http.status.get("socket") != os.fspath(seen.socket.path):
        yield Finding(
            ABOUT,
            State.WRONG,
            f"the daemon at {seen.http.address} has the socket {seen.http.status.get('socket')}, and not {seen.socket.path}",
            "ask with the daemon's own settings: --config, or --socket and --metrics-listen",
        )
    if seen.http.figures:
        yield from _of_loops(seen.http.figures, seen.now_s)
        yield from _of_losses(seen.http.figures)


def _of_http(seen: HttpSight) -> Finding:
    facts = {"metrics": seen.address}
    if seen.hangs:
        return Finding(
            ABOUT,
            State.WRONG,
            f"no answer at http://{seen.address}: it hangs, or is stopped",
            "its log tells its last words; restart it: jobs wait, and lose nothing",
            facts,
        )
    if seen.problem:
        remedy = "if it listens elsewhere, ask with its own --config or --metrics-listen"
        return Finding(ABOUT, State.WRONG, f"no /metrics at http://{seen.address}: {seen.problem}", remedy, facts)
    if seen.status is None:
        return Finding(
            ABOUT,
            State.NOTE,
            f"/metrics at http://{seen.address} answers, and does not say who is on which device",
            "is it this version's daemon, and on this machine?",
            facts,
        )
    text = f"node {seen.status['node']}, version {seen.status['version']}, /metrics at http://{seen.address}"
    return Finding(ABOUT, State.WELL, text, facts=facts)


def _of_loops(figures: Mapping[str, float], now_s: float) -> Iterator[Finding]:
    for loop in WATCHED_LOOPS:
        last_s = figures.get(f"allocscope_{loop}_last_success_timestamp_seconds")
        failures = figures.get(f"allocscope_{loop}_failures_total", 0)
        if last_s is None and not failures:
            continue  # it has just begun
        silent_s = None if last_s is None else now_s - last_s
        if silent_s is None or silent_s > STANDS_STILL_AFTER_S:
            since = "since it began" if silent_s is None else f"for {duration(silent_s)}"
            text = (
                f"{metrics.BY_NAME[f'allocscope_{loop}_seconds'].help.removeprefix('How long ').removesuffix(' took.')}"
            )
            yield Finding(ABOUT, State.WRONG, f"{text}: has not gone well {since}", "its log says why", {"loop": loop})


def _of_losses(figures: Mapping[str, float]) -> Iterator[Finding]:
    lost = {
        name: int(value) for name, value in figures.items() if name.startswith(metrics.DROPPED_TOTAL.name) and value
    }
    if lost:
        told = ", ".join(
            f"{value} {name.removeprefix(metrics.DROPPED_TOTAL.name).strip()}" for name, value in sorted(lost.items())
        )
        yield Finding(
            ABOUT,
            State.NOTE,
            f"it lost data since it began: {told}",
            "docs/node.md says what each reason means",
            {"lost": lost},
        )


# looking


def _http_address(settings: DaemonSettings) -> str | None:
    """Where it listens: as it wrote, or as it is told. An address for every interface is asked on this machine."""
    address = settings.metrics_listen
    if settings.addresses_file is not None:
        with suppress(OSError, ValueError, KeyError, TypeError):
            address = str(json.loads(settings.addresses_file.read_text())["metrics"])
    host, _, port = address.rpartition(":")
    local = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}.get(host, host)
    return None if port == "0" else f"{local}:{port}"


def _ask(address: str, within_s: float) -> HttpSight:
    try:
        text = _get(f"http://{address}/metrics", within_s).decode("utf-8", "replace")
    except urllib.error.HTTPError as error:
        return HttpSight(address, f"it answers {error.code}")
    except TimeoutError:
        return HttpSight(address, hangs=True)
    except urllib.error.URLError as error:
        return HttpSight(address, str(error.reason), hangs=isinstance(error.reason, TimeoutError))
    except (OSError, ValueError) as error:
        return HttpSight(address, str(error))
    return HttpSight(address, status=_status(address, within_s), figures=_figures(text))


def _status(address: str, within_s: float) -> Mapping[str, Any] | None:
    try:
        told = json.loads(_get(f"http://{address}/status", within_s))
    except (OSError, ValueError):
        return None
    return told if isinstance(told, dict) and {"node", "version", "devices", "jobs"} <= told.keys() else None


def _get(url: str, within_s: float) -> bytes:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(url, timeout=within_s) as response:
        body: bytes = response.read(LARGEST_ANSWER_BYTES)
    return body


def _figures(text: str) -> dict[str, float]:
    try:
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    except ValueError:
        return {}
    return {" ".join([it.name, *map(str, it.labels.values())]): it.value for it in samples}
