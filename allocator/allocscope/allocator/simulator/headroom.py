"""The largest request that a simulated allocator could serve: exact, where a block map only allows a lower bound.

Success is not monotone in size (ALLOCATOR.md 8), so the sizes at which it can end are listed, and the simulator is asked about
each, the largest first.
"""

from __future__ import annotations

from collections.abc import Iterator

from allocscope.allocator.headroom import Headroom
from allocscope.allocator.settings import (
    MIN_LARGE_BYTES,
    ROUND_LARGE_BYTES,
    SMALL_MAX_BYTES,
    SMALL_SEGMENT_BYTES,
)
from allocscope.allocator.simulator.blocks import FREE, UNMAPPED, Block, FreeSet, PoolId
from allocscope.allocator.simulator.simulator import Simulator
from allocscope.allocator.snapshot import DEFAULT_POOL
from allocscope.allocator.ways import Way
from allocscope.model import Pool, PrivatePool


def largest_request(
    simulator: Simulator, *, stream: int = 0, pool: Pool = Pool.LARGE, pool_id: PoolId = DEFAULT_POOL
) -> Headroom:
    """The largest request, in bytes, that would succeed now, of that pool and stream, and the way; nothing changes.

    Of the small pool no more than 1 MiB. Exact for the versions and settings that the simulator is exact for.
    """
    asked = simulator.copy()
    if pool_id != DEFAULT_POOL:
        asked.begin_pool(pool_id)
    private = None if pool_id == DEFAULT_POOL else PrivatePool(*pool_id)
    most = SMALL_MAX_BYTES if pool is Pool.SMALL else None
    for size in sorted(_ends(asked, stream, small=pool is Pool.SMALL), reverse=True):
        request = asked.settings.floor(size if most is None else min(size, most))
        if request <= 0 or (most is None and asked.settings.round(request) <= SMALL_MAX_BYTES):
            continue
        way = asked.way(request, stream)
        if way is not Way.NONE:
            return Headroom(pool, stream, private, request, way)
    return Headroom(pool, stream, private, 0, Way.NONE)


def _ends(simulator: Simulator, stream: int, *, small: bool) -> set[int]:
    """Sizes of blocks up to which requests could succeed, now and after a flush."""
    now = simulator.copy()
    now.reap()
    free_set = now.free_set(small=small, stream=stream)
    found = set(free_set.sizes[-1:])
    policy = _policy_bytes(now)
    found.update(_from_driver(now, free_set, policy, small=small))
    now.empty_cache()
    after = now.free_set(small=small, stream=stream)
    for each in (policy, _policy_bytes(now)):
        found.update(_from_driver(now, after, each, small=small))
    return found


def _policy_bytes(simulator: Simulator) -> int | None:
    """What throw_on_cudamalloc_oom lets be had: it judges an attempt, the first one too unless a memory fraction ends that before."""
    settings = simulator.settings
    if not settings.throw_on_oom:
        return None
    return int(settings.memory_fraction * simulator.device.total_bytes) - simulator.reserved_bytes


def _from_driver(simulator: Simulator, free_set: FreeSet, policy_bytes: int | None, *, small: bool) -> Iterator[int]:
    settings, device, reserved = simulator.settings, simulator.device, simulator.reserved_bytes
    limits = [device.free_bytes]
    if simulator.allowed_bytes is not None:
        limits.append(simulator.allowed_bytes - reserved)
    if policy_bytes is not None:
        limits.append(policy_bytes)
    segment = _largest_of(min(limits), small=small)
    if not settings.expandable:
        yield segment
        return
    permitted = [_largest_of(limit, small=small) for limit in limits[1:]]
    budget = device.free_bytes // settings.page_bytes(small=small) * settings.page_bytes(small=small)
    yield from (min(size, *permitted) if permitted else size for size in _grown(free_set, budget))
    yield from (min(limit, budget) for limit in permitted or [budget])


def _largest_of(segment_bytes: int, *, small: bool) -> int:
    """The largest block that a segment of at most so much could hold."""
    if small:
        return SMALL_MAX_BYTES if segment_bytes >= SMALL_SEGMENT_BYTES else 0
    size = segment_bytes // ROUND_LARGE_BYTES * ROUND_LARGE_BYTES
    return size if size >= MIN_LARGE_BYTES else 0


def _grown(free_set: FreeSet, budget: int) -> Iterator[int]:
    """For each place where an expandable segment could grow, what a block there would come to with so many bytes mapped."""
    for unmapped in free_set.unmapped:
        before = unmapped.prev
        first = before if before is not None and before.state == FREE else unmapped
        yield _filled(first, budget)


def _filled(block: Block, budget: int) -> int:
    size, at = 0, block
    while True:
        if at.state == UNMAPPED:
            taken = min(at.size, budget)
            size += taken
            budget -= taken
            if taken < at.size:
                return size
        elif at.state == FREE:
            size += at.size
        else:
            return size
        if at.next is None:
            return size
        at = at.next
