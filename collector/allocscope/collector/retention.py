"""What is older than anybody wants is taken away, a little now and then."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from allocscope.collector.captures import note_dropped, note_totals
from allocscope.collector.observation import Loop, Observation
from allocscope.storage.advice import AdviceStore
from allocscope.storage.captures import CaptureStore
from allocscope.storage.errors import StorageError
from allocscope.storage.repository import Repository

log = structlog.get_logger(__name__)

EVERY_S = 600.0
DAY_US = 86_400_000_000


ABANDONED_AFTER_US = 900_000_000
"""An upload to which nothing was added for so long is nobody's: its daemon was given up long before."""


@dataclass(frozen=True, slots=True)
class Retention:
    """How long, and how much."""

    keep_days: float
    """Samples, block maps and bills."""
    captures_keep_days: float
    """Snapshots, and advice."""
    captures_limit_bytes: int
    """All snapshots together, as they are stored."""


async def keep_pruned(
    repository: Repository,
    observation: Observation,
    retention: Retention,
    *,
    now_us: Callable[[], int],
    every_s: float = EVERY_S,
) -> None:
    """For ever."""
    while True:
        await prune_once(repository, observation.retention, before_us=now_us() - round(retention.keep_days * DAY_US))
        await prune_captures_once(repository.captures, observation, retention, now_us=now_us())
        before_us = now_us() - round(retention.captures_keep_days * DAY_US)
        await prune_advice_once(repository.advice, observation.retention, before_us=before_us)
        await asyncio.sleep(every_s)


async def prune_advice_once(advice: AdviceStore, loop: Loop, *, before_us: int) -> None:
    """One round, as `prune_once`."""
    try:
        with loop.round():
            await asyncio.to_thread(advice.prune, before_us=before_us)
    except StorageError as error:
        log.warning("no advice could be pruned", error=str(error))


async def prune_captures_once(
    captures: CaptureStore, observation: Observation, retention: Retention, *, now_us: int
) -> None:
    """One round, as `prune_once`."""
    try:
        with observation.retention.round():
            dropped = await asyncio.to_thread(
                captures.prune,
                before_us=now_us - round(retention.captures_keep_days * DAY_US),
                limit_bytes=retention.captures_limit_bytes,
                abandoned_before_us=now_us - ABANDONED_AFTER_US,
            )
            note_dropped(observation, dropped)
            await asyncio.to_thread(note_totals, observation, captures)
    except StorageError as error:
        log.warning("no captures could be pruned", error=str(error))


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
