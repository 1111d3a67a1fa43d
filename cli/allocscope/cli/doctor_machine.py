"""The machine: its clock, which of its processes are to be seen, and who runs jobs on it."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from allocscope.cli.doctor_findings import Finding, State
from allocscope.daemon.config import DaemonSettings
from allocscope.daemon.kubelet import Kubelet, KubeletError
from allocscope.daemon.procfs import Procfs

FIRST_PID_NAMESPACE = 0xEFFFFFFC
"""The inode of the machine's own (PROC_PID_INIT_INO, linux/proc_ns.h)."""
TIME_ERROR = 5
"""adjtimex(2): the clock is not synchronised."""
TIMEX_BYTES = 208
"""sizeof(struct timex) on 64-bit Linux."""
SLURM_CGROUPS = ("system.slice/slurmstepd.scope", "memory/slurm", "cpuset/slurm", "devices/slurm", "freezer/slurm")


@dataclass(frozen=True, slots=True)
class MachineSight:
    """What was seen."""

    clock_is_set: bool | None
    """By something like NTP; None: it cannot be told."""
    own_pid_namespace: bool | None
    """Whether this process sees the machine's own pids; None: it cannot be told."""
    hides_processes: bool
    proc: Path
    has_slurm: bool


def look_at_machine(settings: DaemonSettings) -> MachineSight:
    """By the kernel."""
    return MachineSight(
        _clock_is_set(),
        _is_in_first_pid_namespace(),
        Procfs(settings.proc).hides_processes,
        settings.proc,
        any(Path("/sys/fs/cgroup", name).exists() for name in SLURM_CGROUPS),
    )


def machine_findings(seen: MachineSight) -> Iterator[Finding]:
    """What is to be known of it."""
    if seen.clock_is_set is False:
        text = "nothing keeps this machine's clock right, as far as its kernel knows"
        yield Finding("clock", State.NOTE, text, "chrony or systemd-timesyncd does; with clocks apart, graphs disagree")
    elif seen.clock_is_set:
        yield Finding("clock", State.WELL, "kept right (adjtimex)")
    if seen.hides_processes:
        text = f"other users' processes are hidden in {seen.proc}, so that nobody can tell whose they are"
        remedy = "run the daemon as root or in the group that the mount option gid= names, or mount without hidepid"
        yield Finding("processes", State.WRONG, text, remedy)
    elif seen.own_pid_namespace is False and seen.proc == Path("/proc"):
        text = "this is not the machine's own pid namespace: NVML's pids are not those in /proc"
        remedy = "run the daemon with hostPID: true, or mount the node's /proc and name it by --proc"
        yield Finding("processes", State.NOTE, text, remedy)
    else:
        yield Finding("processes", State.WELL, f"all of this machine's are to be seen in {seen.proc}")
    if seen.has_slurm:
        yield Finding("owners", State.WELL, "Slurm's cgroups are here: processes are told with job and step")


def look_at_kubelet(settings: DaemonSettings, within_s: float) -> str | None:
    """What it says, in words; None: there is none. KubeletError."""
    kubelet = Kubelet(settings.kubelet_socket, settings.pod_logs, within_s=within_s)
    if not kubelet.is_there:
        return None
    kubelet.holders()
    return f"the kubelet tells which pod has which device, at {settings.kubelet_socket}"


def kubelet_findings(seen: object) -> Iterator[Finding]:
    """Whether pods can be named, where there are any."""
    if isinstance(seen, KubeletError):
        remedy = "mount /var/lib/kubelet/pod-resources into the daemon's container, and let its user open the socket"
        yield Finding("owners", State.NOTE, str(seen), remedy)
    elif isinstance(seen, str):
        yield Finding("owners", State.WELL, seen)


def _clock_is_set() -> bool | None:
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        state = libc.adjtimex(ctypes.create_string_buffer(TIMEX_BYTES * 2))  # modes 0: it only reads
    except AttributeError:
        return None
    return None if state < 0 else state != TIME_ERROR


def _is_in_first_pid_namespace() -> bool | None:
    try:
        return os.stat("/proc/self/ns/pid").st_ino == FIRST_PID_NAMESPACE  # noqa: PTH116 (follows what is no path)
    except OSError:
        return None
