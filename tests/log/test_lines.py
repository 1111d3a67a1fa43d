"""Logs in the form that blog posts show become events, with what they tell and no more."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allocscope.allocator.chronicle.events import Allocated, Freed, Merged, Pool, Retry
from allocscope.allocator.chronicle.lines import LONGEST_LINE, LineReader
from allocscope.cli.log_options import stamp_us

MIB, GIB = 1 << 20, 1 << 30
ADDRESS = 0x7F8C4A000000
POST = """\
[INFO] Allocator: block 0x7f8c4a000000 (size 1024 MB) allocated to stream 0
[INFO] Allocator: block 0x7f8c4a000000 freed, returning to pool
[INFO] Allocator: merging block 0x7f8c4a000000 with adjacent free block
[INFO] Allocator: new free block size 2048 MB
"""
STREAM_0, NOT_TOLD = Pool(None, 0, None, None), Pool(None, None, None, None)


def events(text, size=1 << 20):
    chunks = (text[at : at + size] for at in range(0, len(text), size))
    return list(LineReader(stamp_us).events(chunks))


@pytest.mark.parametrize("size", [1, 7, 1 << 20])
def test_the_lines_of_a_post(size):
    assert events(POST, size) == [
        Allocated(1, None, STREAM_0, ADDRESS, None, GIB, None, None, None),
        Freed(2, None, STREAM_0, ADDRESS, None, GIB),
        Merged(3, None, STREAM_0, ADDRESS, 2 * GIB, GIB, None, None),
    ]


@pytest.mark.parametrize(
    "line",
    [
        "block 0x7f8c4a000000 (size 1024 MB) allocated to stream 0",
        "2026-01-31 12:00:00,250 - torch.cuda - INFO - Allocator: block 0x7f8c4a000000 (size 1024 MB) allocated to stream 0",
        "[rank0]: [INFO] ALLOCATOR: BLOCK 0X7F8C4A000000 (SIZE: 1024MB) ALLOCATED ON STREAM 0",
        "[info] allocator: Block 0x7f8c4a000000 (1.0 GiB) is allocated to stream: 0",
        "Allocator: block 0x7f8c4a000000, size=1073741824 bytes, allocated to stream #0",
        '{"log":"[INFO] Allocator: block 0x7f8c4a000000 (size 1048576 KB) allocated to stream 0\\n","stream":"stderr"}',
        "\x1b[32m[INFO]\x1b[0m Allocator: block 0x7f8c4a000000 (size 1024 MB) allocated to stream 0\r",
        "(worker pid=77) [INFO] Allocator: block 0x7f8c4a000000 (size 1024 MB) allocated for stream 0",
    ],
)
def test_prefixes_units_and_case_do_not_matter(line):
    (event,) = events(line)
    assert event._replace(time_us=None) == Allocated(1, None, STREAM_0, ADDRESS, None, GIB, None, None, None)


def test_what_a_line_says_of_device_pool_and_time_is_kept():
    (event,) = events(
        "2026-01-31T12:00:00.25Z cuda:3 block 0x10 (size 512 B) allocated to stream 0x7f00 from the small pool"
    )
    assert event == Allocated(1, 1_769_860_800_250_000, Pool(3, 0x7F00, True, None), 16, None, 512, None, None, None)


def test_what_is_not_told_is_not_known():
    assert events("block 0x10 freed") == [Freed(1, None, NOT_TOLD, 16, None, None)]
    assert events("merging block 0x10 with adjacent free block") == [
        Merged(1, None, NOT_TOLD, 16, None, None, None, None)
    ]


@pytest.mark.parametrize(
    "line",
    [
        "",
        "epoch 3: data block 7 allocated to worker 2",
        "block 0x7f8c4a000000",
        "the building block 0x10 is not for free",
        "new free block size 2048 MB",
        "new free block size lots",
        "block 0xzz (size 1 MB) allocated to stream 0",
        "block 0x" + "f" * 40 + " freed",
    ],
)
def test_other_lines_tell_nothing(line):
    assert events(f"{line}\n{line}") == []


def test_a_merge_ends_where_something_else_is_told():
    text = "merging block 0x10 with adjacent free block\nblock 0x20 freed\nnew free block size 4 MB\n"
    assert events(text) == [
        Merged(1, None, NOT_TOLD, 16, None, None, None, None),
        Freed(2, None, NOT_TOLD, 32, None, None),
    ]


def test_other_lines_between_a_merge_and_what_came_of_it_do_not_matter():
    text = "merging block 0x10 with adjacent free block\nepoch 3\n\nnew free block size 4 MB\n"
    assert events(text) == [Merged(1, None, NOT_TOLD, 16, 4 * MIB, None, None, None)]


def test_pytorchs_own_warning_that_the_driver_had_no_room():
    line = (
        "[W131 12:00:00.000000000 CUDACachingAllocator.cpp:3] Warning: memory allocation failed with OOM on device 1 while "
        "trying to allocate 20971520 bytes (free: 1048576, total: 85899345920)."
    )
    assert events(line) == [Retry(1, None, Pool(1, None, None, None), 20 * MIB, MIB)]


def test_a_line_without_end_is_read_in_bounded_memory():
    reader = LineReader(stamp_us)
    chunks = (piece for piece in ["block 0x10 freed ", *["x" * LONGEST_LINE] * 5, "\nblock 0x20 freed"])
    assert [event.address for event in reader.events(chunks)] == [16, 32]  # type: ignore[union-attr]


@given(
    text=st.text(max_size=200),
    places=st.lists(st.tuples(st.floats(0, 1), st.integers(0, 30), st.text(max_size=6)), max_size=5),
)
def test_whatever_a_log_holds_it_is_read_to_its_end(text, places):
    whole = f"{POST}{text}\n{POST}"
    for place, cut, put_in in places:
        at = int(place * len(whole))
        whole = whole[:at] + put_in + whole[at + cut :]
    reader = LineReader(stamp_us)
    told = list(reader.events([whole]))
    assert reader.lines >= whole.count("\n")
    assert len(told) <= 2 * reader.lines
