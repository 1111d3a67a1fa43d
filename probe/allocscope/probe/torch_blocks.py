"""The blocks of all devices, as torch tells them: segments for block maps, and whole snapshots.

Only the native allocator tells them (ALLOCATOR.md 3.5). Each call holds the GIL throughout, and the lock of one device after the
other while its blocks are copied.
"""

from __future__ import annotations

import gc
import inspect
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

from allocscope.model.blocks import BlockGroup
from allocscope.model.condense import LARGE_PAGE_BYTES, condense
from allocscope.probe import fork
from allocscope.probe.torch_cuda import TORCH_ERRORS, Backend, attribute

WORDS_FOR_STACKS = "torch._inductor.codecache"
"""Where a block or an entry has a stack, torch imports this to put it into words: some 900 modules and a second or two, once
(torch 2.14, torch/csrc/profiler/python/combined_traceback.cpp)."""


class TorchBlocks:
    """The calls of one initialized torch, by any thread. What cannot be told is None.

    To put stacks into words they call Python from C++, import its compiler, too. A thread that wants the GIL back in there while
    Python ends is ended where it stands (up to Python 3.13), in C++ that forbids this, and the job would abort: `close` waits.
    """

    def __init__(self, modules: Mapping[str, Any], backend: Backend) -> None:
        self._calls = threading.Condition()
        self._running, self.is_closed = 0, False
        self._modules, self._is_native = modules, backend is Backend.NATIVE
        self._segments, self.can_leave_traces_out = _segments_call(modules["torch.cuda"])

    @property
    def has_words_for_stacks(self) -> bool:
        """Whether telling of stacks costs no import any more."""
        return WORDS_FOR_STACKS in self._modules

    def segments(self) -> list[Mapping[str, Any]] | None:
        """All segments of all devices, without traces where this version can leave them out.

        While a history is recorded each call adds one entry, "snapshot", for each device to it (torch 2.14.1).
        """
        if not self._is_native:
            return None
        found = self._called(lambda: list(self._segments()))
        return found if isinstance(found, list) else None

    def snapshot(self, *, with_traces: bool = True) -> dict[str, Any] | None:
        """All that PyTorch knows, as its own viewer wants it."""
        take = attribute(self._modules.get("torch.cuda.memory"), "_snapshot")
        if not with_traces:
            raw = attribute(self._modules.get("torch._C"), "_cuda_memorySnapshot")
            take = (lambda: raw((0, 0, False))) if self.can_leave_traces_out and raw is not None else None
        if not self._is_native or take is None:
            return None
        with nullcontext() if self.has_words_for_stacks else fork.held_off(), no_garbage_collected():
            found = self._called(take)
        return found if isinstance(found, dict) else None

    def close(self, timeout_s: float) -> None:
        """Begin no call any more, and wait for those of other threads."""
        with self._calls:
            self.is_closed = True
            self._calls.wait_for(lambda: not self._running, timeout_s)

    def _called(self, call: Callable[[], object]) -> object:
        with self._calls:
            if self.is_closed:
                return None
            self._running += 1
        try:
            return call()
        except TORCH_ERRORS:
            return None
        finally:
            with self._calls:
                self._running -= 1
                self._calls.notify_all()


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


@contextmanager
def no_garbage_collected() -> Iterator[None]:
    """Blocks and entries come as a dictionary each; going through the job's whole heap in between takes ten times as long as that."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _segments_call(cuda: Any) -> tuple[Callable[[], Iterable[Mapping[str, Any]]], bool]:
    """memory_snapshot, without traces where it knows how (torch 2.11), and whether it does."""
    call: Callable[..., Iterable[Mapping[str, Any]]] = cuda.memory_snapshot
    try:
        quiet = "include_traces" in inspect.signature(call).parameters
    except (TypeError, ValueError):
        quiet = False
    return ((lambda: call(include_traces=False)) if quiet else call), quiet
