"""How a size, a duration and a share are written for people: in commands, alerts and sentences alike.

The page (`size`, `duration` and `percent` in its page.js) and the rules for Prometheus
(`allocscope.alerts.prometheus.templates`) follow the same rule; tests compare them. What is read by programs has bytes, seconds and
ratios instead.
"""

from __future__ import annotations

NOT_KNOWN = "–"
"""In a table's cell; a sentence has a word of its own."""
UNITS = (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))
"""Of sizes, the largest first."""
DURATIONS = (("d", 86_400), ("h", 3_600), ("min", 60))
"""Of durations, the longest first; each is used from twice its length on."""


def size(size_bytes: float | None, unknown: str = NOT_KNOWN) -> str:
    """As PyTorch writes sizes, which end at GiB: `512 bytes`, `1.50 MiB`, `79.60 GiB`, `1.20 TiB`."""
    if size_bytes is None:
        return unknown
    whole = round(size_bytes)
    for unit, unit_bytes in UNITS:
        if abs(whole) >= unit_bytes:
            return f"{whole / unit_bytes:.2f} {unit}"
    return "1 byte" if whole == 1 else f"{whole} bytes"


def duration(seconds: float | None, unknown: str = NOT_KNOWN) -> str:
    """Roughly: `0.4 s`, `5 s`, `90 s`, `3 min`, `3 h`, `7 d`. Below ten seconds to a tenth."""
    if seconds is None:
        return unknown
    for unit, unit_s in DURATIONS:
        if seconds >= 2 * unit_s:
            return f"{seconds / unit_s:.0f} {unit}"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f}".removesuffix(".0") + " s"


def percent(ratio: float | None, unknown: str = NOT_KNOWN) -> str:
    """`12.3 %`, of 0.123."""
    return unknown if ratio is None else f"{100 * ratio:.1f} %"
