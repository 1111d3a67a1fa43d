"""What the daemon sees of its node, as JSON at /status beside /metrics: who is on which device, and who of them has a probe.

`allocscope doctor` asks for it. It names processes and users, so it is told to this machine alone.
"""

from __future__ import annotations

import ipaddress
import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

from allocscope.daemon.exposition import NodeView
from allocscope.model.identity import Process
from allocscope.model.node import DeviceProcess, DeviceReading

PATH = "/status"

Json = Mapping[str, Any]


def status(view: NodeView, *, node: str, version: str, socket: Path) -> Json:
    """Bytes as numbers; what is not known is null."""
    known = {process.process_id: process for process in view.processes}
    problem = view.nvml.problem
    return {
        "node": node,
        "version": version,
        "pid": os.getpid(),
        "socket": os.fspath(socket),
        "connected": view.connected,
        "nvml": None if problem is None else {"kind": problem.kind.value, "problem": problem.text},
        "devices": [_device(reading, known) for reading in view.readings],
        "jobs": [{"job": p.job, "rank": p.rank, "program": p.program, "pid": p.pid} for p in view.processes],
    }


def _device(reading: DeviceReading, known: Mapping[str, Process]) -> Json:
    device = reading.device
    return {
        "gpu": device.index,
        "uuid": device.uuid,
        "parent_uuid": device.parent_uuid,
        "model": device.model,
        "total_bytes": device.total_bytes,
        "free_bytes": reading.free_bytes,
        "problem_kind": reading.problem_kind,
        "problem": reading.problem,
        "processes": [_process(process, known.get(process.process_id or "")) for process in reading.processes],
    }


def _process(process: DeviceProcess, probed: Process | None) -> Json:
    return {
        "pid": process.pid,
        "name": process.name,
        "used_bytes": process.used_bytes,
        "job": probed.job if probed else None,
        "rank": probed.rank if probed else None,
        "owner": None if process.owner is None else asdict(process.owner),
    }


def with_status(told: Callable[[], Json], otherwise: WSGIApplication) -> WSGIApplication:
    """The application that answers /status with this, and leaves all else to another."""

    def answer(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        if environ.get("PATH_INFO") != PATH:
            return otherwise(environ, start_response)
        if not _is_local(environ.get("REMOTE_ADDR", "")):
            start_response("403 Forbidden", [("Content-Type", "text/plain")])
            return [b"told to this machine alone\n"]
        start_response("200 OK", [("Content-Type", "application/json")])
        return [json.dumps(told()).encode()]

    return answer


def _is_local(address: str) -> bool:
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return False
    mapped = getattr(found, "ipv4_mapped", None)
    return (mapped or found).is_loopback
