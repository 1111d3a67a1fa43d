"""A printed amount of memory, and what it may have been before it was rounded."""

from __future__ import annotations

from dataclasses import dataclass

_EXPONENT = {"b": 0, "k": 1, "m": 2, "g": 3, "t": 4, "p": 5, "e": 6}

ENDLESS_BYTES = 1 << 62
"""From here on it is no amount: PyTorch prints 2^64 bytes (17179869184.00 GiB) for "not known" and for "no limit"."""


@dataclass(frozen=True, slots=True)
class Figure:
    """An amount as printed. All three in bytes."""

    bytes: int
    """What the print says, taken at its word."""
    low_bytes: int
    """It was not less than this…"""
    high_bytes: int
    """…nor more than this."""

    @classmethod
    def exact(cls, amount_bytes: int) -> Figure | None:
        """A figure printed to the byte; None where it is a stand-in for "not known" (see ENDLESS_BYTES)."""
        return cls(amount_bytes, amount_bytes, amount_bytes) if amount_bytes < ENDLESS_BYTES else None


def read_figure(number: str, unit: str) -> Figure | None:
    """The figure of a number and its unit: bytes, B, or KiB to EiB, upper or lower case.

    KB to EB count in 1024s too: MPS prints the same figures under these names. Half a unit of the last printed digit is how
    far off the figure may be; bytes are exact. None where it is a stand-in for "not known".
    """
    digits, _, fraction = number.partition(".")
    scale, tens = 1024 ** _EXPONENT[unit[0].lower()], 10 ** len(fraction)
    printed = int(digits + fraction) * scale
    if scale == 1:
        return Figure.exact(printed // tens)
    amount = (2 * printed + tens) // (2 * tens)
    if amount >= ENDLESS_BYTES:
        return None
    low, high = max(2 * printed - scale, 0), 2 * printed + scale
    return Figure(amount, low // (2 * tens), -(-high // (2 * tens)))


@dataclass(frozen=True, slots=True)
class Range:
    """Between which amounts something lies, in bytes; no end where `high` is None."""

    low: int = 0
    high: int | None = None

    @classmethod
    def of(cls, figure: Figure | None) -> Range:
        """The range of a figure; everything from 0 on where it is not known."""
        return cls() if figure is None else cls(figure.low_bytes, figure.high_bytes)

    def __add__(self, other: Range) -> Range:
        high = None if self.high is None or other.high is None else self.high + other.high
        return Range(self.low + other.low, high)

    def __sub__(self, other: Range) -> Range:
        """The difference, never below 0."""
        low = 0 if other.high is None else max(self.low - other.high, 0)
        return Range(low, None if self.high is None else max(self.high - other.low, 0))

    def at_least(self, other: Range) -> bool:
        """Is it certainly as much as `other`, whatever the rounding took away?"""
        return other.high is not None and self.low >= other.high

    def below(self, other: Range) -> bool:
        """Is it certainly less than `other`?"""
        return self.high is not None and self.high < other.low
