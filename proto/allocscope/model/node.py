"""A device as its node sees it."""

from __future__ import annotations

from dataclasses import dataclass

from allocscope.model.bill import DeviceBill
from allocscope.model.identity import Device


@dataclass(frozen=True, slots=True)
class Owner:
    """Whose a process is, as far as its node can tell; None: not known."""

    user: str | None = None
    """As on the node; a number where the user has no name there."""
    container_id: str | None = None
    container: str | None = None
    """Its name within the pod."""
    pod: str | None = None
    namespace: str | None = None
    """The pod's."""
    pod_uid: str | None = None
    slurm_job: str | None = None
    slurm_step: str | None = None
    """A number, "batch", "extern" or "interactive"."""


@dataclass(frozen=True, slots=True)
class DeviceProcess:
    """A process that uses a device."""

    pid: int | None = None
    """In the daemon's pid namespace; None where it is only known from its probe."""
    process_id: str | None = None
    """Where it has a probe."""
    name: str | None = None
    used_bytes: int | None = None
    """None where the driver does not tell."""
    owner: Owner | None = None


@dataclass(frozen=True, slots=True)
class DeviceReading:
    """A device at a moment."""

    device: Device
    time_us: int
    from_nvml: bool
    """Whether NVML was read; else it is what probes know."""
    free_bytes: int | None = None
    driver_bytes: int | None = None
    """Kept by the driver (NVML's reserved)."""
    processes: tuple[DeviceProcess, ...] = ()
    bill: DeviceBill | None = None
    """None where the total is not known."""
    problem: str | None = None
    """Why NVML could not be read; None: it could."""
    problem_kind: str | None = None
    """A fixed word of what kind it is: "lost", "hangs", "no_permission", …"""
