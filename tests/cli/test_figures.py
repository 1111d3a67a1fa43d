"""Sizes as people give them, and moments."""

from __future__ import annotations

import argparse

import pytest

from allocscope.cli.figures import moment, read_size


@pytest.mark.parametrize(("told", "bytes_"), [("7", 7), ("2 KiB", 2048), ("1.5GiB", 3 << 29)])
def test_a_size_is_read(told: str, bytes_: int) -> None:
    assert read_size(told) == bytes_


@pytest.mark.parametrize("told", ["", "-1", "1.5", "2GB", "lots", "9" * 30])
def test_what_is_no_size_is_refused_with_an_example(told: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=r"is not a number of bytes, such as 25769803776 or 24GiB"):
        read_size(told)


@pytest.mark.parametrize(
    ("time_us", "written"),
    [
        (None, "–"),
        (1_700_000_000_999_999, "2023-11-14 22:13:20"),
        (1 << 62, "4611686018427387904 µs"),
    ],
)
def test_a_moment_is_in_utc_and_a_broken_clock_breaks_nothing(time_us: int | None, written: str) -> None:
    assert moment(time_us) == written
