"""A forecast in words, with the figures that led to it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from allocscope.model.figures import duration, size

if TYPE_CHECKING:
    from allocscope.alerts.forecast.facts import Facts


def describe(facts: Facts) -> str:
    """One line for people, of one allocator's facts."""
    return "; ".join(
        [_need(facts), *_holes(facts), *_requests(facts), *_trends(facts), *_flushes(facts), *_left(facts)]
    )


def _need(facts: Facts) -> str:
    return f"{size(facts.peak[0])} live at its peaks, of {size(facts.room[0])} that it can have"


def _holes(facts: Facts) -> list[str]:
    if not facts.stranded[0]:
        return []
    holes = f", in {facts.holes[0]:,} holes now" if facts.holes[0] > 0 else ""
    return [f"{size(facts.stranded[0])} lie stranded then{holes}"]


def _requests(facts: Facts) -> list[str]:
    request, headroom = facts.request[0], facts.headroom[0]
    if request < 0 or headroom < 0:
        return []
    return [f"asks for up to {size(request)} at once, {size(headroom)} would fit now"]


def _trends(facts: Facts) -> list[str]:
    named = (
        (facts.leak, "live memory that nothing frees grows by"),
        (facts.growth, "its peaks grow by"),
        (facts.pressure, "others on the device grow by"),
    )
    return [f"{what} {size(trend.bytes_per_s[0] * 60)} a minute" for trend, what in named if trend.found[0]]


def _flushes(facts: Facts) -> list[str]:
    count = facts.flushes[0]
    if not count:
        return []
    flushes = "1 flush" if count == 1 else f"{count:,} flushes"
    return [f"{flushes} in the last ten minutes, the narrowest left {size(facts.slack[0])}"]


def _left(facts: Facts) -> list[str]:
    """By the faster and the slower half of the trends."""
    left, unevenness = facts.seconds_left[0], facts.unevenness[0]
    if not left >= 0:
        return []
    soon, late = left / (1 + unevenness), left / max(1 - unevenness, 0.25)
    if late < 60:
        return ["at this rate within a minute"]
    return [f"at this rate in {_between(soon, late)}"]


def _between(soon: float, late: float) -> str:
    """`3 min`, `3 to 5 min`, `90 s to 3 min`."""
    low, high = duration(soon), duration(late)
    if low == high:
        return high
    number, unit = low.split(" ")
    return f"{number if high.endswith(f' {unit}') else low} to {high}"
