"""What is older than anybody wants is taken away, a little now and then."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from allocscope.collector.observation import Loop
from allocscope.storage.errors import StorageError
from allocscope.storage.repository import Repository

log = structlog.get_logger(__name__)

EVERY_S = 600.0
DAY_US = 86_400_000_000


async def keep_pruned(
    repository: Repository, loop: Loop, *, keep_days: float, now_us: Callable[[], int], every_s: float = EVERY_S
) -> None:
    """For ever."""
    while True:
        await prune_once(repository, loop, before_us=now_us() - round(keep_days * DAY_US))
        await asyncio.sleep(every_s)


async def prune_once(repository: Repository, loop: Loop, *, before_us: int) -> None:
    """One round; what the database does not allow now it may the next time."""
    try:
        with loop.round():
            pruned = await asyncio.to_thread(repository.prune, before_us=before_us)
    except StorageError as error:
        log.warning("nothing could be pruned", error=str(error))
        return
    if pruned.samples or pruned.block_maps or pruned.bills:
        log.info("pruned", samples=pruned.samples, block_maps=pruned.block_maps, bills=pruned.bills)
