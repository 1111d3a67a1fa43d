"""What torch.cuda.memory_snapshot() tells of an allocator."""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter
from typing import Any

from allocscope.allocator.simulator.blocks import FREE, LIVE, STATES, UNMAPPED, Block, Segment
from allocscope.allocator.simulator.ledger import pool_id_of

_address = attrgetter("address")


def segments_of(blocks: Iterable[Block], device_index: int) -> list[dict[str, Any]]:
    """Segments by address, without frames; of an expandable segment each mapped range is one."""
    found: list[dict[str, Any]] = []
    owner: Segment | None = None
    end = -1
    for block in sorted(blocks, key=_address):
        if block.state == UNMAPPED:
            continue
        if block.segment is not owner or block.address != end:
            owner = block.segment
            found.append(_segment(owner, block.address, device_index))
        end = block.address + block.size
        _add(found[-1], block)
    return found


def _segment(segment: Segment, address: int, device_index: int) -> dict[str, Any]:
    free_set = segment.free_set
    return {
        "device": device_index,
        "address": address,
        "total_size": 0,
        "allocated_size": 0,
        "active_size": 0,
        "requested_size": 0,
        "stream": free_set.stream,
        "segment_type": "small" if free_set.pool.small else "large",
        "segment_pool_id": pool_id_of(free_set.pool.owner),
        "is_expandable": segment.expandable,
        "blocks": [],
    }


def _add(segment: dict[str, Any], block: Block) -> None:
    size, state = block.size, block.state
    segment["total_size"] += size
    if state != FREE:
        segment["active_size"] += size
        segment["requested_size"] += block.requested
    if state == LIVE:
        segment["allocated_size"] += size
    segment["blocks"].append(
        {"address": block.address, "size": size, "requested_size": block.requested, "state": STATES[state]}
    )
