"""How a device stood when a message was written: what its figures, each a range, leave possible."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from allocscope.allocator.messages.figures import Range
from allocscope.allocator.messages.message import OomMessage, ProcessFigure

MIB, GIB = 1 << 20, 1 << 30

OUTSIDE = Range(0, 2 * GIB)
"""What this process may hold beside its allocator, where the text does not say: context, NCCL, libraries' workspaces."""
DRIVER = Range(0, 1 * GIB)
"""What the driver keeps of a device for itself, in nobody's name."""


@dataclass(frozen=True, slots=True)
class Standing:
    """All in bytes; a range that is not known is endless, and `…_known` says whether it is."""

    requested: Range
    total: Range
    free: Range
    """Where the text does not say: from nothing to all that PyTorch did not reserve."""
    free_known: bool
    reserved: Range
    reserved_known: bool
    live: Range
    """Allocated, without what private pools keep free."""
    stranded: Range
    """Free inside the allocator after it gave back what it could: an OOM text is written after the flush."""
    stranded_known: bool
    others: Range
    """Held on the device by other processes, or by nobody that the text names."""
    others_named: Range
    own_pid: int | None
    """Which `Process N` is in truth this job, seen from inside a container."""
    among_named: bool
    """This job is one of the named processes, whichever."""


def standing(message: OomMessage) -> Standing:
    """The standing that a message of the caching allocator tells of."""
    reserved_known, reserved = _reserved(message)
    stranded_known, stranded = _stranded(message)
    total, requested = Range.of(message.total), Range.of(message.requested)
    private = Range.of(message.private_pools) if message.private_pools else Range(0, 0)
    live = Range.of(message.allocated) - private
    free = Range.of(message.free) if message.free else Range(0, (total - reserved).high)
    candidates = _own_candidates(message, reserved, total, free) if reserved_known else ()
    own = candidates[0] if len(candidates) == 1 else None
    named = _sum(p for p in message.other_processes if p is not own)
    if len(candidates) > 1:
        named = named - Range(min(Range.of(p.used).low for p in candidates), max(_high(p) for p in candidates))
    this = _this(message, own, candidates, reserved, reserved_known=reserved_known)
    others = named
    if message.total and message.free and this is not None:
        unnamed = total - free - this - named - DRIVER
        others = Range(
            named.low + unnamed.low, None if named.high is None or unnamed.high is None else named.high + unnamed.high
        )
    return Standing(
        requested, total, free, message.free is not None, reserved, reserved_known, live, stranded, stranded_known,
        others, named, own.pid if own else None, bool(candidates),
    )  # fmt: skip


def _reserved(message: OomMessage) -> tuple[bool, Range]:
    if message.reserved:
        return True, Range.of(message.reserved)
    free_inside = message.unallocated or message.cached
    if message.allocated and free_inside:
        return True, Range.of(message.allocated) + Range.of(free_inside)
    return False, Range(Range.of(message.allocated).low)


def _stranded(message: OomMessage) -> tuple[bool, Range]:
    free_inside = message.unallocated or message.cached
    if free_inside:
        return True, Range.of(free_inside)
    if message.reserved and message.allocated:
        return True, Range.of(message.reserved) - Range.of(message.allocated)
    return False, Range()


def _sum(processes: Iterable[ProcessFigure]) -> Range:
    total = Range(0, 0)
    for process in processes:
        total = total + Range.of(process.used)
    return total


def _high(process: ProcessFigure) -> int:
    return process.used.high_bytes if process.used else 0


def _own_candidates(message: OomMessage, reserved: Range, total: Range, free: Range) -> tuple[ProcessFigure, ...]:
    """The named processes that may be this one, where there is no room on the device for it beside them all.

    PyTorch knows itself by its pid, which inside a container is not what NVML says: then "this process" is missing, and it
    stands among the others.
    """
    if message.this_process or not message.other_processes:
        return ()
    beside = _sum(message.other_processes) + reserved
    used = total - free
    if used.high is None or beside.low <= used.high:
        return ()
    return tuple(p for p in message.other_processes if p.used and p.used.high_bytes >= reserved.low)


def _this(
    message: OomMessage,
    own: ProcessFigure | None,
    candidates: tuple[ProcessFigure, ...],
    reserved: Range,
    *,
    reserved_known: bool,
) -> Range | None:
    if message.this_process:
        return Range.of(message.this_process)
    if own:
        return Range.of(own.used)
    if candidates:
        return Range(min(Range.of(p.used).low for p in candidates), max(_high(p) for p in candidates))
    return reserved + OUTSIDE if reserved_known else None
