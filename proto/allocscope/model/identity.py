"""Who is who: processes, devices, allocators."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Device:
    """A device as one process or node knows it."""

    uuid: str
    """NVML's UUID: "GPU-…" or "MIG-…"."""
    index: int
    """The knower's ordinal: NVML's from a daemon, CUDA's from a probe."""
    model: str | None = None
    """Marketing name."""
    total_bytes: int | None = None
    allowed_bytes: int | None = None
    """What a memory fraction lets this process's allocator reserve; None: no such limit."""
    parent_uuid: str | None = None
    """Of a MIG instance: the device that it is a part of."""


@dataclass(frozen=True, slots=True)
class Process:
    """One instrumented process: a rank of a job."""

    process_id: str
    """32 hex digits drawn at the probe's start, never used again."""
    job: str
    pid: int
    """As the process sees it, in its own pid namespace."""
    host: str
    started_us: int
    rank: int | None = None
    world_size: int | None = None
    local_rank: int | None = None
    torch_version: str | None = None
    allocator_conf: str | None = None
    """The settings in force as a PYTORCH_CUDA_ALLOC_CONF string; "" is the default configuration."""
    program: str | None = None
    devices: tuple[Device, ...] = ()


@dataclass(frozen=True, slots=True, order=True)
class AllocatorRef:
    """One caching allocator: one process on one device."""

    process_id: str
    device_uuid: str
