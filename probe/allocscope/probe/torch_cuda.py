"""Every call into the job's torch, and what may be called when (ALLOCATOR.md 11).

torch is found among the imported modules and never imported. Nothing here initialises CUDA, resets a peak, changes a setting
or touches a history. Modules are read by their dictionaries: an attribute that is not there must not set torch's own lazy
imports going.
"""

from __future__ import annotations

import ctypes
import inspect
import os
import re
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from typing import Any

from allocscope.model.blocks import BlockGroup
from allocscope.model.condense import LARGE_PAGE_BYTES, condense
from allocscope.model.identity import Device
from allocscope.probe.counters import Stats

CONF_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""The first that is set wins entirely (ALLOCATOR.md 9)."""
RELAXED_CAPTURE_MODE = 2
"""cudaStreamCaptureModeRelaxed."""
TORCH_ERRORS = (
    AttributeError,
    RuntimeError,
    KeyError,
    TypeError,
    ValueError,
    AssertionError,
    NotImplementedError,
    OSError,
)
"""What torch's calls raise in builds and versions that lack something."""


class Absence(Enum):
    """Why there is nothing to sample."""

    NO_TORCH = "torch is not imported"
    NO_CUDA = "this torch was built without CUDA"
    NOT_INITIALIZED = "CUDA is not initialized"
    OTHER_BACKEND = "the allocator is not torch's native one"
    NO_ANSWER = "torch's calls fail"

    @property
    def may_pass(self) -> bool:
        """Whether it can be otherwise in a moment."""
        return self in (Absence.NO_TORCH, Absence.NOT_INITIALIZED)


def look(modules: Mapping[str, Any] | None = None) -> TorchCuda | Absence:
    """The torch of this process, where its allocator can be sampled now. Costs a few microseconds."""
    found = sys.modules if modules is None else modules
    cuda, binding = found.get("torch.cuda"), found.get("torch._C")
    is_initialized = _get(cuda, "is_initialized")
    if cuda is None or binding is None or is_initialized is None:
        return Absence.NO_TORCH
    if _get(binding, "_cuda_memoryStats") is None:
        return Absence.NO_CUDA
    try:
        if not is_initialized():  # False in a forked child, too
            return Absence.NOT_INITIALIZED
        backend = _get(binding, "_cuda_getAllocatorBackend")
        if backend is not None and backend() != "native":
            return Absence.OTHER_BACKEND
        return TorchCuda(found)
    except TORCH_ERRORS:
        return Absence.NO_ANSWER


class TorchCuda:
    """The calls of one initialized torch. Methods that can fail for want of something say None."""

    def __init__(self, modules: Mapping[str, Any]) -> None:
        self._cuda, self._binding, self._modules = modules["torch.cuda"], modules["torch._C"], modules
        self.stats: Callable[[int], Stats] = self._binding._cuda_memoryStats
        """The nested statistics of a device, by the raw call: no CUDA call, but it waits for the device's lock with the GIL."""
        self.device_count = int(self._cuda.device_count())
        self.version: str | None = _text(_get(modules.get("torch"), "__version__"))
        self._snapshot = _snapshot_call(self._cuda)
        self._thread = threading.local()

    # memory

    def memory_info(self, index: int) -> tuple[int, int] | None:
        """The device's free and total bytes by the driver, where asking cannot spoil a CUDA graph that the job captures.

        Only for a device that this process uses: elsewhere it would make a context.
        """
        try:
            if not self._is_relaxed() or self._cuda.is_current_stream_capturing():
                return None
            free, total = self._cuda.mem_get_info(index)
            return int(free), int(total)
        except TORCH_ERRORS:
            return None

    def segments(self) -> list[Mapping[str, Any]] | None:
        """All segments of all devices, without traces; holds the GIL throughout."""
        try:
            return list(self._snapshot())
        except TORCH_ERRORS:
            return None

    # who is who

    def device(self, index: int) -> Device | None:
        """The device, where it has a UUID."""
        try:
            properties = self._cuda.get_device_properties(index)
        except TORCH_ERRORS:
            return None
        uuid = _uuid(properties, index)
        if uuid is None:
            return None
        total = getattr(properties, "total_memory", None)
        total = total if isinstance(total, int) and total > 0 else None
        return Device(
            uuid=uuid,
            index=index,
            model=_text(getattr(properties, "name", None)),
            total_bytes=total,
            allowed_bytes=self._allowed_bytes(index, total),
        )

    def _allowed_bytes(self, index: int, total: int | None) -> int | None:
        memory = self._modules.get("torch.cuda.memory")
        ask = _get(memory, "get_per_process_memory_fraction")
        if ask is None or total is None:
            return None
        try:
            fraction = float(ask(index))
        except TORCH_ERRORS:
            return None
        return int(fraction * total) if 0 <= fraction < 1 else None

    def allocator_conf(self, environ: Mapping[str, str]) -> str | None:
        """The settings in force; before torch 2.10 the environment's, since none can be asked."""
        ask = _get(self._binding, "_accelerator_getAllocatorSettings")
        if ask is not None:
            try:
                return _text(ask())
            except TORCH_ERRORS:
                return None
        return next((environ[name] for name in CONF_VARIABLES if name in environ), "")

    # errors

    def observe_oom(self, observer: Callable[[int, int, int, int], None]) -> bool:
        """Have `observer(device, segment_bytes, total_bytes, free_bytes)` called before each OutOfMemoryError; it stays for ever."""
        attach = _get(self._binding, "_cuda_attach_out_of_memory_observer")
        if attach is None:
            return False
        try:
            attach(observer)
        except TORCH_ERRORS:
            return False
        return True

    def _is_relaxed(self) -> bool:
        """Whether this thread may ask the driver while another one captures a CUDA graph.

        In CUDA's default mode a "potentially unsafe" call of any thread invalidates a capture that another thread has begun
        (CUDA Runtime API, cudaThreadExchangeStreamCaptureMode). Where the mode cannot be set, the driver is not asked.
        """
        relaxed: bool | None = getattr(self._thread, "relaxed", None)
        if relaxed is None:
            relaxed = self._thread.relaxed = _relax_capture_mode(_get(self._modules.get("torch.version"), "cuda"))
        return relaxed


