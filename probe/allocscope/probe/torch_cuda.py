"""The calls into the job's torch, and what may be called when (ALLOCATOR.md 11); those for its blocks are in `torch_blocks`.

torch is found among the imported modules and never imported. Nothing here initialises CUDA, resets a peak, changes a setting
or touches a history (`allocscope.probe.history` alone does). Modules are read by their dictionaries: an attribute that is not
there must not set torch's own lazy imports going.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any

from allocscope.model.identity import Device
from allocscope.probe import cuda_runtime
from allocscope.probe.counters import Stats, async_sample_of, is_used, sample_of
from allocscope.probe.cuda_runtime import CudaRuntime
from allocscope.probe.devices import device_uuid
from allocscope.probe.texts import LONGEST_CONF, printable

CONF_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""The first that is set wins entirely (ALLOCATOR.md 9)."""
TORCH_ERRORS = (
    AttributeError,
    RuntimeError,
    KeyError,
    TypeError,
    ValueError,
    AssertionError,
    NotImplementedError,
    OSError,
    MemoryError,
)
"""What torch's calls raise in builds and versions that lack something, and where the machine's memory runs out."""


class Absence(Enum):
    """Why there is nothing to sample."""

    NO_TORCH = "torch is not imported"
    NO_CUDA = "this torch was built without CUDA"
    NOT_INITIALIZED = "CUDA is not initialized"
    NO_ANSWER = "torch's calls fail"

    @property
    def may_pass(self) -> bool:
        """Whether it can be otherwise in a moment."""
        return self in (Absence.NO_TORCH, Absence.NOT_INITIALIZED)


class Backend(Enum):
    """Which allocator torch has, by the name that it gives (ALLOCATOR.md 3.5); fixed once CUDA is initialized."""

    NATIVE = "native"
    """torch's own caching allocator: everything can be asked."""
    ASYNC = "cudaMallocAsync"
    """The driver's: a few counters, no blocks, no history, and no word of an OutOfMemoryError."""
    PLUGGABLE = "pluggable"
    """The program's own, or one that is not known here: nothing can be asked."""


def look(modules: Mapping[str, Any] | None = None) -> TorchCuda | Absence:
    """The torch of this process, where its allocator can be sampled now. Costs a few microseconds."""
    found = sys.modules if modules is None else modules
    cuda, binding = found.get("torch.cuda"), found.get("torch._C")
    is_initialized = attribute(cuda, "is_initialized")
    if cuda is None or binding is None or is_initialized is None:
        return Absence.NO_TORCH
    if attribute(binding, "_cuda_memoryStats") is None:
        return Absence.NO_CUDA
    try:
        if not is_initialized():  # False in a forked child, too
            return Absence.NOT_INITIALIZED
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
        self.version: str | None = _text(attribute(modules.get("torch"), "__version__"))
        self.backend = _backend(attribute(self._binding, "_cuda_getAllocatorBackend"))
        self.sample_of = async_sample_of if self.backend is Backend.ASYNC else sample_of
        """Makes a sample of what `stats` said, without what this backend does not know."""
        self._runtime = loaded_runtime(modules)

    # memory

    def memory_info(self, index: int) -> tuple[int, int] | None:
        """The device's free and total bytes by the driver, where asking cannot spoil a CUDA graph that the job captures.

        Only for a device that this process uses: elsewhere it would make a context.
        """
        try:
            return None if self._runtime is None else self._runtime.memory_info(index)
        except TORCH_ERRORS:
            return None

    def is_used(self, index: int) -> bool:
        """Whether this process has memory of that device by torch; where its allocator does not count, whether it has a context there."""
        if self.backend is not Backend.PLUGGABLE:
            try:
                if is_used(self.stats(index)):
                    return True
            except TORCH_ERRORS:
                return False
            if self.is_caching:
                return False
        return self._has_context(index)

    @property
    def is_caching(self) -> bool:
        """Whether the native allocator counts anything: with its caching off each tensor is the driver's own (ALLOCATOR.md 3.5)."""
        ask = attribute(self._binding, "_cuda_cudaCachingAllocator_is_enabled")  # from 2.12 on
        if ask is None:
            return not os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING")
        try:
            return bool(ask())
        except TORCH_ERRORS:
            return True

    def _has_context(self, index: int) -> bool:
        """Asked of the driver without making one."""
        ask = attribute(self._binding, "_cuda_hasPrimaryContext")
        try:
            return ask is not None and bool(ask(index))
        except TORCH_ERRORS:
            return False

    # who is who

    def device(self, index: int) -> Device | None:
        """The device, where it has a UUID."""
        try:
            properties = self._cuda.get_device_properties(index)
        except TORCH_ERRORS:
            return None
        uuid = device_uuid(properties, index, os.environ.get("CUDA_VISIBLE_DEVICES"))
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
        fraction = self.memory_fraction(index)
        return None if fraction is None or total is None or fraction == 1 else int(fraction * total)

    def memory_fraction(self, index: int) -> float | None:
        """What of the device this process's allocator may reserve; 1 lifts the limit."""
        ask = attribute(self._modules.get("torch.cuda.memory"), "get_per_process_memory_fraction")
        try:
            fraction = None if ask is None else float(ask(index))
        except TORCH_ERRORS:
            return None
        return fraction if fraction is not None and 0 <= fraction <= 1 else None  # cudaMallocAsync tells what cannot be

    def allocator_conf(self, environ: Mapping[str, str]) -> str | None:
        """The settings in force; before torch 2.10 the environment's, since none can be asked."""
        ask = attribute(self._binding, "_accelerator_getAllocatorSettings")
        if ask is not None:
            try:
                return printable(str(ask()), LONGEST_CONF)
            except TORCH_ERRORS:
                return None
        return printable(next((environ[name] for name in CONF_VARIABLES if name in environ), ""), LONGEST_CONF)

    # errors

    def observe_oom(self, observer: Callable[[int, int, int, int], None]) -> bool:
        """Have `observer(device, segment_bytes, total_bytes, free_bytes)` called before each OutOfMemoryError; it stays for ever."""
        attach = attribute(self._binding, "_cuda_attach_out_of_memory_observer")
        if attach is None:
            return False
        try:
            attach(observer)
        except TORCH_ERRORS:
            return False
        return True


def loaded_runtime(modules: Mapping[str, Any]) -> CudaRuntime | None:
    """The CUDA runtime under this torch."""
    return cuda_runtime.loaded(attribute(modules.get("torch.version"), "cuda"))


def _backend(ask: Callable[[], str] | None) -> Backend:
    """Before torch 2.0 there is but one."""
    name = Backend.NATIVE.value if ask is None else ask()
    return Backend(name) if name in {each.value for each in Backend} else Backend.PLUGGABLE


def attribute(module: Any, name: str) -> Any:
    """What a module has by that name, without setting a lazy import going; None: nothing."""
    return getattr(module, "__dict__", {}).get(name)


def _text(value: object) -> str | None:
    return None if value is None else printable(str(value))
