"""Who uses the node's devices, with and without a probe: as the daemon tells it, else as NVML does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from allocscope.cli.doctor_findings import Finding, State
from allocscope.daemon.nvml import NvmlRound
from allocscope.model.figures import size

ABOUT = "jobs"
MOST_TOLD = 20
_HAVE_ONE = "start it by `allocscope run`, or with `probe.start()`; its bytes are other_processes until then"


def job_findings(status: Mapping[str, Any]) -> Iterator[Finding]:
    """By the daemon's /status."""
    jobs = Counter(process["job"] for process in status["jobs"])
    for job, processes in sorted(jobs.items())[:MOST_TOLD]:
        text = f"{job}: {processes} {'process reports' if processes == 1 else 'processes report'}"
        yield Finding(ABOUT, State.WELL, text, facts={"job": job, "processes": processes})
    without = [
        (process, device) for device in status["devices"] for process in device["processes"] if process["job"] is None
    ]
    yield from _without(sorted(without, key=lambda it: -(it[0]["used_bytes"] or 0)))
    if not jobs and not without:
        yield Finding(ABOUT, State.WELL, "nobody uses a device")


def _without(found: list[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> Iterator[Finding]:
    for process, device in found[:MOST_TOLD]:
        who = f"pid {process['pid']}" + (f" ({process['name']}{_of(process['owner'])})" if process["name"] else "")
        used = (
            f"holds {size(process['used_bytes'])}"
            if process["used_bytes"] is not None
            else "holds, it is not told how much,"
        )
        facts = {
            "gpu": device["gpu"],
            "uuid": device["uuid"],
            **{key: process[key] for key in ("pid", "name", "used_bytes", "owner")},
        }
        text = f"{who} {used} of GPU {device['gpu']} ({device['uuid']}) and has no probe"
        if process["name"]:
            yield Finding(ABOUT, State.NOTE, text, _HAVE_ONE, facts)
            continue
        yield Finding(
            ABOUT,
            State.NOTE,
            f"{text}; the daemon sees no such process",
            "if it has ended, its memory is orphaned until the device is reset; else let the daemon see the node's processes"
            " (hostPID, or --proc)",
            facts,
        )
    if len(found) > MOST_TOLD:
        yield Finding(ABOUT, State.NOTE, f"and {len(found) - MOST_TOLD} more without a probe", _HAVE_ONE)


def _of(owner: Mapping[str, Any] | None) -> str:
    """Whose, as far as it is known, in the words that lead furthest."""
    told = owner or {}
    whose = [
        f"{word} {told[key]}"
        for key, word in (("user", "of"), ("pod", "in pod"), ("slurm_job", "of Slurm job"))
        if told.get(key)
    ]
    return ", " + " ".join(whose) if whose else ""


def findings_without_daemon(latest: NvmlRound) -> Iterable[Finding]:
    """Which of them have a probe only a daemon knows."""
    users = [(process, device) for device in latest.devices for process in device.processes or ()]
    if not users:
        return []
    told = ", ".join(
        f"pid {process.pid} {size(process.used_bytes, '?')} of GPU {device.index}"
        for process, device in users[:MOST_TOLD]
    )
    how_many = f"{len(users)} processes use devices" if len(users) > 1 else "1 process uses a device"
    return [
        Finding(
            ABOUT,
            State.NOTE,
            f"{how_many} ({told}); which of them have a probe is not known",
            "only a daemon that runs knows",
        )
    ]
