"""A pynvml that answers from what a test says, with the names and errors of the real one."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from types import SimpleNamespace

GIB = 1 << 30
PATIENCE_S = 20


class NVMLError(Exception):
    """As pynvml's: with the code, and the driver's text."""

    def __init__(self, value: int, text: str = "Unknown Error") -> None:
        super().__init__(text)
        self.value = value


class NVMLLibraryMismatchError(Exception):
    """As pynvml's: no NVMLError."""


class Hang:
    """A call that does not come back until it may."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        """Somebody hangs in it."""
        self._over = threading.Event()
        self._over.set()

    def begin(self) -> None:
        self._over.clear()

    def end(self) -> None:
        self._over.set()

    def pass_through(self) -> None:
        if not self._over.is_set():
            self.reached.set()
        assert self._over.wait(PATIENCE_S)


@dataclass
class FakeDevice:
    """One device of a driver, or, among `instances`, a part of one."""

    uuid: str
    total: int = 80 * GIB
    free: int = 60 * GIB
    reserved: int = GIB
    used: int | None = None
    """Told apart from the others; None: what is left."""
    name: str = "NVIDIA H200"
    processes: dict[int, int | None] = field(default_factory=dict)
    failure: NVMLError | None = None
    """Of every call about it."""
    memory_failure: NVMLError | None = None
    processes_failure: NVMLError | None = None
    instances: list[FakeDevice | None] | None = None
    """In MIG mode; None in it: a number that no instance has."""
    hang: Hang = field(default_factory=Hang)
    """Of every call about it."""


class FakeNvml:
    """The module."""

    NVMLError = NVMLError
    NVMLLibraryMismatchError = NVMLLibraryMismatchError
    NVML_ERROR_INVALID_ARGUMENT = 2
    NVML_ERROR_NOT_FOUND = 6
    NVML_DEVICE_MIG_ENABLE = 1
    nvmlMemory_v2 = 0x02000028  # noqa: N815 (pynvml's name)

    def __init__(self, *devices: FakeDevice) -> None:
        self.devices = list(devices)
        self.absent: Exception | None = None
        """Of every call about the library."""
        self.has_memory_v2 = self.has_processes_v3 = self.knows_mig = True
        self.begun = 0
        """How often nvmlInit has succeeded, less nvmlShutdown."""
        self.inits = 0
        self.hang = Hang()
        """Of every call."""
        self.most_instances = 7

    def load(self):
        return self

    def nvmlInit(self) -> None:
        self.hang.pass_through()
        self.inits += 1
        if self.absent:
            raise self.absent
        self.begun += 1

    def nvmlShutdown(self) -> None:
        self.begun -= 1

    def nvmlDeviceGetCount(self) -> int:
        self.hang.pass_through()
        if self.absent:
            raise self.absent
        return len(self.devices)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeDevice:
        if index >= len(self.devices):
            raise NVMLError(self.NVML_ERROR_INVALID_ARGUMENT, "Invalid Argument")
        return self._asked(self.devices[index])

    def nvmlDeviceGetUUID(self, handle: FakeDevice) -> str:
        return self._asked(handle).uuid

    def nvmlDeviceGetName(self, handle: FakeDevice) -> bytes:
        return handle.name.encode()

    def nvmlDeviceGetMigMode(self, handle: FakeDevice) -> list[int]:
        if not self.knows_mig:
            raise NVMLError(13, "Function Not Found")
        return [int(handle.instances is not None)] * 2

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: FakeDevice) -> int:
        return self.most_instances

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: FakeDevice, index: int) -> FakeDevice:
        found = handle.instances[index] if index < len(handle.instances or ()) else None  # type: ignore[index]
        if found is None:
            raise NVMLError(self.NVML_ERROR_NOT_FOUND, "Not Found")
        return self._asked(found)

    def nvmlDeviceGetMemoryInfo(self, handle: FakeDevice, version: int | None = None):
        if self._asked(handle).memory_failure:
            raise handle.memory_failure  # type: ignore[misc]
        told = {"total": handle.total, "free": handle.free}
        if version is None:
            used = handle.total - handle.free
            return SimpleNamespace(**told, used=used if handle.used is None else handle.used)
        if not self.has_memory_v2:
            raise NVMLError(13, "Function Not Found")
        used = handle.total - handle.free - handle.reserved
        return SimpleNamespace(**told, reserved=handle.reserved, used=used if handle.used is None else handle.used)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: FakeDevice):
        if not self.has_processes_v3:
            raise NVMLLibraryMismatchError("Unversioned function called")
        return self.nvmlDeviceGetComputeRunningProcesses_v2(handle)

    def nvmlDeviceGetComputeRunningProcesses_v2(self, handle: FakeDevice):
        if self._asked(handle).processes_failure:
            raise handle.processes_failure  # type: ignore[misc]
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in handle.processes.items()]

    def nvmlDeviceGetMPSComputeRunningProcesses(self, handle: FakeDevice):
        raise NVMLError(3, "Not Supported")

    def nvmlDeviceGetGraphicsRunningProcesses(self, handle: FakeDevice):
        raise NVMLError(3, "Not Supported")

    def _asked(self, handle: FakeDevice) -> FakeDevice:
        self.hang.pass_through()
        handle.hang.pass_through()
        if handle.failure:
            raise handle.failure
        return handle
