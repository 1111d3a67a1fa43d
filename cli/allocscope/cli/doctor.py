"""`allocscope doctor`: what of the daemon's work on this node can be done, what cannot, and what to do about it.

It reads the daemon's own settings, changes nothing, and works also where the daemon is dead, hangs or is another user's. Exit status: 0 all
works, 1 something does not, 2 a wrong call.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from allocscope.cli import doctor_collector, doctor_daemon, doctor_jobs, doctor_machine, doctor_nvml, doctor_rights
from allocscope.cli.doctor_findings import Finding, State, as_json, as_text, is_well, judged, look_at_once
from allocscope.cli.doctor_places import folder_findings, look_at_folder
from allocscope.cli.prose import fold, prose_width
from allocscope.cli.settings import UnusableError, settings_given, settings_parser
from allocscope.daemon.config import DaemonSettings, default_socket, default_spool
from allocscope.model.captures import FOLDER

HELP = "what works on this node, what does not, and what to do about it"
WITHIN_S = 15.0
"""A driver that keeps its state nowhere (no persistence mode) takes some seconds to begin."""
SYSTEM_SOCKET = Path("/run/allocscope/daemon.sock")


def main(arguments: list[str]) -> int:
    """Look, and tell."""
    parser = settings_parser(DaemonSettings, "doctor", f"{HELP}; takes what the daemon takes, and looks at that one")
    parser.add_argument("--json", action="store_true", help="as one JSON object: well, and findings")
    parser.add_argument(
        "--within-s",
        type=_seconds,
        default=WITHIN_S,
        metavar="SECONDS",
        help=f"for all looks, which are at once; what has not answered by then hangs (default: {WITHIN_S:g})",
    )
    given = vars(parser.parse_args(arguments))
    as_object, within_s = given.pop("json"), given.pop("within_s")
    try:
        settings = settings_given(DaemonSettings, given, command="doctor")
    except UnusableError as error:
        print(f"allocscope doctor: {error}", file=sys.stderr)
        return 2
    findings = examine(settings, within_s)
    print(json.dumps(as_json(findings)) if as_object else fold(as_text(findings), prose_width()))
    return 0 if is_well(findings) else 1


def examine(settings: DaemonSettings, within_s: float) -> list[Finding]:
    """All that there is to say of a node with these settings."""
    root = os.geteuid() == 0
    socket = settings.socket or _find_socket(default_socket(os.environ, root=root))
    spool = settings.spool or default_spool(os.environ, root=root or socket == SYSTEM_SOCKET)
    looks: dict[str, Callable[[], object]] = {
        "daemon": partial(doctor_daemon.look_at_daemon, settings, socket, within_s),
        "collector": partial(doctor_collector.look_at_collector, settings, within_s),
        "spool": partial(look_at_folder, spool),
        "captures": partial(look_at_folder, socket.parent / FOLDER),
        "machine": partial(doctor_machine.look_at_machine, settings),
        "rights": partial(doctor_rights.look_at_rights, settings, socket, within_s / 2),
        "owners": partial(doctor_machine.look_at_kubelet, settings, within_s / 2),
    }
    if settings.nvml:
        looks["nvml"] = partial(doctor_nvml.look_at_nvml, within_s * 0.75)
    return list(_judged(settings, look_at_once(looks, within_s)))


def _judged(settings: DaemonSettings, seen: dict[str, object]) -> Iterator[Finding]:
    daemon = seen["daemon"]
    status = daemon.http.status if isinstance(daemon, doctor_daemon.DaemonSight) and daemon.http else None
    nvml = seen.get("nvml")
    if nvml is None:
        yield Finding("nvml", State.NOTE, "NVML is switched off by the settings (nvml = false)")
    elif isinstance(nvml, doctor_nvml.NvmlSight) and doctor_nvml.is_switched_off(status):
        yield from judged("nvml", nvml, doctor_nvml.switched_off_findings)
    else:
        yield from judged("nvml", nvml, doctor_nvml.nvml_findings)
    yield from judged("daemon", daemon, doctor_daemon.daemon_findings)
    if status is not None:
        sight = nvml if isinstance(nvml, doctor_nvml.NvmlSight) else None
        yield from judged("nvml", status, partial(doctor_nvml.daemon_nvml_findings, seen=sight))
        yield from judged("jobs", status, doctor_jobs.job_findings)
    elif isinstance(nvml, doctor_nvml.NvmlSight):
        yield from doctor_jobs.findings_without_daemon(nvml.round)
    connected = status.get("connected") if status else None
    yield from judged("collector", seen["collector"], partial(doctor_collector.collector_findings, connected=connected))
    for about, limit_bytes in (("spool", settings.spool_limit_bytes), ("captures", settings.captures_limit_bytes)):
        judge = partial(folder_findings, about, limit_bytes=limit_bytes, daemon_runs=status is not None)
        yield from judged(about, seen[about], judge)
    yield from judged("machine", seen["machine"], doctor_machine.machine_findings)
    yield from judged("rights", seen["rights"], doctor_rights.rights_findings)
    owners = seen["owners"]
    yield from doctor_machine.kubelet_findings(owners)


def _seconds(told: str) -> float:
    try:
        if 0.1 <= (seconds := float(told)) <= 600:
            return seconds
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{told!r} is not a number of seconds from 0.1 to 600")


def _find_socket(own: Path) -> Path:
    """The one that a job of this user would find: the machine's, or his own."""
    return SYSTEM_SOCKET if os.path.exists(SYSTEM_SOCKET) else own  # noqa: PTH110 (Path.exists raises where it may not look)
