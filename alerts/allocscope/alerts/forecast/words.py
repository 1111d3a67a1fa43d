"""A forecast in words, with the figures that led to it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from allocscope.alerts.forecast.judgement import Facts


def describe(facts: Facts) -> str:
    """One line for people."""
    peak, stranded, room = map(size, (facts.peak_bytes, facts.stranded_bytes, facts.room_bytes))
    said = [f"{peak} live at its peaks and {stranded} stranded, of {room} that it can have"]
    if facts.leak:
        said.append(f"live memory that nothing frees grows by {rate(facts.leak.bytes_per_s)}")
    if facts.growth:
        said.append(f"peaks grow by {rate(facts.growth.bytes_per_s)}")
    if facts.pressure:
        said.append(f"others on the device grow by {rate(facts.pressure.bytes_per_s)}")
    if facts.flushes:
        slack = facts.slack_bytes or 0
        said.append(f"{len(facts.flushes)} flushes in the last ten minutes, the narrowest with {size(slack)} left")
    left = facts.seconds_left
    if left is not None:
        said.append(f"at this rate in {duration(left)}")
    return "; ".join(said)


def size(size_bytes: float) -> str:
    """In MiB or GiB."""
    return f"{size_bytes / (1 << 20):.0f} MiB" if abs(size_bytes) < 10 << 30 else f"{size_bytes / (1 << 30):.1f} GiB"


def rate(bytes_per_s: float) -> str:
    """By the minute."""
    return f"{size(bytes_per_s * 60)} a minute"


def duration(seconds: float) -> str:
    """Roughly."""
    return (
        f"{seconds:.0f} s"
        if seconds < 120
        else f"{seconds / 60:.0f} min"
        if seconds < 7200
        else f"{seconds / 3600:.0f} h"
    )
