"""What captures need of the disk, in a thread of their own: a snapshot may be large, and neither the event loop nor the batches wait for it."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import ParamSpec, TypeVar

_Result = TypeVar("_Result")
_Given = ParamSpec("_Given")

NICENESS = 10
"""Compressing takes a core for some seconds, which a job on this node may need more."""


class CaptureThread:
    """One thread, which does one short piece of work after the other."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="captures", initializer=_be_nice)

    async def do(self, work: Callable[_Given, _Result], *args: _Given.args, **kwargs: _Given.kwargs) -> _Result:
        """What `work` returns, or raises."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, partial(work, *args, **kwargs))

    def close(self) -> None:
        """End it after what it is doing."""
        self._thread.shutdown(cancel_futures=True)


def _be_nice() -> None:
    """Linux has a niceness for each thread (setpriority(2), "C library/kernel differences")."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
