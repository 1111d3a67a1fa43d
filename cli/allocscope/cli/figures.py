"""Figures for people."""

from __future__ import annotations


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
