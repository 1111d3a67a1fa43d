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
    """In MiB, or GiB from one on; "" where it is not known."""
    if bytes_ is None:
        return ""
    return f"{bytes_ / 2**30:.2f} GiB" if bytes_ >= 2**30 else f"{bytes_ / 2**20:.0f} MiB"


def duration(seconds: float | None) -> str:
    """Roughly; "" where it is not known."""
    if seconds is None:
        return ""
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
