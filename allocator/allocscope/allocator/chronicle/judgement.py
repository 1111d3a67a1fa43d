"""What of a tally is normal, and what is not (ALLOCATOR.md 10), in sentences."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from allocscope.allocator.chronicle.events import Kind
from allocscope.allocator.chronicle.standing import Level
from allocscope.allocator.chronicle.tally import AGAIN_WITHIN, Tally
from allocscope.model.figures import size

LATE_DRIVER_SHARE = 0.01
"""Once it is warm, a job whose sizes repeat gets no more than this share of its allocations from the driver."""
ENOUGH = 500
"""Of fewer allocations no share is judged."""
FEW_EMPTY_CACHES = 3


class Subject(StrEnum):
    """What a sentence is about."""

    SPLITS_AND_MERGES = "splits_and_merges"
    SOURCE = "source"
    CHURN = "churn"
    FLUSHES = "flushes"
    EMPTY_CACHES = "empty_caches"
    GARBAGE_COLLECTIONS = "garbage_collections"
    WAITS = "waits"
    UNUSED = "unused"
    OOMS = "ooms"
    RETRIES = "retries"


@dataclass(frozen=True, slots=True)
class Finding:
    """A sentence on one subject."""

    subject: Subject
    normal: bool
    text: str


def judge(tally: Tally, peak: Level | None = None) -> tuple[Finding, ...]:
    """What is to be said; `peak`: when most was in use, where that is known. Nothing is said of what was not told."""
    return tuple(_findings(tally, peak))


def _findings(tally: Tally, peak: Level | None) -> Iterator[Finding]:
    if tally.splits or tally.merges:
        yield Finding(
            Subject.SPLITS_AND_MERGES,
            True,
            "the everyday path, whatever their number: a larger free block serves a smaller request, and what is freed beside it joins "
            "it again. They ask nothing of the driver, and are no sign of fragmentation",
        )
    yield from _source(tally)
    yield from _churn(tally)
    yield from _releases(tally)
    if tally.waits:
        yield Finding(
            Subject.WAITS,
            True,
            "record_stream keeps a block that was freed until other streams are done with it, as it should; until the next allocation "
            f"after that nobody can use it. At most {size(tally.waiting_peak_bytes)} waited at once",
        )
    if peak is not None and peak.reserved_bytes:
        unused = max(peak.reserved_bytes - peak.used_bytes, 0)
        yield Finding(
            Subject.UNUSED,
            True,
            f"when most was in use, {size(peak.used_bytes)}, {size(unused)} more was reserved. That is not fragmentation: most of it "
            "is as a rule cache for the next request. What of it lies in holes that cannot be given back, allocscope inspect tells",
        )
    yield from _failures(tally)


def _source(tally: Tally) -> Iterator[Finding]:
    count, late = tally.late_allocations, tally.late_driver
    if count < ENOUGH:
        return
    share = f"{late:,} of the {count:,} allocations in the second half"
    if late <= count * LATE_DRIVER_SHARE:
        yield Finding(
            Subject.SOURCE,
            True,
            f"{share} asked the driver: once a job has made its largest steps the cache serves it",
        )
    else:
        yield Finding(
            Subject.SOURCE,
            False,
            f"{share} still asked the driver, which is slow. That stops in a job whose sizes repeat; what keeps it up is sizes that are new "
            "in each step, empty_cache, a full device, or memory in use that grows",
        )


def _churn(tally: Tally) -> Iterator[Finding]:
    flow = tally.flow
    if not flow.given_back:
        return
    back = f"{size(flow.given_back_bytes)} was given back to the driver"
    if flow.again_bytes * 10 <= flow.given_back_bytes:
        yield Finding(Subject.CHURN, True, f"{back}, and hardly any of it was wanted again soon")
    else:
        yield Finding(
            Subject.CHURN,
            False,
            f"{back}, and {size(flow.again_bytes)} of the same was got again within {AGAIN_WITHIN:,} allocations. This is the costly thing: "
            "cudaFree waits for the whole device, and cudaMalloc is slow; look at what gave it back",
        )


def _releases(tally: Tally) -> Iterator[Finding]:
    flushes, emptied = tally.of(Kind.FLUSH), tally.of(Kind.EMPTY_CACHE)
    if flushes.count:
        yield Finding(
            Subject.FLUSHES,
            False,
            "each is a request that found no room on the device: all streams were waited for, the cache was given back, and the driver was "
            "asked again. It is the first sign that memory runs out; the step after it is an OutOfMemoryError",
        )
    if emptied.count:
        often = emptied.count > FEW_EMPTY_CACHES and tally.flow.again_bytes * 2 > emptied.given_back_bytes
        text = "a few, between parts of a program that differ, do no harm"
        if often:
            text = (
                "called again and again while the same memory is wanted again: it waits for the device, and all that it gave back must be got anew. "
                "It frees nothing that the allocator would not give back by itself before it fails"
            )
        yield Finding(Subject.EMPTY_CACHES, not often, text)
    if tally.of(Kind.GARBAGE_COLLECTION).count:
        yield Finding(
            Subject.GARBAGE_COLLECTIONS,
            True,
            "garbage_collection_threshold gives old free segments back before the device is full, as it was told to",
        )


def _failures(tally: Tally) -> Iterator[Finding]:
    last = tally.last_oom
    if last is not None:
        holes = "hole" if last.hole_count == 1 else "holes"
        text = f"at the last of them {size(last.free_bytes)} was free in {last.hole_count:,} {holes} of the allocator"
        if last.pool_hole_count:
            text += f", but the largest that its stream and pool could use was {size(last.pool_largest_bytes)}"
        else:
            text += ", none of which its stream and pool could use" if last.hole_count else ""
        told = f", and {size(last.device_free_bytes)} on the device" if last.device_free_bytes is not None else ""
        text += f"{told}, when {size(last.requested_bytes)} was asked for. allocscope inspect tells why"
        yield Finding(Subject.OOMS, False, text)
    elif tally.ooms:
        yield Finding(Subject.OOMS, False, "allocscope oom tells what their texts prove")
    if tally.retries:
        yield Finding(
            Subject.RETRIES,
            False,
            "PyTorch (2.13 on) says this each time that the driver has no room: once before a request that was served after a flush, twice "
            "before an OutOfMemoryError",
        )
