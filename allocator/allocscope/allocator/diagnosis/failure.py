"""An OutOfMemoryError in a history, or that a capture was taken at, judged by how the memory stood when it was raised."""

from __future__ import annotations

from dataclasses import dataclass

from allocscope.allocator.diagnosis.moment import Moment
from allocscope.allocator.messages import Verdict
from allocscope.allocator.settings import SMALL_MAX_BYTES, AllocatorSettings
from allocscope.allocator.snapshot import DEFAULT_POOL, TraceEntry
from allocscope.model import BlockGroup, Line, Pool
from allocscope.model.figures import size


@dataclass(frozen=True, slots=True)
class Failure:
    """An OutOfMemoryError, and the memory right then."""

    entry_index: int | None
    """Which entry of the device's history it is, from 0; None: a capture tells of it, which was taken right then."""
    entry: TraceEntry
    """Of one that a capture tells of, size is the segment's, and stream and pool are not known."""
    segment_bytes: int
    """What was asked of the driver for it."""
    moment: Moment | None
    """None: the history does not lead back to it."""
    problem: str | None
    """Why not."""
    verdict: Verdict
    why: tuple[str, ...]
    """The verdict's reasons: facts, each a sentence."""


def failure_of(
    entry_index: int, entry: TraceEntry, moment: Moment | None, problem: str | None, settings: AllocatorSettings
) -> Failure:
    """Judge one; PyTorch 1.13 to 2.14.

    - limit: the device had room for the segment, so something else refused it (a memory fraction, the driver).
    - fragmentation: what was free inside the allocator and on the device would together have held the request.
    - capacity: it would not.
    - unknown: the history does not lead back to it.
    """
    segment_bytes = _asked_of_driver(entry.size, settings)
    verdict, why = _judge(entry, segment_bytes, moment, problem, settings)
    return Failure(entry_index, entry, segment_bytes, moment, problem, verdict, why)


def failure_at_capture(entry: TraceEntry, moment: Moment, settings: AllocatorSettings) -> Failure:
    """Judge the one that a capture was taken at. PyTorch tells its observers which segment was wanted of the device, not for which request.

    As `failure_of`, but unknown where it depends on the request.
    """
    verdict, why = _judge_segment(entry.size, entry.device_free, moment, settings)
    return Failure(None, entry, entry.size, moment, None, verdict, why)


def _judge_segment(
    segment_bytes: int, device_free: int | None, moment: Moment, settings: AllocatorSettings
) -> tuple[Verdict, tuple[str, ...]]:
    if device_free is not None and device_free >= segment_bytes:
        return Verdict.LIMIT, _limit(device_free, segment_bytes, settings)
    inside = _inside(moment)
    together = inside + (device_free or 0)
    free = f"{_apart(inside, device_free)}: together {size(together)}"
    if together >= segment_bytes:
        return Verdict.FRAGMENTATION, (f"{free}, enough for {size(segment_bytes)}",)
    least = max(segment_bytes - settings.page_bytes(small=False), 0)  # a segment is larger than its request by less
    if device_free is None or together >= least:
        return Verdict.UNKNOWN, (free,)
    return Verdict.CAPACITY, (f"{free}, too little for {size(segment_bytes)}",)


def _asked_of_driver(rounded: int, settings: AllocatorSettings) -> int:
    if not settings.expandable:
        return settings.segment_bytes(rounded)
    page = settings.page_bytes(small=rounded <= SMALL_MAX_BYTES)
    return -(-rounded // page) * page


def _judge(
    entry: TraceEntry, segment_bytes: int, moment: Moment | None, problem: str | None, settings: AllocatorSettings
) -> tuple[Verdict, tuple[str, ...]]:
    device_free = entry.device_free
    if device_free is not None and device_free >= segment_bytes:
        return Verdict.LIMIT, _limit(device_free, segment_bytes, settings)
    if moment is None:
        return Verdict.UNKNOWN, (problem or "how the memory stood then is not known",)
    inside = _inside(moment)
    together = inside + (device_free or 0)
    enough = "enough" if together >= entry.size else "too little"
    free = _apart(inside, device_free)
    reasons = (f"{free}: together {size(together)}, {enough} for {size(entry.size)}", *_where_free(moment, entry))
    if together >= entry.size:
        return Verdict.FRAGMENTATION, reasons
    if device_free is None:
        return Verdict.UNKNOWN, reasons
    return Verdict.CAPACITY, reasons


def _apart(inside: int, device_free: int | None) -> str:
    on_device = size(device_free, "an unknown amount")
    return f"{size(inside)} was free inside the allocator and {on_device} on the device"


def _limit(device_free: int, segment_bytes: int, settings: AllocatorSettings) -> tuple[str, str]:
    limit = f"per_process_memory_fraction is {settings.memory_fraction}" if settings.memory_fraction < 1 else None
    reason = f"the device had {size(device_free)} free, enough for the {size(segment_bytes)} asked of it"
    return reason, limit or "a memory fraction set by the program, or the driver, refused it"


def _inside(moment: Moment) -> int:
    return sum(moment.bytes_of(line) for line in (Line.STRANDED, Line.RELEASABLE, Line.PRIVATE))


def _where_free(moment: Moment, entry: TraceEntry) -> tuple[str, ...]:
    """Which free bytes could have served the request, and which could not, whatever their size."""
    pool = Pool.SMALL if entry.size <= SMALL_MAX_BYTES else Pool.LARGE
    own = [group for group in moment.groups if _serves(group, pool, entry)]
    largest = max((group.largest_free_block_bytes or 0 for group in own), default=0)
    own_free = sum(map(_free, own))
    others_free = sum(map(_free, moment.groups)) - own_free
    told = [f"of its own pool and stream {size(own_free)} was free, the largest piece {size(largest)}"]
    if others_free:
        told.append(f"{size(others_free)} was free in other pools or streams, which cannot serve it")
    if waiting := moment.bytes_of(Line.AWAITING_FREE):
        told.append(f"{size(waiting)} was freed, but waited for another stream")
    return tuple(told)


def _serves(group: BlockGroup, pool: Pool, entry: TraceEntry) -> bool:
    private = group.private_pool
    pool_id = DEFAULT_POOL if private is None else (private.first, private.second)
    return (group.pool, group.stream, pool_id) == (pool, entry.stream, entry.pool_id)


def _free(group: BlockGroup) -> int:
    return group.stranded_bytes + group.releasable_bytes + group.private_bytes
