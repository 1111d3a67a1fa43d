"""The spool from an event loop: a disk may take its time, the loop may not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from allocscope.daemon.spool import Spool

_Result = TypeVar("_Result")


class SpoolThread:
    """A spool's thread."""

    def __init__(self, spool: Spool) -> None:
        self._spool = spool
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="spool")

    async def do(self, call: Callable[[], _Result]) -> _Result:
        """Call it there, after all that was asked for before."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)

    async def close(self) -> None:
        """Let go of the folder, and end the thread."""
        await self.do(self._spool.close)
        self._thread.shutdown()
