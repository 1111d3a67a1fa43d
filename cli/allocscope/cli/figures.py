"""Figures for people."""

from __future__ import annotations

import argparse
import re

_UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def read_size(told: str) -> int:
    """Bytes of an option: a number of them, or of KiB, MiB or GiB."""
    found = re.fullmatch(r"(\d{1,18}(?:\.\d{1,9})?) ?([KMG]iB|)", told)
    if found is None or ("." in found[1] and not found[2]):
        raise argparse.ArgumentTypeError(f"{told!r} is not a number of bytes, such as 25769803776 or 24GiB")
    return int(float(found[1]) * _UNITS[found[2]]) if "." in found[1] else int(found[1]) * _UNITS[found[2]]


def size(bytes_: int | None) -> str:
    """As PyTorch writes them: `512 bytes`, `2.00 MiB`, `61.20 GiB`, and so as `allocscope.allocator` does in its sentences; "" where it
    is not known. This one form is for people, --json has bytes.
    """
    if bytes_ is None:
        return ""
    for unit in ("GiB", "MiB", "KiB"):
        if abs(bytes_) >= _UNITS[unit]:
            return f"{bytes_ / _UNITS[unit]:.2f} {unit}"
    return f"{bytes_} bytes"


def duration(seconds: float | None) -> str:
    """Roughly; "" where it is not known."""
    if seconds is None:
        return ""
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
