"""What keeps moving: live peaks, live troughs, the others' share of the device.

A trend is several moves, the latest of them of late. Nothing here fits a line through noise: peaks are looked at by the records
that they break. Peaks that vary but do not grow break fewer and fewer of them (in the second half of any stretch ln 2, about
0.7, however they are distributed); so four in the second half of a job's life, or in the last stretch of a long one, come by
chance about once in a hundred and fifty.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from allocscope.alerts.forecast.history import WINDOWS, History, Room, Scale, Window

MOVE = 0.001
"""A record counts where it goes beyond the last by so much of the device."""
LOOKBACK_WINDOWS = WINDOWS - 1
"""So far back, but never into the first half of a job's life: what warms up grows, too."""
RECORDS = 4
SWINGS = 6
"""With fewer steps than that, several windows may have broken records in one and the same step …"""
FEW_SWINGS_RECORDS = 8
"""… so that more of them are asked for; what climbs without steps, as a server's cache does, has them."""
RECENT_WINDOWS = 5
"""The latest record must be of these, else it has stopped growing."""
RISING_SHARE = 0.95
"""Of a leak's troughs so many lie higher than the one before; so do the counts of live blocks …"""
UNEVENNESS = 0.5
"""… and their rises are all about alike: the standard deviation is at most this part of the mean."""

ROOM_MOVE = 0.002
"""A loss of room counts where it is more than this part of the device."""
ROOM_LOSSES = 3
"""The first may be another process's arrival."""
ROOM_MOVES = 4
"""So many notes of the room with a loss, or with a stall after one because nothing was free: that is no stop."""
ROOM_GAP_US = 120_000_000
"""Losses further apart than that are not of one growth."""
ROOM_RECENT_US = 40_000_000
"""The latest loss is no older, or no older than twice the time between losses."""


@dataclass(frozen=True, slots=True)
class Trend:
    """Something that keeps moving."""

    bytes_per_s: float
    unevenness: float = 0.0
    """By what part of it the halves of what was looked at differ from it."""


def growth(history: History, total_bytes: int, now_us: int) -> Trend | None:
    """Peaks that go on breaking their record."""
    found = (_growth(scale, _lately(scale, now_us), total_bytes) for scale in history.scales)
    return next(filter(None, found), None)


def leak(history: History, now_us: int) -> Trend | None:
    """Troughs that rise and rise, with more and more live blocks: memory that nothing frees."""
    found = (_leak(scale, _whole(scale, now_us)) for scale in history.scales)
    return next(filter(None, found), None)


def troughs(history: History, now_us: int) -> Trend | None:
    """How the troughs rise, on the coarsest scale that tells, steadily or not; None: they do not."""
    for scale in reversed(history.scales):
        windows = _whole(scale, now_us)
        if len(windows) > RECORDS:
            rise = windows[-1].trough_bytes - windows[0].trough_bytes
            return Trend(rise / _elapsed_s(scale, windows)) if rise > 0 else None
    return None


def _lately(scale: Scale, now_us: int) -> list[Window]:
    """The windows that trends are looked for in; the first is the one to compare the next with."""
    latest = scale.number(now_us)
    first = latest - min(LOOKBACK_WINDOWS, latest // 2)
    return [window for window in scale.windows if window.number >= first]


def _whole(scale: Scale, now_us: int) -> list[Window]:
    """The same without the latest: its trough may be still to come."""
    return _lately(scale, now_us)[:-1]


def _growth(scale: Scale, windows: Sequence[Window], total_bytes: int) -> Trend | None:
    moves = [later.record_bytes - earlier.record_bytes for earlier, later in pairwise(windows)]
    counted = _counted(moves, MOVE * total_bytes)
    if counted < _enough(windows) or not _counted(moves[-RECENT_WINDOWS:], MOVE * total_bytes):
        return None
    first = next(i for i, move in enumerate(moves) if move > MOVE * total_bytes)
    return Trend(sum(moves) / _elapsed_s(scale, windows[first:]), _halves(moves[first:]))


def _leak(scale: Scale, windows: Sequence[Window]) -> Trend | None:
    rises = [later.trough_bytes - earlier.trough_bytes for earlier, later in pairwise(windows)]
    more = [later.trough_count - earlier.trough_count for earlier, later in pairwise(windows)]
    enough = max(_enough(windows), RISING_SHARE * len(rises))
    if _counted(rises, 0) < enough or _counted(more, 0) < enough or _uneven(rises):
        return None
    return Trend(sum(rises) / _elapsed_s(scale, windows), _halves(rises))


def _uneven(rises: Sequence[int]) -> bool:
    mean = sum(rises) / len(rises)
    return sum((rise - mean) ** 2 for rise in rises) / len(rises) > (UNEVENNESS * mean) ** 2


def _halves(moves: Sequence[int]) -> float:
    """How much one half moved more than the other, as a part of both."""
    half = len(moves) // 2
    first, second = sum(moves[:half]), sum(moves[len(moves) - half :])
    return abs(second - first) / max(second + first, 1)


def _enough(windows: Sequence[Window]) -> int:
    return RECORDS if sum(window.swings for window in windows) >= SWINGS else FEW_SWINGS_RECORDS


def pressure(rooms: Iterable[Room], now_us: int, total_bytes: int) -> Trend | None:
    """Others that take more and more of the device."""
    notes = list(pairwise(rooms))
    losses = _one_growth(
        [(b.time_us, a.bytes - b.bytes) for a, b in notes if a.bytes - b.bytes > ROOM_MOVE * total_bytes]
    )
    if len(losses) < ROOM_LOSSES:
        return None
    first_us, last_us, lost = losses[0][0], losses[-1][0], sum(loss for _, loss in losses)
    since = [(a, b) for a, b in notes if b.time_us > first_us]
    stalls = sum(b.used_up for a, b in since if b.bytes == a.bytes)
    gained = sum(max(b.bytes - a.bytes, 0) for a, b in since)
    if len(losses) + stalls < ROOM_MOVES or 2 * gained > lost:  # to and fro
        return None
    if now_us - last_us > max(ROOM_RECENT_US, 2 * (last_us - first_us) // (len(losses) - 1)):
        return None
    return Trend((lost - max(loss for _, loss in losses)) / ((last_us - first_us) / 1e6))


def _one_growth(losses: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The latest losses, (time, bytes) each, as far back as they follow one another."""
    first = len(losses) - 1
    while first > 0 and losses[first][0] - losses[first - 1][0] <= ROOM_GAP_US:
        first -= 1
    return losses[max(first, 0) :]


def _counted(moves: Iterable[int], more_than: float) -> int:
    return sum(move > more_than for move in moves)


def _elapsed_s(scale: Scale, windows: Sequence[Window]) -> float:
    return (windows[-1].number - windows[0].number) * scale.window_us / 1e6