def large_page_bytes(conf: str | None) -> int:
    """The page of a large expandable segment under these settings."""
    match = re.search(r"large_segment_size_mb\s*:\s*([0-9]{1,9})", conf or "")
    return int(match[1]) << 20 if match else LARGE_PAGE_BYTES


def groups_of(segments: Iterable[Mapping[str, Any]], index: int, page_bytes: int) -> tuple[BlockGroup, ...] | None:
    """One device's segments, condensed; None where this torch's cannot be read."""
    try:
        return condense((s for s in segments if s.get("device", 0) == index), page_bytes)
    except TORCH_ERRORS:
        return None


def _relax_capture_mode(cuda_version: object) -> bool:
    """Set it for the calling thread, in the CUDA runtime that torch has loaded; none is loaded for it."""
    for name in (None, f"libcudart.so.{str(cuda_version).partition('.')[0]}"):
        try:
            runtime = ctypes.CDLL(name, mode=os.RTLD_NOW | os.RTLD_NOLOAD if name else ctypes.DEFAULT_MODE)
            exchange = runtime.cudaThreadExchangeStreamCaptureMode
            exchange.argtypes, exchange.restype = [ctypes.POINTER(ctypes.c_int)], ctypes.c_int
            return bool(exchange(ctypes.byref(ctypes.c_int(RELAXED_CAPTURE_MODE))) == 0)
        except (AttributeError, OSError):
            continue
    return False


def _snapshot_call(cuda: Any) -> Callable[[], Iterable[Mapping[str, Any]]]:
    """memory_snapshot, without traces where it knows how (torch 2.11)."""
    call: Callable[..., Iterable[Mapping[str, Any]]] = cuda.memory_snapshot
    try:
        quiet = "include_traces" in inspect.signature(call).parameters
    except (TypeError, ValueError):
        quiet = False
    return (lambda: call(include_traces=False)) if quiet else call


def _uuid(properties: Any, index: int) -> str | None:
    """NVML's form of it. torch tells it from 2.4 on, without the prefix."""
    told = getattr(properties, "uuid", None)
    text = _text(told) if told is not None else None
    if text:
        return text if text.startswith(("GPU-", "MIG-")) else f"GPU-{text}"
    visible = [v.strip() for v in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    named = visible[index] if index < len(visible) else ""
    return named if re.fullmatch(r"(GPU|MIG)-[0-9a-f-]{36}", named) else None


def _get(module: Any, name: str) -> Any:
    return getattr(module, "__dict__", {}).get(name)


def _text(value: object) -> str | None:
    return None if value is None else str(value)
