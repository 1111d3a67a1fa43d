"""What the daemon may not, by the rights of its process, and who could come between it and its jobs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from allocscope.cli.doctor_findings import Finding, State
from allocscope.cli.doctor_socket import look_at_socket
from allocscope.daemon.config import DaemonSettings
from allocscope.daemon.procfs import Procfs
from allocscope.daemon.rights import folder_risk, what_is_lost


@dataclass(frozen=True, slots=True)
class RightsSight:
    """What was seen."""

    lost: tuple[str, ...]
    risk: str | None


def look_at_rights(settings: DaemonSettings, socket: Path, within_s: float) -> RightsSight:
    """Of the process that listens there; where there is none to be seen, of this one."""
    pid = look_at_socket(socket, within_s).pid
    try:
        uid = Path(f"/proc/{pid}").stat().st_uid if pid else os.geteuid()
    except OSError:
        uid = os.geteuid()
    return RightsSight(
        what_is_lost(Procfs(settings.proc), settings.kubelet_socket, pid or "self"), folder_risk(socket, uid)
    )


def rights_findings(seen: RightsSight) -> Iterator[Finding]:
    """Nothing where all is allowed."""
    for text in seen.lost:
        yield Finding(
            "rights",
            State.NOTE,
            text,
            "run the daemon as root; for environments AmbientCapabilities=CAP_SYS_PTRACE will do",
        )
    if seen.risk:
        yield Finding("rights", State.WRONG, seen.risk, "give the daemon a folder of its own (--socket), mode 0755")
