"""One device as NVML tells it at a moment, and, in MIG mode, its instances. A figure that NVML does not tell, or that cannot be, is None, never 0."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from allocscope.daemon.mig import instances, is_in_mig_mode
from allocscope.daemon.nvml_problems import NvmlProblem, ProblemKind, problem_of

IMPLAUSIBLE_BYTES = 1 << 50
"""No device has a PiB. NVML's "not available" (nvml.h: all bits set) and whatever else stands for it is far above."""
LISTS = (
    "nvmlDeviceGetComputeRunningProcesses",
    "nvmlDeviceGetMPSComputeRunningProcesses",
    "nvmlDeviceGetGraphicsRunningProcesses",
)
"""Who uses a device: by the first it is judged whether that is known."""


@dataclass(frozen=True, slots=True)
class NvmlProcess:
    """A process that the driver knows."""

    pid: int
    """In the host's pid namespace."""
    used_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class NvmlDevice:
    """A device, or a MIG instance, as NVML tells it."""

    uuid: str
    """Empty where NVML has never told it."""
    index: int
    """NVML's; an instance has its device's."""
    model: str | None = None
    total_bytes: int | None = None
    free_bytes: int | None = None
    driver_bytes: int | None = None
    """Reserved (nvmlMemory_v2): the driver's own."""
    processes: tuple[NvmlProcess, ...] | None = ()
    """None: not known."""
    problem: NvmlProblem | None = None
    parent_uuid: str | None = None
    """Of an instance."""
    in_mig_mode: bool = False
    """Its memory and processes are its instances', and told of them alone, so that nothing counts twice."""

    def without_figures(self, problem: NvmlProblem) -> NvmlDevice:
        """What stays known of it."""
        return replace(self, free_bytes=None, driver_bytes=None, processes=None, problem=problem)


def read_device(nvml: Any, index: int) -> tuple[NvmlDevice, ...]:
    """The device in this place of NVML's order, and its instances after it; raises what pynvml does where it cannot even be named."""
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    device = NvmlDevice(_text(nvml.nvmlDeviceGetUUID(handle)), index, _model(nvml, handle))
    try:
        in_mig_mode = is_in_mig_mode(nvml, handle)
    except Exception as error:  # noqa: BLE001 (not all of pynvml's errors are NVMLErrors)
        return (device.without_figures(problem_of(error)),)
    if not in_mig_mode:
        return (_with_figures(nvml, device, handle),)
    return _with_instances(nvml, replace(device, in_mig_mode=True), handle)


def _with_instances(nvml: Any, device: NvmlDevice, handle: Any) -> tuple[NvmlDevice, ...]:
    """Each instance answers, or fails, for itself."""
    parts: list[NvmlDevice] = []
    try:
        for part in instances(nvml, handle):
            named = NvmlDevice(
                _text(nvml.nvmlDeviceGetUUID(part)), device.index, _model(nvml, part), parent_uuid=device.uuid
            )
            parts.append(_with_figures(nvml, named, part))
    except Exception as error:  # noqa: BLE001 (the same)
        device = replace(device, problem=problem_of(error))
    return (device, *parts)


def _with_figures(nvml: Any, device: NvmlDevice, handle: Any) -> NvmlDevice:
    """Memory and processes, each whether or not the other can be read."""
    try:
        device = _with_memory(device, _memory(nvml, handle))
    except Exception as error:  # noqa: BLE001 (the same)
        device = replace(device, problem=problem_of(error))
    processes, processes_problem = _processes(nvml, handle)
    return replace(device, processes=processes, problem=device.problem or processes_problem)


def _memory(nvml: Any, handle: Any) -> Any:
    """Version 2 tells the driver's own part apart; drivers before 510 have only version 1."""
    try:
        return nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
    except nvml.NVMLError as error:
        if problem_of(error).kind is not ProblemKind.OLD_DRIVER:
            raise
        return nvml.nvmlDeviceGetMemoryInfo(handle)


def _with_memory(device: NvmlDevice, memory: Any) -> NvmlDevice:
    told: dict[str, int | None] = {name: getattr(memory, name, None) for name in ("total", "free", "reserved", "used")}
    total, free, driver, used = (_figure(told[name]) for name in ("total", "free", "reserved", "used"))
    if total is None:
        problem = NvmlProblem(ProblemKind.NOT_AVAILABLE, "the driver does not tell its memory")
        return replace(device, problem=problem)
    if total == 0 or (used or 0) > total or (free or 0) + (driver or 0) > total:
        figures = ", ".join(f"{name} {figure}" for name, figure in told.items() if figure is not None)
        problem = NvmlProblem(ProblemKind.NONSENSE, f"the driver tells memory that cannot be ({figures} bytes)")
        return replace(device, total_bytes=total or None, problem=problem)
    return replace(device, total_bytes=total, free_bytes=free, driver_bytes=driver)


def _processes(nvml: Any, handle: Any) -> tuple[tuple[NvmlProcess, ...] | None, NvmlProblem | None]:
    """Who uses it, None where that is not told; and what is wrong with that."""
    used: dict[int, int | None] = {}
    for name in LISTS:
        try:
            found = _newest_of(nvml, name)(handle)
        except Exception as error:  # noqa: BLE001 (the same)
            if name == LISTS[0]:
                return None, NvmlProblem(ProblemKind.NO_PROCESSES, f"who uses it is not told: {error}")
            continue
        for process in found:
            figure = _figure(process.usedGpuMemory)
            used[process.pid] = figure if used.get(process.pid) is None else used[process.pid]
    processes = tuple(NvmlProcess(pid, figure) for pid, figure in sorted(used.items()))
    if any(process.used_bytes is None for process in processes):
        return processes, NvmlProblem(ProblemKind.NO_PROCESS_MEMORY, "what its processes use is not told")
    return processes, None


def _newest_of(nvml: Any, name: str) -> Callable[[Any], Any]:
    """The call, or, where the driver is too old for it (before 510: NVMLLibraryMismatchError, no NVMLError), its second version."""
    newest: Callable[[Any], Any] = getattr(nvml, name)
    second: Callable[[Any], Any] | None = getattr(nvml, f"{name}_v2", None)
    too_old = getattr(nvml, "NVMLLibraryMismatchError", None)
    if second is None or too_old is None:
        return newest

    def call(handle: Any) -> Any:
        try:
            return newest(handle)
        except too_old:
            return second(handle)

    return call


def _model(nvml: Any, handle: Any) -> str | None:
    try:
        return _text(nvml.nvmlDeviceGetName(handle))
    except Exception:  # noqa: BLE001 (a device without a name is one all the same)
        return None


def _figure(value: int | None) -> int | None:
    return value if value is not None and 0 <= value < IMPLAUSIBLE_BYTES else None


def _text(value: str | bytes) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value
