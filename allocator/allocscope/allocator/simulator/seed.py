"""A simulator that goes on from a snapshot's blocks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

from allocscope.allocator.settings import AllocatorSettings
from allocscope.allocator.simulator.blocks import AWAITING, STATES, UNMAPPED
from allocscope.allocator.simulator.device import PAGE_BYTES, Device, LowestGap
from allocscope.allocator.simulator.rules import NEWEST
from allocscope.allocator.simulator.simulator import Piece, Simulator
from allocscope.allocator.snapshot import DEFAULT_POOL, SnapshotSegment


def simulator_from(
    segments: Iterable[Mapping[str, Any]],
    settings: AllocatorSettings,
    *,
    device_free_bytes: int,
    device_total_bytes: int | None = None,
    allowed_bytes: int | None = None,
    version: str = NEWEST,
) -> Simulator:
    """An allocator with these segments, one device's as torch.cuda.memory_snapshot() gives them; sizes in bytes.

    What a snapshot does not tell is taken to be so: of equal blocks the lowest address comes first; ages for garbage collection
    are 0; an expandable segment begins with its first mapped page; private pools are in use, and split their blocks; frees that
    wait are not ready before they are waited for; counters begin with what is there. Where the device's total is not known it is
    what is reserved and free: then expandable segments may reserve too few addresses.

    Of the versions of PyTorch that `rules_of` knows, with its ValueError for another `version`. Raises as `adopt_segments` does.
    """
    told = list(segments)
    reserved = sum(segment["total_size"] for segment in told)
    free = max(device_free_bytes, 0)
    total = max(device_total_bytes or 0, reserved + free)
    end = max((segment["address"] + segment["total_size"] for segment in told), default=0)
    addresses = LowestGap(_pages(end + total + total // 8, PAGE_BYTES) + (1 << 30))
    device = Device(total, segments=addresses)
    simulator = Simulator(settings, device, version=version, memory_fraction=1.0)
    simulator.set_allowed(allowed_bytes)
    adopt_segments(simulator, told)
    simulator.forget_past()
    device.other_bytes = total - device.used_bytes - free
    return simulator


def adopt_segments(simulator: Simulator, segments: Iterable[Mapping[str, Any]]) -> None:
    """Go on with these segments, one device's as torch.cuda.memory_snapshot() gives them; sizes in bytes.

    PyTorch 2.0 to 2.14; where private pools and expandable segments are not told there are none. KeyError and ValueError: a segment
    or block lacks a key, or a block's state is not known.
    """
    total = simulator.device.total_bytes
    told = sorted(segments, key=_place_and_address)
    for (pool_id, kind, stream, expandable), group in groupby(told, _place):
        small = kind == "small"
        if not expandable:
            for segment in group:
                simulator.adopt(segment["address"], _pieces(segment), small=small, stream=stream, pool_id=pool_id)
            continue
        page = simulator.settings.page_bytes(small=small)
        span = _pages(total + total // 8, page)
        for ranges in _reservations(list(group), span):
            pieces = _with_gaps(ranges, span)
            simulator.adopt(ranges[0]["address"], pieces, small=small, stream=stream, pool_id=pool_id, page=page)


def as_told(segment: SnapshotSegment) -> dict[str, Any]:
    """A segment that was read from a snapshot, in the form of torch.cuda.memory_snapshot().

    Sizes in bytes; of PyTorch 1.13 to 2.14; requested_size is None where it is not known. Raises nothing.
    """
    return {
        "device": segment.device,
        "address": segment.address,
        "total_size": segment.total_size,
        "stream": segment.stream,
        "segment_type": segment.segment_type,
        "segment_pool_id": segment.pool_id,
        "is_expandable": segment.is_expandable,
        "blocks": [
            {"address": b.address, "size": b.size, "requested_size": b.requested_size, "state": _state(b.state)}
            for b in segment.blocks
        ],
    }


def _state(told: str) -> str:
    """One that is not known is taken for waiting."""
    return told if told in STATES else STATES[AWAITING]


def _place(segment: Mapping[str, Any]) -> tuple[tuple[int, int], str, int, bool]:
    pool_id = segment.get("segment_pool_id", DEFAULT_POOL)
    expandable = bool(segment.get("is_expandable", False))
    return (pool_id[0], pool_id[1]), segment["segment_type"], segment["stream"], expandable


def _place_and_address(segment: Mapping[str, Any]) -> tuple[Any, int]:
    return _place(segment), segment["address"]


def _pages(size: int, page: int) -> int:
    return -(-size // page) * page


def _pieces(segment: Mapping[str, Any]) -> list[Piece]:
    return [
        (b["size"], b["size"] if b.get("requested_size") is None else b["requested_size"], STATES.index(b["state"]))
        for b in segment["blocks"]
    ]


def _reservations(ranges: Sequence[Mapping[str, Any]], span: int) -> list[list[Mapping[str, Any]]]:
    """Mapped ranges, by address, of the same reserved addresses."""
    found: list[list[Mapping[str, Any]]] = []
    for each in ranges:
        if found and each["address"] + each["total_size"] <= found[-1][0]["address"] + span:
            found[-1].append(each)
        else:
            found.append([each])
    return found


def _with_gaps(ranges: Sequence[Mapping[str, Any]], span: int) -> list[Piece]:
    """The blocks of the ranges, and what is not mapped between and behind them."""
    start = at = ranges[0]["address"]
    pieces: list[Piece] = []
    for each in ranges:
        if each["address"] > at:
            pieces.append((each["address"] - at, 0, UNMAPPED))
        pieces += _pieces(each)
        at = each["address"] + each["total_size"]
    if at < start + span:
        pieces.append((start + span - at, 0, UNMAPPED))
    return pieces
