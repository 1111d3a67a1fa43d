"""One whole gzip stream of bounded size, and nothing else."""

import gzip
import os
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allocscope.collector.whole_gzip import NotWhole, TooLarge, WholeGzip

GOOD = gzip.compress(os.urandom(3000) + bytes(7000))


def shown(data: bytes, *, limit_bytes: int = 1 << 30, each: int = 1000) -> int:
    whole = WholeGzip(limit_bytes)
    for at in range(0, len(data), each):
        whole.see(data[at : at + each])
    return whole.end()


@pytest.mark.parametrize("each", [1, 7, 1000, 1 << 20])
def test_a_whole_stream_is_one_however_it_is_cut(each):
    assert shown(GOOD, each=each) == 10_000
    assert shown(GOOD, each=each, limit_bytes=10_000) == 10_000
    assert shown(gzip.compress(b""), each=each) == 0


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "ends in the middle"),
        (GOOD[:-1], "ends in the middle"),
        (GOOD[:2000], "ends in the middle"),
        (GOOD + b"x", "something follows the end"),
        (GOOD + GOOD, "something follows the end"),
        (GOOD + bytes(2000), "something follows the end"),
        (b"\x80\x04]." * 100, "damaged gzip"),
        (GOOD[:1000] + b"\xff\x00" * 10 + GOOD[1020:], "damaged gzip"),
        (GOOD[:-8] + bytes(8), "damaged gzip"),
    ],
)
@pytest.mark.parametrize("each", [1, 1000, 1 << 20])
def test_anything_else_is_not_and_says_why(data, says, each):
    with pytest.raises(NotWhole, match=says):
        shown(data, each=each)


def test_a_bomb_is_found_out_without_being_unpacked():
    """A gigabyte in a megabyte: what lies in memory is bounded, and so is what is looked at."""
    bomb = gzip.compress(bytes(1 << 28), compresslevel=9)
    whole = WholeGzip(64 << 20)
    tracemalloc.start()
    try:
        with pytest.raises(TooLarge, match="unpacks to more than 67108864 bytes"):
            whole.see(bomb)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()
    assert whole.unpacked_bytes <= 66 << 20


@given(st.lists(st.sampled_from([b"\0", b"ab" * 50, os.urandom(200)]), max_size=40), st.integers(1, 300))
def test_of_any_contents_it_counts_every_byte(parts, each):
    contents = b"".join(parts)
    assert shown(gzip.compress(contents), each=each) == len(contents)


@given(st.integers(0, len(GOOD) - 1), st.integers(1, 255))
def test_one_byte_that_changed_on_the_way_is_noticed_where_gzip_can_tell(at, change):
    """The header's time and system are of no account; everything else is."""
    damaged = bytearray(GOOD)
    damaged[at] ^= change
    if 3 <= at <= 9:
        return
    with pytest.raises(NotWhole):
        shown(bytes(damaged))
