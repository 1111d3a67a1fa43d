"""The spool from an event loop: a disk may take its time, the loop may not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from allocscope.daemon.spool import Spool, SpooledBatch

_Result = TypeVar("_Result")


class SpoolThread:
    """A spool, in a thread of its own."""

    def __init__(self, spool: Spool) -> None:
        self._spool = spool
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="spool")

    async def write(self, batches: list[SpooledBatch]) -> None:
        """Return when they are on disk; OSError: none of them is."""
        await self._do(partial(self._spool.write, batches))

    async def after(self, sequence: int) -> SpooledBatch | None:
        """The first batch with a higher number."""
        return await self._do(partial(self._spool.after, sequence))

    async def acknowledge(self, through: int) -> None:
        """The collector has everything up to this number."""
        await self._do(partial(self._spool.acknowledge, through))

    async def close(self) -> None:
        """Let go of the folder, and end the thread."""
        await self._do(self._spool.close)
        self._thread.shutdown()

    async def _do(self, call: Callable[[], _Result]) -> _Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)
