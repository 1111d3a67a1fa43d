"""A pynvml that answers from what a test says, with the names and errors of the real one."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from types import SimpleNamespace

GIB = 1 << 30


class NVMLError(Exception):
    """As pynvml's: with the code, and the driver's text."""

    def __init__(self, value: int, text: str = "Unknown Error") -> None:
        super().__init__(text)
        self.value = value


@dataclass
class FakeDevice:
    """One device of a driver."""

    uuid: str
    total: int = 80 * GIB
    free: int = 60 * GIB
    reserved: int = GIB
    processes: dict[int, int | None] = field(default_factory=dict)
    failure: NVMLError | None = None
    """Of every call about it."""
    memory_failure: NVMLError | None = None
    processes_failure: NVMLError | None = None


class FakeNvml:
    """The module."""

    NVMLError = NVMLError
    NVML_ERROR_FUNCTION_NOT_FOUND = 13
    nvmlMemory_v2 = 0x02000028  # noqa: N815 (pynvml's name)

    def __init__(self, *devices: FakeDevice) -> None:
        self.devices = list(devices)
        self.absent: Exception | None = None
        self.has_memory_v2 = True
        self.calls = 0
        self.hangs = threading.Event()
        self.may_answer = threading.Event()
        self.may_answer.set()

    def load(self):
        return self

    def nvmlInit(self) -> None:
        self.calls += 1
        if self.absent:
            raise self.absent

    def nvmlDeviceGetCount(self) -> int:
        if not self.may_answer.is_set():
            self.hangs.set()
        assert self.may_answer.wait(20)
        if self.absent:
            raise self.absent
        return len(self.devices)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeDevice:
        device = self.devices[index]
        if device.failure:
            raise device.failure
        return device

    def nvmlDeviceGetUUID(self, handle: FakeDevice) -> str:
        return handle.uuid

    def nvmlDeviceGetName(self, handle: FakeDevice) -> bytes:
        return b"NVIDIA H200"

    def nvmlDeviceGetMemoryInfo(self, handle: FakeDevice, version: int | None = None):
        if handle.memory_failure:
            raise handle.memory_failure
        if version is None:
            return SimpleNamespace(total=handle.total, free=handle.free, used=handle.total - handle.free)
        if not self.has_memory_v2:
            raise NVMLError(self.NVML_ERROR_FUNCTION_NOT_FOUND, "Function Not Found")
        return SimpleNamespace(total=handle.total, free=handle.free, reserved=handle.reserved)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: FakeDevice):
        if handle.processes_failure:
            raise handle.processes_failure
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in handle.processes.items()]

    def nvmlDeviceGetGraphicsRunningProcesses(self, handle: FakeDevice):
        raise NVMLError(3, "Not Supported")
