"""A printed figure stands for all the amounts that would have been printed so."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allocscope.allocator.messages.figures import Figure, Range, read_figure
from allocscope.allocator.messages.words import amount

MIB, GIB = 1 << 20, 1 << 30


@pytest.mark.parametrize(
    ("number", "unit", "figure"),
    [
        ("0", "bytes", Figure(0, 0, 0)),
        ("512", "B", Figure(512, 512, 512)),
        ("1024", "bytes", Figure(1024, 1024, 1024)),
        ("1.00", "KiB", Figure(1024, 1018, 1030)),
        ("2.00", "MiB", Figure(2 * MIB, 2091909, 2102395)),
        ("39.49", "GiB", Figure(42402064630, 42396695920, 42407433339)),
        ("39.49", "GB", Figure(42402064630, 42396695920, 42407433339)),
        ("1.5", "TiB", Figure(1649267441664, 1594291860275, 1704243023053)),
        ("4", "gb", Figure(4 * GIB, 3758096384, 4831838208)),
        ("0.00", "GiB", Figure(0, 0, 5368710)),
    ],
)
def test_it_is_read_with_its_rounding(number, unit, figure):
    assert read_figure(number, unit) == figure


@pytest.mark.parametrize("number", ["17179869184.00", "17179869183.98", "99999999999999.00"])
def test_what_stands_for_not_known_is_not_known(number):
    assert read_figure(number, "GiB") is None


@given(st.integers(0, 1 << 50))
def test_the_amount_printed_lies_within(amount_bytes):
    number, unit = amount(amount_bytes).split()
    figure = read_figure(number, unit)
    assert figure is not None
    assert figure.low_bytes <= amount_bytes <= figure.high_bytes


@pytest.mark.parametrize(
    ("left", "right", "at_least", "below"),
    [
        (Range(5, 6), Range(3, 5), True, False),
        (Range(5, 6), Range(3, 6), False, False),
        (Range(1, 2), Range(3, 6), False, True),
        (Range(1, 3), Range(3, 6), False, False),
        (Range(9), Range(3, 6), True, False),
        (Range(9, 10), Range(3), False, False),
        (Range(1), Range(3), False, False),
    ],
)
def test_what_overlaps_is_not_called(left, right, at_least, below):
    assert (left.at_least(right), left.below(right)) == (at_least, below)


def test_differences_are_never_below_nothing():
    assert Range(5, 6) - Range(5, 7) == Range(0, 1)
    assert Range(5, 6) - Range(2) == Range(0, 4)
    assert Range(5) - Range(2, 3) == Range(2, None)
