"""The CUDA runtime that torch has loaded, for what may take long: called by ctypes, which lets go of the GIL in plain C.

While Python ends, a thread that wants the GIL back is ended where it stands (up to Python 3.13). By torch's own call of the
kind (`torch._C._cudart.cudaMemGetInfo`) it stands in C++ that forbids this: the job would abort, "terminate called without an
active exception".
"""

from __future__ import annotations

import ctypes
import os
import threading
from typing import Any

RELAXED_CAPTURE_MODE = 2
"""cudaStreamCaptureModeRelaxed."""


class CudaRuntime:
    """One process's."""

    def __init__(self, library: Any) -> None:
        """Raises AttributeError where it lacks a call."""
        self._exchange_mode = library.cudaThreadExchangeStreamCaptureMode
        self._set_device, self._memory_info = library.cudaSetDevice, library.cudaMemGetInfo
        self._exchange_mode.argtypes = [ctypes.POINTER(ctypes.c_int)]
        self._set_device.argtypes = [ctypes.c_int]
        self._memory_info.argtypes = [ctypes.POINTER(ctypes.c_size_t)] * 2
        for call in (self._exchange_mode, self._set_device, self._memory_info):
            call.restype = ctypes.c_int
        self._thread = threading.local()

    def memory_info(self, index: int) -> tuple[int, int] | None:
        """A device's free and total bytes; None where it does not say, or where asking could spoil a CUDA graph.

        Only for a device that this process uses: elsewhere it would make a context. The thread stays on that device.
        """
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        # A thread begins on device 0, where the job may have no context: it moves first, lest a call make one.
        if self._set_device(index) or not self._is_relaxed() or self._memory_info(free, total):
            return None
        return free.value, total.value

    def _is_relaxed(self) -> bool:
        """Whether this thread may ask the driver while another one captures a CUDA graph.

        In CUDA's default mode a "potentially unsafe" call of any thread invalidates a capture that another thread has begun
        (CUDA Runtime API, cudaThreadExchangeStreamCaptureMode). Where the mode cannot be set, the driver is not asked.
        """
        relaxed: bool | None = getattr(self._thread, "relaxed", None)
        if relaxed is None:
            relaxed = self._thread.relaxed = bool(self._exchange_mode(ctypes.c_int(RELAXED_CAPTURE_MODE)) == 0)
        return relaxed


def loaded(cuda_version: object) -> CudaRuntime | None:
    """The one that this process has loaded, of the version that torch was built with; none is loaded for it."""
    for name in (None, f"libcudart.so.{str(cuda_version).partition('.')[0]}"):
        try:
            mode = os.RTLD_NOW | os.RTLD_NOLOAD if name else ctypes.DEFAULT_MODE
            return CudaRuntime(ctypes.CDLL(name, mode=mode))
        except (AttributeError, OSError):
            continue
    return None
