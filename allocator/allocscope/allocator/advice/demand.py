"""What a program needs whatever the settings, and whether that grows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import correlation, linear_regression

from allocscope.allocator.advice.steps import step_ends
from allocscope.allocator.settings import AllocatorSettings
from allocscope.allocator.simulator.history import Asked, OtherUsed

_WINDOWS = 40
_SURELY = 0.8
"""From which correlation with time on it is growth."""
_MATTERS = 0.03
"""From which share of the peak on."""
_STILL = 0.25
"""Which share of it must fall into the last quarter: steady growth has a half there, and what comes to rest little."""
_KEPT = 0.5
"""From which share of the growth on it is of what is never freed."""


@dataclass(frozen=True, slots=True)
class Demand:
    """Bytes. Live is what is asked for and not freed, rounded to 512 bytes as under any settings."""

    live_peak_bytes: int
    live_bytes: int
    """At the worst moment: what was live and asked for, when …"""
    room_bytes: int
    """… no more than this could be had."""
    other_growth_bytes: int
    """How much more others used of the device then than when the history begins."""
    growth_bytes: int
    """How much more is needed at most in a step at the end than half-way; 0: it does not grow steadily."""
    keeps_growth: bool
    """Whether what grew is never freed: a leak, or what looks like one."""

    @property
    def exceeds(self) -> bool:
        """Whether no settings can serve it."""
        return self.live_bytes > self.room_bytes


def demand_of(
    asked: Sequence[Asked], *, device_total_bytes: int, limit_bytes: int | None, other_used: OtherUsed
) -> Demand:
    """Of requests up to the last that is to be served; `limit_bytes` is what a memory fraction allows."""
    rounding = AllocatorSettings()
    sizes: dict[int, int] = {}
    live = peak = 0
    worst: tuple[int, int, int] | None = None
    series: list[int] = []
    other = first_other = other_used(asked[0].time_us) if asked else 0
    room, time_us = 0, None
    for each in asked:
        if each.what == "malloc" and not each.survived:
            if each.time_us != time_us:
                time_us = each.time_us
                other = other_used(time_us)
                room = device_total_bytes - other
                room = room if limit_bytes is None else min(room, limit_bytes)
            sizes[each.key] = size = rounding.round(each.size)
            live += size
            peak = max(peak, live)
            if worst is None or live - room > worst[0] - worst[1]:
                worst = live, room, other - first_other
        elif each.what == "free":
            live -= sizes.pop(each.key, 0)
        series.append(live)
    live_then, room_then, growth_of_others = worst or (0, 0, 0)
    growth, keeps = _growth(series, step_ends(asked))
    return Demand(peak, live_then, room_then, growth_of_others, growth, keeps)


def _growth(series: Sequence[int], ends: Sequence[int]) -> tuple[int, bool]:
    """How much the peaks rose over the second half, and whether the lows did as well."""
    if len(ends) < _WINDOWS // 2:
        ends = range(0, len(series) + 1, max(len(series) // _WINDOWS, 1))
    windows = [series[start:end] for start, end in pairwise(ends) if end > start]
    half = windows[len(windows) // 2 :]
    if len(half) < 3:
        return 0, False
    peaks = [max(window) for window in half]
    growth = _rise(peaks)
    if growth < _MATTERS * max(series) or _rise(peaks[len(peaks) // 2 :]) < _STILL * growth:
        return 0, False
    return growth, _rise([min(window) for window in half]) >= _KEPT * growth


def _rise(values: Sequence[int]) -> int:
    """Along the line that fits best; 0: they do not follow one."""
    if min(values) == max(values) or correlation(range(len(values)), values) < _SURELY:
        return 0
    return round(linear_regression(range(len(values)), values).slope * (len(values) - 1))
