"""A history recorded for captures: switched on where none is on, and off again. One that the program records is never touched.

PyTorch has one history a process, with no owner (ALLOCATOR.md 7). While ours is on, the calls that switch histories on and off
are watched: once the program has called one of them, it is the program's.
"""

from __future__ import annotations

import inspect
import math
import os
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from allocscope.probe.torch_cuda import TORCH_ERRORS, attribute

SWITCHES = ("_cuda_record_memory_history", "_cuda_record_memory_history_legacy")
"""torch._C's, under every way to switch a history on or off."""


class History:
    """The history of one process's torch, once its CUDA is initialized: before, asking for it crashes (ALLOCATOR.md 7)."""

    def __init__(self, modules: Mapping[str, Any]) -> None:
        self._binding, self._modules = modules.get("torch._C"), modules
        self._watching = threading.RLock()
        self._watched: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {}
        """By name: what torch had, and what stands in for it."""
        self._acting = False
        self.is_ours = False
        self.has_stacks = False
        """Whether the program recorded one, with stacks or without: blocks of that time have theirs for as long as they live."""
        self._entries = 0
        """Of ours, at most, a device."""
        self.interference: str | None = None
        """What the program did with ours, for people."""
        _all.add(self)

    def look(self) -> None:
        """Note whether the program records one now."""
        self.has_stacks = self.has_stacks or self.is_programs

    @property
    def is_programs(self) -> bool:
        """Whether the program records one now."""
        return not self.is_ours and self.is_enabled

    @property
    def most_entries(self) -> float:
        """How many a device it may have at most; infinity where that is the program's affair."""
        if not self.is_enabled:
            return 0
        return self._entries if self.is_ours else math.inf

    def begin(self, entries: int) -> str | None:
        """Have one recorded, of at most `entries` a device; where it cannot be, why. The program's own one will do, and goes on."""
        with self._watching:
            self.interference = self.interference if self.is_ours else None
            enabled = self._ask()
            if enabled is None:
                return "this torch does not tell whether the program records a history, so none was recorded for this capture"
            if enabled:
                return None
            arguments = _arguments(self._record, entries)
            if arguments is None:
                return "this torch cannot record a history"
            if self._is_of_pinned_memory():
                return "the program records a history of pinned memory, which another one would end"
            self._watch()
            self.is_ours, self._entries = True, entries
            if not self._switch(arguments):
                self.end()
                return "torch's recording of a history fails"
            return None

    def end(self) -> None:
        """Switch ours off, if it is still ours."""
        with self._watching:
            if self.is_ours and self.is_enabled:
                self._switch(_arguments(self._record, None))
            self.is_ours = False
            self._unwatch()

    @property
    def is_enabled(self) -> bool:
        """Whether one is recorded, ours or the program's; False where torch does not tell."""
        return bool(self._ask())

    def _ask(self) -> bool | None:
        ask = attribute(self._binding, "_cuda_isHistoryEnabled")
        try:
            return None if ask is None else bool(ask())
        except TORCH_ERRORS:
            return None

    def _is_of_pinned_memory(self) -> bool:
        """Such a one, without the devices' (from torch 2.14 on), is seen by its entries only."""
        try:
            if "record_pinned_host_memory" not in inspect.signature(self._record or print).parameters:
                return False
            return bool(attribute(self._binding, "_cuda_memorySnapshot")((0, 0, True))["host_traces"])
        except TORCH_ERRORS:
            return False

    @property
    def _record(self) -> Callable[..., None] | None:
        found: Callable[..., None] | None = attribute(self._modules.get("torch.cuda.memory"), "_record_memory_history")
        return found

    def _switch(self, arguments: Mapping[str, object] | None) -> bool:
        record = self._record
        if record is None or arguments is None:
            return False
        self._acting = True
        try:
            record(**arguments)
        except TORCH_ERRORS:
            return False
        finally:
            self._acting = False
        return True

    # the program's calls

    def _watch(self) -> None:
        for name in SWITCHES:
            switch = attribute(self._binding, name)
            if switch is not None:
                self._watched[name] = (switch, self._stand_in(switch))
                setattr(self._binding, name, self._watched[name][1])

    def _stand_in(self, switch: Callable[..., Any]) -> Callable[..., Any]:
        def switch_watched(*args: Any, **kwargs: Any) -> Any:
            with self._watching:
                answer = switch(*args, **kwargs)
                if not self._acting and self.is_ours:
                    self.is_ours = False
                    is_on = args[0] if args else kwargs.get("enabled")
                    self.interference = "the program began a history of its own" if is_on else _SWITCHED_OFF
                return answer

        return switch_watched

    def _unwatch(self) -> None:
        for name, (switch, stand_in) in self._watched.items():
            if attribute(self._binding, name) is stand_in:
                setattr(self._binding, name, switch)
        self._watched = {}

    def abandon(self) -> None:
        """In a forked child: the lock may be held for ever, and what records here is nobody's."""
        self._watching, self.is_ours = threading.RLock(), False
        self._unwatch()


_SWITCHED_OFF = "the program switched the history off, which was recorded for this capture"


def _arguments(record: Callable[..., None] | None, entries: int | None) -> dict[str, object] | None:
    """Those to switch on, without stacks, or (entries None) off, as this version names them; None: it has no history to speak of."""
    try:
        names = inspect.signature(record).parameters if record is not None else {}
    except (TypeError, ValueError):
        return None
    on: dict[str, object]
    off: dict[str, object]
    if "max_entries" in names:  # since torch 2.1
        on = {"enabled": "all", "context": None, "stacks": "python", "max_entries": entries, "clear_history": True}
        off = {"enabled": None}
    elif "trace_alloc_max_entries" in names:
        on = {"enabled": True, "record_context": False, "trace_alloc_max_entries": entries}
        off = {"enabled": False}
    else:
        return None
    wanted = off if entries is None else on
    return {name: value for name, value in wanted.items() if name in names}


_all: weakref.WeakSet[History] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for history in list(_all):
        history.abandon()


os.register_at_fork(after_in_child=_after_fork_in_child)
