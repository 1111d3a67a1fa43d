"""What NVML knows of the node's devices, read in a thread of its own.

A call into a driver in trouble may never come back. Nobody waits for one: a round that takes too long has no figures, no second
one begins while it hangs, and when it comes back all is as before. A figure that NVML does not tell is None, never 0.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

NOT_AVAILABLE = 2**63
"""NVML's sentinels (NVML_VALUE_NOT_AVAILABLE: all bits set) lie above; no figure does."""
RETRY_S = 60.0
"""Between two attempts to load a library, or a driver, that is not there."""


@dataclass(frozen=True, slots=True)
class NvmlProcess:
    """A process that the driver knows."""

    pid: int
    """In the host's pid namespace."""
    used_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class NvmlDevice:
    """A device as NVML tells it."""

    uuid: str
    index: int
    model: str | None = None
    total_bytes: int | None = None
    free_bytes: int | None = None
    driver_bytes: int | None = None
    """Reserved (nvmlMemory_v2): the driver's own."""
    processes: tuple[NvmlProcess, ...] | None = ()
    """None: not known."""
    problem: str | None = None

    def without_figures(self, problem: str) -> NvmlDevice:
        """What stays known of it."""
        return replace(self, free_bytes=None, driver_bytes=None, processes=None, problem=problem)


@dataclass(frozen=True, slots=True)
class NvmlRound:
    """One round of readings."""

    devices: tuple[NvmlDevice, ...] = ()
    problem: str | None = None
    """Why there are no figures at all."""


NEVER_READ = NvmlRound(problem="NVML has not been read yet")
SWITCHED_OFF = NvmlRound(problem="NVML is switched off")


class Nvml:
    """Reads rounds from the pynvml module, or a fake of it."""

    def __init__(self, load: Callable[[], Any]) -> None:
        self._load = load
        self._pynvml: Any = None
        self._known: dict[int, NvmlDevice] = {}

    def round(self) -> NvmlRound:
        """All devices; never raises."""
        try:
            if self._pynvml is None:
                pynvml = self._load()
                pynvml.nvmlInit()
                self._pynvml = pynvml
            count = self._pynvml.nvmlDeviceGetCount()
        except Exception as error:  # noqa: BLE001 (a missing library, driver or symbol: types of many modules)
            self._pynvml = None
            return self.without_figures(f"NVML cannot be read: {error}")
        return NvmlRound(tuple(device for index in range(count) if (device := self._device(index))))

    def without_figures(self, problem: str) -> NvmlRound:
        """What stays known of the devices."""
        return NvmlRound(tuple(device.without_figures(problem) for device in list(self._known.values())), problem)

    def _device(self, index: int) -> NvmlDevice | None:
        """One device; None where not even its UUID has ever been told."""
        nvml = self._pynvml
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            uuid = _text(nvml.nvmlDeviceGetUUID(handle))
        except nvml.NVMLError as error:
            known = self._known.get(index)
            return known.without_figures(str(error)) if known else None
        model = self._ask(nvml.nvmlDeviceGetName, handle)
        device = NvmlDevice(uuid, index, _text(model) if model is not None else None)
        try:
            device = self._read(device, handle)
        except nvml.NVMLError as error:
            total = known.total_bytes if (known := self._known.get(index)) and known.uuid == uuid else None
            device = replace(device, total_bytes=total).without_figures(str(error))
        self._known[index] = device
        return device

    def _read(self, device: NvmlDevice, handle: Any) -> NvmlDevice:
        memory = self._memory(handle)
        return replace(
            device,
            total_bytes=_figure(memory.total),
            free_bytes=_figure(memory.free),
            driver_bytes=_figure(getattr(memory, "reserved", None)),
            processes=self._processes(handle),
        )

    def _memory(self, handle: Any) -> Any:
        """Version 2 tells the driver's own part apart; drivers before 510 have only version 1."""
        nvml = self._pynvml
        try:
            return nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
        except nvml.NVMLError as error:
            if error.value != nvml.NVML_ERROR_FUNCTION_NOT_FOUND:
                raise
            return nvml.nvmlDeviceGetMemoryInfo(handle)

    def _processes(self, handle: Any) -> tuple[NvmlProcess, ...] | None:
        nvml = self._pynvml
        used: dict[int, int | None] = {}
        asked = (
            self._ask(nvml.nvmlDeviceGetComputeRunningProcesses, handle),
            self._ask(nvml.nvmlDeviceGetGraphicsRunningProcesses, handle),
        )
        if asked[0] is None:
            return None
        for process in (process for found in asked for process in found or ()):
            used[process.pid] = _figure(process.usedGpuMemory)
        return tuple(NvmlProcess(pid, figure) for pid, figure in sorted(used.items()))

    def _ask(self, call: Callable[[Any], Any], handle: Any) -> Any:
        """What a call tells; None: this device, or driver, does not support it, or an answer did not come this time."""
        try:
            return call(handle)
        except self._pynvml.NVMLError:
            return None


class NvmlWatch:
    """Rounds one after the other, in a daemon thread that nobody joins."""

    def __init__(
        self,
        nvml: Nvml,
        *,
        interval_s: float,
        timeout_s: float,
        clock: Callable[[], float],
        retry_s: float = RETRY_S,
        on_round: Callable[[float, bool], None] = lambda _seconds, _went_well: None,
    ) -> None:
        self._nvml, self._interval_s, self._timeout_s, self._clock = nvml, interval_s, timeout_s, clock
        self._retry_s, self._on_round = retry_s, on_round
        self._latest = NEVER_READ
        self._began_s: float | None = None
        self._stopping = threading.Event()
        self.first = threading.Event()
        """Set when the first round is over."""

    def start(self) -> None:
        """Begin to read."""
        threading.Thread(target=self._run, name="nvml", daemon=True).start()

    def stop(self) -> None:
        """Begin no further round."""
        self._stopping.set()

    def latest(self) -> NvmlRound:
        """The last round, without figures where one hangs."""
        began_s = self._began_s
        if began_s is not None and self._clock() - began_s > self._timeout_s:
            return self._nvml.without_figures(f"NVML has not answered within {self._timeout_s:g} s")
        return self._latest

    def _run(self) -> None:
        while not self._stopping.is_set():
            began_s = self._began_s = self._clock()
            self._latest = self._nvml.round()
            self._began_s = None
            self.first.set()
            self._on_round(self._clock() - began_s, self._latest.problem is None)
            self._stopping.wait(self._retry_s if self._latest.problem else self._interval_s)


def load_pynvml() -> Any:
    """The binding, from nvidia-ml-py."""
    import pynvml

    return pynvml


def problems(latest: NvmlRound) -> Iterable[str]:
    """What is wrong, for the log."""
    if latest.problem:
        return [latest.problem]
    return [f"device {device.index} ({device.uuid}): {device.problem}" for device in latest.devices if device.problem]


def _figure(value: int | None) -> int | None:
    return value if value is not None and 0 <= value < NOT_AVAILABLE else None


def _text(value: str | bytes) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value
