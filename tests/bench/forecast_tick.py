"""A tick of the forecast over ten thousand allocators on one core: a sample of each, a block map of each tenth, and what follows."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import numpy as np

from allocscope.alerts.forecast import Figures, Outlooks
from allocscope.model import BlockGroup, BlockMap, Pool, SizeClass
from tests.bench.figures import Figure

ALLOCATORS, SECONDS, WARM_S = 10_000, 300, 100
GIB = 1 << 30
TOTAL, START_US, S = 80 * GIB, 1_800_000_000_000_000, 1_000_000
HOLES, LIVE = SizeClass(GIB, 2, 2 * GIB, GIB), SizeClass(4 * GIB, 5, 20 * GIB, 5 * GIB)
GROUP = BlockGroup(
    pool=Pool.LARGE, stream=0, private_pool=None, expandable=False, segment_count=1, reserved_bytes=22 * GIB,
    requested_bytes=20 * GIB, rounding_bytes=0, allocated_bytes=20 * GIB, awaiting_free_bytes=0, stranded_bytes=2 * GIB,
    releasable_bytes=0, private_bytes=0, free_stranded=(HOLES,), free_releasable=(), live=(LIVE,),
    largest_free_block_bytes=GIB,
)  # fmt: skip


def figures() -> Iterator[Figure]:
    """CPU time of one thread."""
    yield from _ticks("a tick of 10,000 allocators", _a_few_flush)
    yield from _ticks("a tick where all flush, and are left less and less", _all_flush)
    yield Figure("what one allocator takes", [Outlooks().row_bytes], "bytes", "under 2,048")


Flushing = Callable[[int], tuple[np.ndarray, np.ndarray]]
"""By the second: how often each has flushed, and what it leaves of the device at least, bytes."""


def _a_few_flush(t: int) -> tuple[np.ndarray, np.ndarray]:
    """Each tenth once a minute."""
    return np.where(np.arange(ALLOCATORS) % 10 == 0, t // 60, 0), np.full(ALLOCATORS, GIB)


def _all_flush(t: int) -> tuple[np.ndarray, np.ndarray]:
    """All of them every 20 s, within 20 s."""
    flushes = (t + np.arange(ALLOCATORS) % 20) // 20
    return flushes, 9 * GIB - flushes * (GIB // 4)


def _ticks(what: str, flushing: Flushing) -> Iterator[Figure]:
    outlooks, draw = Outlooks(), np.random.default_rng(0)
    rows = np.array(
        [outlooks.add(device_total_bytes=TOTAL, allowed_bytes=None, allocator_conf="") for _ in range(ALLOCATORS)]
    )
    base, growth = draw.integers(10 * GIB, 20 * GIB, ALLOCATORS), draw.integers(0, GIB // 60, ALLOCATORS)
    observing, mapping, foreseeing, ticks = [], [], [], []
    for t in range(1, SECONDS + 1):
        told = _figures(t, base + growth * t + draw.integers(0, 20 * GIB, ALLOCATORS), *flushing(t))
        began = time.thread_time()
        outlooks.observe(rows, told)
        observed = time.thread_time()
        for row in rows[t % 10 :: 10].tolist():
            outlooks.observe_map(row, BlockMap(t, START_US + t * S, (GROUP,)))
        mapped = time.thread_time()
        outlooks.forecast(rows, told.time_us)
        ended = time.thread_time()
        if t > WARM_S:
            observing.append(1e3 * (observed - began))
            mapping.append(1e3 * (mapped - observed))
            foreseeing.append(1e3 * (ended - mapped))
            ticks.append(1e3 * (ended - began))
    yield Figure(what, ticks, "ms", "under 1,000")
    yield Figure("  of it 10,000 samples", observing, "ms")
    yield Figure("  of it 1,000 block maps", mapping, "ms")
    yield Figure("  of it 10,000 forecasts", foreseeing, "ms")


def _figures(t: int, live: np.ndarray, flushes: np.ndarray, left: np.ndarray) -> Figures:
    """With a device that is nearly full."""
    every = np.ones(ALLOCATORS, np.int64)
    just_flushed = (flushes > 0) & (left > GIB)
    reserved = np.where(just_flushed, 79 * GIB - left, np.minimum(np.maximum(60 * GIB, live + GIB), 79 * GIB))
    return Figures(
        sequence=every * t,
        time_us=every * (START_US + t * S),
        allocated_bytes=live,
        reserved_bytes=reserved,
        active_bytes=live,
        inactive_split_bytes=every * GIB,
        allocated_peak_bytes=live + GIB,
        allocation_count=every * 1000,
        inactive_split_count=every * 37,
        num_alloc_retries=flushes,
        num_device_alloc=100 + flushes,
        num_device_free=flushes,
        private_pools_reserved_bytes=every * 0,
        device_total_bytes=every * TOTAL,
        device_free_bytes=79 * GIB - reserved,
    )
