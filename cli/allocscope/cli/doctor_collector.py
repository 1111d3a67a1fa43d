"""The collector: whether it answers, and whether this node's clock goes as its does."""

from __future__ import annotations

import os
import socket
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from time import time

import grpc

from allocscope.cli.doctor_findings import Finding, State
from allocscope.collector.config import HTTP_PORT
from allocscope.daemon.collector_trouble import trouble
from allocscope.daemon.collector_way import CollectorWay
from allocscope.daemon.config import DaemonSettings
from allocscope.daemon.errors import CredentialsError
from allocscope.daemon.uplink import CHANNEL_OPTIONS
from allocscope.model.figures import duration

ABOUT = "collector"
LARGEST_SKEW_S = 5.0
"""A Date header counts whole seconds, and the answer takes its time; graphs bear some seconds."""


@dataclass(frozen=True, slots=True)
class CollectorSight:
    """What was seen."""

    address: str
    problem: str | None
    """Why nothing gets there; None: it answers."""
    url: str
    skew_s: float | None = None
    """How far this clock is ahead of the collector's; None: its HTTP was not to be had."""
    warnings: tuple[str, ...] = ()
    """Of the files for TLS."""


def look_at_collector(settings: DaemonSettings, within_s: float) -> CollectorSight:
    """Connects as the daemon does, and asks for the time at $ALLOCSCOPE_URL, or at the port that is usual there."""
    host = settings.collector.rpartition(":")[0]
    url = os.environ.get("ALLOCSCOPE_URL") or f"{host}:{HTTP_PORT}"
    url = url if "://" in url else f"http://{url}"
    try:
        way = CollectorWay.of(settings)
    except CredentialsError as error:
        return CollectorSight(settings.collector, str(error), url)
    skew_s = _skew_s(url, within_s / 4)
    return CollectorSight(settings.collector, _why_not(way, within_s / 2), url, skew_s, way.warnings())


def collector_findings(seen: CollectorSight, connected: bool | None) -> Iterator[Finding]:
    """`connected`: whether the daemon says that it is; None: it says nothing."""
    facts = {"collector": seen.address, "connected": connected}
    if connected:
        yield Finding(ABOUT, State.WELL, f"the daemon is connected to {seen.address}", facts=facts)
    elif seen.problem is None and connected is None:
        yield Finding(ABOUT, State.WELL, f"{seen.address} answers", facts=facts)
    elif seen.problem is None:
        text = f"{seen.address} answers, but the daemon is not connected to it"
        yield Finding(ABOUT, State.WRONG, text, "the daemon's log says how the collector refused it", facts)
    else:
        text = f"nothing gets to {seen.address}: {seen.problem}; what jobs say waits in the spool, and is kept until that is full"
        remedy = "start the collector, open its gRPC port to this node, or name it by --collector"
        yield Finding(ABOUT, State.WRONG, text, remedy, facts)
    for warning in seen.warnings:
        yield Finding(ABOUT, State.NOTE, warning, "chmod go-rwx, for the daemon's user alone")
    yield from _of_clock(seen)


def _of_clock(seen: CollectorSight) -> Iterator[Finding]:
    if seen.skew_s is None:
        return
    facts = {"skew_s": seen.skew_s, "url": seen.url}
    if abs(seen.skew_s) <= LARGEST_SKEW_S:
        text = f"this clock goes as the collector's, by {seen.url}, to {duration(LARGEST_SKEW_S)}"
        yield Finding("clock", State.WELL, text, facts=facts)
        return
    side = "ahead of" if seen.skew_s > 0 else "behind"
    text = f"this clock is {duration(abs(seen.skew_s))} {side} the collector's, by {seen.url}"
    yield Finding("clock", State.WRONG, text, "set both by NTP (chrony, systemd-timesyncd)", facts)


def _why_not(way: CollectorWay, within_s: float) -> str | None:
    """What keeps a call from getting there, in the words of whoever knows best; None: nothing does."""
    host, _, port = way.address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), within_s / 3).close()
    except OSError as error:
        return error.strerror or str(error)
    with way.open_blocking(CHANNEL_OPTIONS) as channel:
        try:
            grpc.channel_ready_future(channel).result(timeout=within_s / 3)
        except grpc.FutureTimeoutError:
            return trouble(way, within_s / 3) or "who listens there does not speak gRPC, or hangs"
    return None


def _skew_s(url: str, within_s: float) -> float | None:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"{url.rstrip('/')}/healthz", timeout=within_s) as response:
            told = parsedate_to_datetime(response.headers["Date"]).timestamp()
    except (OSError, ValueError, TypeError):
        return None
    return time() - told - 0.5  # the header leaves out the second's fraction
