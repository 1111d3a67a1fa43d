"""A device as its node sees it."""

from __future__ import annotations

from dataclasses import dataclass

from allocscope.model.bill import DeviceBill
from allocscope.model.identity import Device


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
