"""The bill of a device: where every byte is (DESIGN.md, Words), from blocks or from counters.

An allocator's six lines (requested, rounding, awaiting_free, stranded, releasable, private) add up to what it reserved, and
all lines of a device to the device's total, always, with none below zero. A line that is not known to the byte says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from allocscope.model import BillEntry, BlockMap, DeviceBill, Line, Sample

ALLOCATOR_LINES = (
    Line.REQUESTED,
    Line.ROUNDING,
    Line.AWAITING_FREE,
    Line.STRANDED,
    Line.RELEASABLE,
    Line.PRIVATE,
)
"""What an allocator reserved, in the order in which a bill tells it."""


@dataclass(frozen=True, slots=True)
class ProcessUse:
    """What a process with a probe uses of one device."""

    process_id: str
    lines: tuple[BillEntry, ...] = ()
    """Its allocator's (`allocator_lines`); none where its counters are not known yet."""
    used_bytes: int | None = None
    """All that it uses, by NVML or by itself; None: not known."""


def allocator_lines(
    process_id: str, sample: Sample | None, block_map: BlockMap | None, *, expandable: bool | None
) -> tuple[BillEntry, ...]:
    """The lines of one allocator from the newest of what is known of it.

    A map as new as the sample is billed as it is. An older one only helps the newer counters with what counters cannot tell:
    how much private pools hold free, and how the free bytes of expandable segments divide. Empty where nothing is known.

    Bytes. Any version of PyTorch: before 2.13 counters do not tell private pools, and what is free is inexact without a map; before
    2.0 maps do not tell what was requested. Raises nothing.
    """
    if block_map is not None and (sample is None or block_map.time_us >= sample.time_us):
        return lines_from_map(process_id, block_map)
    if sample is None:
        return ()
    lines = lines_from_counters(process_id, sample, expandable=expandable)
    if block_map is None or all(entry.exact for entry in lines if entry.line in _FREE_INSIDE):
        return lines
    return _divided_as(block_map, lines)


def lines_from_map(process_id: str, block_map: BlockMap) -> tuple[BillEntry, ...]:
    """The lines of one allocator from its blocks: exact.

    Where PyTorch (before 2.0) does not tell what live blocks were asked for, they count as requested, and how much of that is
    rounding is not known: both lines are then inexact.
    """
    groups = block_map.groups
    known = all(group.requested_bytes is not None and group.rounding_bytes is not None for group in groups)
    allocated = sum(group.allocated_bytes for group in groups)
    requested = sum(group.requested_bytes or 0 for group in groups) if known else allocated
    return (
        BillEntry(Line.REQUESTED, requested, known, process_id),
        BillEntry(Line.ROUNDING, allocated - requested, known, process_id),
        BillEntry(Line.AWAITING_FREE, sum(g.awaiting_free_bytes for g in groups), True, process_id),
        BillEntry(Line.STRANDED, sum(g.stranded_bytes for g in groups), True, process_id),
        BillEntry(Line.RELEASABLE, sum(g.releasable_bytes for g in groups), True, process_id),
        BillEntry(Line.PRIVATE, sum(g.private_bytes for g in groups), True, process_id),
    )


def lines_from_counters(process_id: str, sample: Sample, *, expandable: bool | None) -> tuple[BillEntry, ...]:
    """The lines of one allocator from its counters alone; they add up to `reserved_bytes`.

    - awaiting_free = active − allocated: exact.
    - With nothing waiting, requested and rounding are exact. While frees wait, requested_bytes counts the waiting blocks too,
      so requested = requested_bytes − awaiting_free, right but for the waiting blocks' rounding: both inexact.
    - stranded = inactive_split_bytes and releasable = the rest of what is free: exact where there are no private pools and no
      expandable segments. What private pools hold free cannot be told from these two, so with private pools (or where it is
      not known whether there are any: before PyTorch 2.13) these and `private`, then 0, are inexact; so they are with
      `expandable` segments, whose holes no counter knows (None: it is not known whether they are on).
    - Counters that contradict each other are cut to fit what is left of reserved_bytes, in the order of the lines, and the cut
      line is inexact.

    Empty where reserved, active or allocated are not known.
    """
    reserved, active, allocated = sample.reserved_bytes, sample.active_bytes, sample.allocated_bytes
    if reserved is None or active is None or allocated is None:
        return ()
    waiting = active - allocated
    asked, asked_exact = _requested(sample.requested_bytes, allocated, waiting)
    free_exact = sample.inactive_split_bytes is not None and sample.private_pools_reserved_bytes == 0
    free_exact = free_exact and expandable is False
    stranded = sample.inactive_split_bytes or 0
    wanted = (
        (Line.REQUESTED, asked, asked_exact),
        (Line.ROUNDING, allocated - asked, asked_exact),
        (Line.AWAITING_FREE, waiting, True),
        (Line.STRANDED, stranded, free_exact),
        (Line.RELEASABLE, reserved - active - stranded, free_exact),
        (Line.PRIVATE, 0, free_exact),
    )
    return _cut_to(reserved, (BillEntry(line, amount, exact, process_id) for line, amount, exact in wanted))


def _requested(requested_bytes: int | None, allocated: int, waiting: int) -> tuple[int, bool]:
    if requested_bytes is None:
        return allocated, False
    asked = min(max(requested_bytes - max(waiting, 0), 0), max(allocated, 0))
    return asked, waiting == 0 and asked == requested_bytes


