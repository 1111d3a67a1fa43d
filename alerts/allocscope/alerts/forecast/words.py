"""A forecast in words, with the figures that led to it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from allocscope.alerts.forecast.judgement import Facts


def describe(facts: Facts) -> str:
    """One line for people."""
    return "; ".join(
        [_need(facts), *_holes(facts), *_requests(facts), *_trends(facts), *_flushes(facts), *_left(facts)]
    )


def _need(facts: Facts) -> str:
    return f"{size(facts.peak_bytes)} live at its peaks, of {size(facts.room_bytes)} that it can have"


def _holes(facts: Facts) -> list[str]:
    if not facts.stranded_bytes:
        return []
    holes = f", in {facts.hole_count} holes now" if facts.hole_count else ""
    return [f"{size(facts.stranded_bytes)} lie stranded then{holes}"]


def _requests(facts: Facts) -> list[str]:
    if facts.request_bytes is None or facts.headroom_bytes is None:
        return []
    return [f"asks for up to {size(facts.request_bytes)} at once, {size(facts.headroom_bytes)} would fit now"]


def _trends(facts: Facts) -> list[str]:
    named = (
        (facts.leak, "live memory that nothing frees grows by"),
        (facts.growth, "its peaks grow by"),
        (facts.pressure, "others on the device grow by"),
    )
    return [f"{what} {size(trend.bytes_per_s * 60)} a minute" for trend, what in named if trend]


def _flushes(facts: Facts) -> list[str]:
    if not facts.flushes:
        return []
    count = len(facts.flushes)
    flushes = "1 flush" if count == 1 else f"{count} flushes"
    return [f"{flushes} in the last ten minutes, the narrowest left {size(facts.slack_bytes or 0)}"]


def _left(facts: Facts) -> list[str]:
    between = facts.seconds_left_between
    if between is None:
        return []
    soon, late = between
    if late < 60:
        return ["at this rate within a minute"]
    return [f"at this rate in {_minutes(soon, late)}"]


def _minutes(soon: float, late: float) -> str:
    low, high = round(soon / 60), max(round(late / 60), 1)
    return f"{high} min" if low == high else f"{low} to {high} min"


def size(size_bytes: float) -> str:
    """In MiB, or GiB from ten on."""
    return f"{size_bytes / (1 << 20):.0f} MiB" if abs(size_bytes) < 10 << 30 else f"{size_bytes / (1 << 30):.1f} GiB"
