"""A block map says where every byte of an allocator is, from the segments of a snapshot (ALLOCATOR.md 7 and 8)."""

from __future__ import annotations

from typing import Any

import pytest

from allocscope.model import BlockGroup, Pool, PrivatePool, SizeClass, condense, size_class_floor

MIB = 1 << 20


def segment(*blocks: tuple[int, int | None, str], address: int = 0, **more: Any) -> dict[str, Any]:
    """A segment of (size, requested size, state) blocks."""
    return {
        "address": address,
        "total_size": sum(size for size, _, _ in blocks),
        "segment_type": "large",
        "stream": 0,
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "blocks": [{"size": size, "requested_size": requested, "state": state} for size, requested, state in blocks],
    } | more


def test_a_hole_is_stranded_and_a_free_segment_is_releasable() -> None:
    held = segment((12 * MIB, 12 * MIB - 100, "active_allocated"), (8 * MIB, 3, "inactive"))
    whole = segment((20 * MIB, 5, "inactive"), address=64 * MIB)
    (group,) = condense([whole, held])
    assert group == BlockGroup(
        pool=Pool.LARGE,
        stream=0,
        private_pool=None,
        expandable=False,
        segment_count=2,
        reserved_bytes=40 * MIB,
        requested_bytes=12 * MIB - 100,
        rounding_bytes=100,
        allocated_bytes=12 * MIB,
        awaiting_free_bytes=0,
        stranded_bytes=8 * MIB,
        releasable_bytes=20 * MIB,
        private_bytes=0,
        free_stranded=(SizeClass(8 * MIB, 1, 8 * MIB, 8 * MIB),),
        free_releasable=(SizeClass(20 * MIB, 1, 20 * MIB, 20 * MIB),),
        live=(SizeClass(10 * MIB, 1, 12 * MIB - 100, 12 * MIB - 100),),
        largest_free_block_bytes=20 * MIB,
    )


def test_of_an_expandable_segment_whole_pages_inside_free_blocks_are_releasable() -> None:
    mapped = segment(
        (5 * MIB, 5 * MIB, "active_allocated"),
        (35 * MIB, 0, "inactive"),  # from 5 to 40 MiB: the page from 20 to 40 lies in it
        (5 * MIB, 5 * MIB, "active_allocated"),
        (15 * MIB, 0, "inactive"),  # the end of the third page: no whole one
        is_expandable=True,
    )
    (group,) = condense([mapped])
    assert (group.releasable_bytes, group.stranded_bytes) == (20 * MIB, 30 * MIB)
    assert (group.tail_bytes, group.tail_kept_bytes) == (15 * MIB, 15 * MIB)


def test_page_boundaries_count_from_the_mapped_range_not_from_address_zero() -> None:
    (group,) = condense(
        [segment((5 * MIB, 1, "active_allocated"), (35 * MIB, 0, "inactive"), address=2 * MIB, is_expandable=True)]
    )
    assert (group.releasable_bytes, group.tail_bytes, group.tail_kept_bytes) == (20 * MIB, 35 * MIB, 15 * MIB)


def test_pools_streams_and_private_pools_are_kept_apart_and_what_a_private_pool_holds_free_is_private() -> None:
    groups = condense(
        [
            segment((20 * MIB, 0, "inactive")),
            segment((20 * MIB, 0, "inactive"), stream=7),
            segment((2 * MIB, 0, "inactive"), segment_type="small"),
            segment((20 * MIB, 0, "inactive"), segment_pool_id=[0, 3]),
        ]
    )
    assert [(g.pool, g.stream, g.private_pool, g.releasable_bytes, g.private_bytes) for g in groups] == [
        (Pool.LARGE, 0, None, 20 * MIB, 0),
        (Pool.LARGE, 0, PrivatePool(0, 3), 0, 20 * MIB),
        (Pool.LARGE, 7, None, 20 * MIB, 0),
        (Pool.SMALL, 0, None, 2 * MIB, 0),
    ]


def test_blocks_that_wait_for_another_stream_are_neither_live_nor_free() -> None:
    (group,) = condense([segment((20 * MIB, 20 * MIB, "active_pending_free"))])
    assert (group.allocated_bytes, group.awaiting_free_bytes, group.stranded_bytes, group.live) == (0, 20 * MIB, 0, ())


def test_requested_sizes_that_pytorch_does_not_tell_are_unknown_not_zero() -> None:
    blocks = segment((20 * MIB, None, "active_allocated"))
    for block in blocks["blocks"]:
        del block["requested_size"]
    (group,) = condense([blocks])
    assert (group.requested_bytes, group.rounding_bytes, group.allocated_bytes) == (None, None, 20 * MIB)


@pytest.mark.parametrize(
    ("size", "floor"),
    [(0, 0), (1, 1), (7, 7), (8, 8), (9, 8), (512, 512), (639, 512), (640, 640), (1023, 896), (1024, 1024)],
)
def test_size_classes_are_four_an_octave(size: int, floor: int) -> None:
    assert size_class_floor(size) == floor
