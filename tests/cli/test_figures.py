"""Sizes and times as people give and read them."""

from __future__ import annotations

import argparse

import pytest

from allocscope.cli.figures import read_size, size


@pytest.mark.parametrize(
    ("told", "bytes_"),
    [
        ("", None),
        ("0 bytes", 0),
        ("1023 bytes", 1023),
        ("1.00 KiB", 1 << 10),
        ("1.50 MiB", 3 << 19),
        ("1023.99 MiB", (1 << 30) - 10_000),
        ("1.00 GiB", 1 << 30),
        ("2048.00 GiB", 2 << 40),
        ("-2.00 MiB", -2 << 20),
    ],
)
def test_a_size_has_one_form(told: str, bytes_: int | None) -> None:
    assert size(bytes_) == told


@pytest.mark.parametrize(("told", "bytes_"), [("7", 7), ("2 KiB", 2048), ("1.5GiB", 3 << 29)])
def test_a_size_is_read(told: str, bytes_: int) -> None:
    assert read_size(told) == bytes_


@pytest.mark.parametrize("told", ["", "-1", "1.5", "2GB", "lots", "9" * 30])
def test_what_is_no_size_is_refused_with_an_example(told: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=r"is not a number of bytes, such as 25769803776 or 24GiB"):
        read_size(told)
