"""Where the steps of a program end, found in what it asks for: nothing in a history says so.

What a step allocates and frees again comes to a peak, and is gone at its end. So a step ends where that memory, without what
lives longer, has come down from a peak to next to nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median

from allocscope.allocator.simulator.history import Asked

_SHORT_LIVED_SHARE = 1 / 20
_SHORT_LIVED_LEAST = 500
"""Requests that an allocation lives at most to count as one step's: a share of the history, or so many."""
_WINDOWS = 64
_DEPTH = 0.3
"""How far memory comes down from a peak, and goes up again, between two steps; of a usual peak."""
_NEXT_TO_NOTHING = 0.1
_FEWEST = 3


def step_ends(asked: Sequence[Asked]) -> tuple[int, ...]:
    """After how many of the requests each step ends, in order; none: no steps are to be seen (serving does not show any)."""
    series = short_lived_bytes(asked)
    if not series:
        return ()
    window = max(len(series) // _WINDOWS, 1)
    usual = median(max(series[at : at + window]) for at in range(0, len(series), window))
    ends = [at + 1 for at in _valleys(series, _DEPTH * usual) if series[at] <= _NEXT_TO_NOTHING * usual]
    return tuple(ends) if usual and len(ends) >= _FEWEST else ()


def short_lived_bytes(asked: Sequence[Asked]) -> list[int]:
    """After each request, the bytes asked for and not freed of what does not live long."""
    longest = max(len(asked) * _SHORT_LIVED_SHARE, _SHORT_LIVED_LEAST)
    freed = {each.key: at for at, each in enumerate(asked) if each.what == "free"}
    sizes: dict[int, int] = {}
    series, live = [], 0
    for at, each in enumerate(asked):
        if each.what == "malloc" and freed.get(each.key, len(asked) + longest) - at <= longest:
            sizes[each.key] = each.size
            live += each.size
        elif each.what == "free":
            live -= sizes.pop(each.key, 0)
        series.append(live)
    return series


def _valleys(series: Sequence[int], depth: float) -> Iterator[int]:
    """Where it is lowest between two peaks that are so much higher."""
    falling, low_at, high = False, 0, series[0]
    for at, value in enumerate(series):
        if not falling:
            high = max(high, value)
            if high - value >= depth:
                falling, low_at = True, at
        elif value <= series[low_at]:
            low_at = at
        elif value - series[low_at] >= depth:
            yield low_at
            falling, high = False, value