_FREE_INSIDE = (Line.STRANDED, Line.RELEASABLE, Line.PRIVATE)


def _divided_as(block_map: BlockMap, lines: tuple[BillEntry, ...]) -> tuple[BillEntry, ...]:
    """Divide what is free inside an allocator as an older map did: private pools' part as it was, the rest in its proportion."""
    by_line = {entry.line: entry for entry in lines}
    free = sum(by_line[line].bytes for line in _FREE_INSIDE)
    then = {entry.line: entry.bytes for entry in lines_from_map("", block_map)}
    private = min(then[Line.PRIVATE], free)
    rest, rest_then = free - private, then[Line.STRANDED] + then[Line.RELEASABLE]
    if any(group.expandable for group in block_map.groups) and rest_then:
        stranded = rest * then[Line.STRANDED] // rest_then
    else:
        stranded = min(max(by_line[Line.STRANDED].bytes - private, 0), rest)
    divided = {Line.STRANDED: stranded, Line.RELEASABLE: rest - stranded, Line.PRIVATE: private}
    return tuple(
        replace(entry, bytes=divided[entry.line], exact=False) if entry.line in divided else entry for entry in lines
    )


def _cut_to(total: int, wanted: Iterable[BillEntry]) -> tuple[BillEntry, ...]:
    """Each entry at most what those before it leave of `total`, none below zero; what is left over joins the last but one."""
    entries, left = [], max(total, 0)
    for entry in wanted:
        amount = min(max(entry.bytes, 0), left)
        entries.append(entry if amount == entry.bytes else replace(entry, bytes=amount, exact=False))
        left -= amount
    if left:
        entries[-2] = replace(entries[-2], bytes=entries[-2].bytes + left, exact=False)
    return tuple(entries)


def device_bill(
    total_bytes: int,
    *,
    free_bytes: int | None,
    driver_bytes: int | None,
    probed: Sequence[ProcessUse],
    others_used_bytes: int | None,
) -> DeviceBill:
    """The bill of one device, whose lines add up to `total_bytes`.

    `driver_bytes` is NVML's reserved; `others_used_bytes` what NVML says of all processes without a probe together; each is
    None where it is not known, as without NVML.

    - A process's `outside` = what it uses − what its allocator reserved, at least 0 (inexact then). Where its use is not known
      the line is left out.
    - `driver` is left out where it is not known.
    - What is neither free nor anybody's is added to `other_processes`, which is inexact then, since outside of processes whose
      use is not known, an unknown driver's part and processes that NVML does not show are in it. With the driver and every
      process known, and nothing left, it is exact.
    - An unknown `free` is what the others leave, inexact.
    - Where the lines come to more than the total (they were read at different moments) they are lessened in this order:
      other_processes, outside (the largest first), driver, free, then the allocators' releasable, private, stranded,
      awaiting_free, rounding, requested; each lessened one is inexact.

    Does not depend on PyTorch's version. Raises nothing.
    """
    entries: list[BillEntry] = []
    for process in probed:
        entries += (replace(entry, process_id=process.process_id) for entry in process.lines)
        if process.used_bytes is not None:
            entries.append(_outside(process))
    others = max(others_used_bytes or 0, 0)
    entries.append(BillEntry(Line.OTHER_PROCESSES, others, others_used_bytes is not None))
    if driver_bytes is not None:
        entries.append(BillEntry(Line.DRIVER, max(driver_bytes, 0)))
    left = total_bytes - sum(entry.bytes for entry in entries)
    if free_bytes is None:
        entries.append(BillEntry(Line.FREE, max(left, 0), exact=False))
    else:
        entries.append(BillEntry(Line.FREE, max(free_bytes, 0)))
    everybody_else_known = free_bytes is not None and driver_bytes is not None
    everybody_else_known = everybody_else_known and all(process.used_bytes is not None for process in probed)
    _balance(entries, total_bytes, rest_is_others=everybody_else_known and others_used_bytes is None)
    return DeviceBill(total_bytes, tuple(entries))


def _outside(process: ProcessUse) -> BillEntry:
    outside = (process.used_bytes or 0) - sum(entry.bytes for entry in process.lines)
    return BillEntry(Line.OUTSIDE, max(outside, 0), outside >= 0 and bool(process.lines), process.process_id)


def _balance(entries: list[BillEntry], total_bytes: int, *, rest_is_others: bool) -> None:
    """Make the entries add up, by the rules of `device_bill`."""
    difference = total_bytes - sum(entry.bytes for entry in entries)
    if difference >= 0:
        at = next(i for i, entry in enumerate(entries) if entry.line is Line.OTHER_PROCESSES)
        others = entries[at]
        exact = rest_is_others or (others.exact and difference == 0)
        entries[at] = replace(others, bytes=others.bytes + difference, exact=exact)
        return
    for at in sorted(range(len(entries)), key=lambda i: (_LESSENED.index(entries[i].line), -entries[i].bytes)):
        taken = min(entries[at].bytes, -difference)
        if taken:
            entries[at] = replace(entries[at], bytes=entries[at].bytes - taken, exact=False)
            difference += taken


_LESSENED = (
    Line.OTHER_PROCESSES,
    Line.OUTSIDE,
    Line.DRIVER,
    Line.FREE,
    Line.RELEASABLE,
    Line.PRIVATE,
    Line.STRANDED,
    Line.AWAITING_FREE,
    Line.ROUNDING,
    Line.REQUESTED,
)
"""Which line gives way first where there is more than the total."""
