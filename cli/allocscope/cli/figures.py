"""Sizes as options take them, and moments. How sizes, durations and shares are written: `allocscope.model.figures`."""

from __future__ import annotations

import argparse
import re
from datetime import UTC, datetime

from allocscope.model.figures import NOT_KNOWN

_UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def read_size(told: str) -> int:
    """Bytes of an option: a number of them, or of KiB, MiB or GiB."""
    found = re.fullmatch(r"(\d{1,18}(?:\.\d{1,9})?) ?([KMG]iB|)", told)
    if found is None or ("." in found[1] and not found[2]):
        raise argparse.ArgumentTypeError(f"{told!r} is not a number of bytes, such as 25769803776 or 24GiB")
    return int(float(found[1]) * _UNITS[found[2]]) if "." in found[1] else int(found[1]) * _UNITS[found[2]]


def moment(time_us: int | None, unknown: str = NOT_KNOWN) -> str:
    """`2026-01-31 12:00:00`, in UTC, which a heading or the text behind it says; microseconds of a clock that has no such date."""
    if time_us is None:
        return unknown
    try:
        return f"{datetime.fromtimestamp(time_us / 1e6, UTC):%Y-%m-%d %H:%M:%S}"
    except (ValueError, OverflowError, OSError):
        return f"{time_us} µs"
