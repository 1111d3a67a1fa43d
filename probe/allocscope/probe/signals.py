"""Handlers of signals that the job has in Python: kept from running amid the probe's own code, which would take what they raise for its own.

Python runs them in the middle of whatever its main thread does. They run as soon as the probe is done; what they raise is the job's.
"""

from __future__ import annotations

import ctypes
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any

ACTION_BYTES = 512
"""More than any system's `struct sigaction`."""
MOST_TRIES = 8
"""To put a handler back, while other signals' handlers raise."""


class HeldOff:
    """`with HeldOff():` on the main thread; elsewhere, it does nothing, as handlers do not run there. Leaving it may raise what they raise."""

    def __init__(self) -> None:
        self._handlers: dict[int, tuple[Callable[..., Any], Any]] = {}
        """By number: the job's handler, and the system's record of it."""
        self._came: dict[int, Any] = {}
        """Those that came meanwhile, with the frame that each was to have."""

    def __enter__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        try:
            for number in range(1, signal.NSIG):
                handler = signal.getsignal(number)
                if callable(handler):
                    self._hold(number, handler)
        except BaseException:  # a handler that ran in between
            self._put_all_back()
            raise

    def __exit__(self, *_: object) -> None:
        self._put_all_back()
        came, self._came = self._came, {}
        for number, frame in came.items():
            handler = signal.getsignal(number)
            if callable(handler):
                handler(number, frame)

    def _hold(self, number: int, handler: Callable[..., Any]) -> None:
        before = _action(number)
        if before is None:
            return
        self._handlers[number] = handler, before
        with suppress(ValueError, OSError):
            signal.signal(number, self._note)
        if _handler_of(_action(number)) != _handler_of(before):  # a library's own, in C, lies over the job's
            self._put_back(number)

    def _note(self, number: int, frame: Any) -> None:
        self._came.setdefault(number, frame)

    def _put_all_back(self) -> None:
        raised: BaseException | None = None
        for _ in range(MOST_TRIES):
            try:
                for number in list(self._handlers):
                    self._put_back(number)
                break
            except BaseException as error:  # noqa: BLE001 (of a handler that is back already)
                raised = error
        if raised is not None:
            raise raised

    def _put_back(self, number: int) -> None:
        handler, action = self._handlers[number]
        signal.signal(number, handler)
        _set_action(number, action)  # with its flags, of which Python knows nothing
        self._handlers.pop(number, None)


@cache
def _sigaction() -> Callable[..., int] | None:
    try:
        found: Callable[..., int] = ctypes.CDLL(None).sigaction
    except (AttributeError, OSError):
        return None
    return found


def _action(number: int) -> Any:
    """The system's record of who handles a signal; None: it cannot be had."""
    record, ask = ctypes.create_string_buffer(ACTION_BYTES), _sigaction()
    return record if ask is not None and ask(number, None, record) == 0 else None


def _set_action(number: int, action: Any) -> None:
    put = _sigaction()
    if put is not None:
        put(number, action, None)


def _handler_of(action: Any) -> bytes | None:
    """Its address, which comes first in the record on Linux and macOS."""
    return None if action is None else action.raw[: ctypes.sizeof(ctypes.c_void_p)]
