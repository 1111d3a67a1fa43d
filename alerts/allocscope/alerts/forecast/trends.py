"""What keeps moving: live peaks, live troughs, the others' share of the device.

A move counts where it is more than a thousandth or so of the device; a trend is several moves, the latest of them of late.
Nothing here fits a line through noise: peaks are looked at by the records that they break. Peaks that vary but do not grow
break fewer and fewer of them (in the second half of any stretch ln 2, about 0.7, however they are distributed); so four in
the second half of a job's life, or in the last five minutes of a long one, come by chance in one of a hundred and fifty.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from allocscope.alerts.forecast.history import ROOM_EVERY_US, WINDOW_US, Window

MOVE = 0.001
"""A record counts where it goes beyond the last by so much of the device."""
LOOKBACK_WINDOWS = 15
"""Five minutes; less in a job's first ten, of which only the second half is looked at: what warms up grows, too."""
RECORDS = 4
RECENT_WINDOWS = 5
"""The latest record must be of these, else it has stopped growing."""
RISING_SHARE = 0.85
"""Of a leak's troughs so many lie higher than the one before; so do the counts of live blocks."""
LEAK_WINDOWS = 5

ROOM_MOVE = 0.002
ROOM_LOOKBACK_US = 120_000_000
ROOM_MOVES = 4
"""The first may be another process's arrival; three more are growth."""
ROOM_RECENT = 4
"""Of the latest notes of the room at least one must have moved."""


@dataclass(frozen=True, slots=True)
class Trend:
    """Something that keeps moving."""

    bytes_per_s: float
    moves: int


def lookback(windows: Sequence[Window], started_us: int, now_us: int) -> list[Window]:
    """The windows that trends are looked for in; the first is the one to compare the next with."""
    age_windows = (now_us - started_us) // WINDOW_US
    back = min(LOOKBACK_WINDOWS, int(age_windows // 2))
    first = windows[-1].number - back if windows else 0
    return [window for window in windows if window.number >= first]


def growth(windows: Sequence[Window], total_bytes: int) -> Trend | None:
    """Peaks that go on breaking their record."""
    if len(windows) <= RECORDS:
        return None
    moves = [later.record_bytes - earlier.record_bytes for earlier, later in pairwise(windows)]
    counted = _counted(moves, MOVE * total_bytes)
    if counted < RECORDS or not _counted(moves[-RECENT_WINDOWS:], MOVE * total_bytes):
        return None
    return Trend(sum(moves) / _elapsed_s(windows), counted)


def leak(windows: Sequence[Window]) -> Trend | None:
    """Troughs that rise and rise, with more and more live blocks: memory that nothing frees."""
    whole = windows[:-1]  # the latest window's trough may be still to come
    if len(whole) < LEAK_WINDOWS:
        return None
    rises = [later.trough_bytes - earlier.trough_bytes for earlier, later in pairwise(whole)]
    more = [later.trough_count - earlier.trough_count for earlier, later in pairwise(whole)]
    enough = RISING_SHARE * len(rises)
    if _counted(rises, 0) < enough or _counted(more, 0) < enough:
        return None
    return Trend(sum(rises) / _elapsed_s(whole), len(rises))


def pressure(rooms: Iterable[tuple[int, int]], now_us: int, total_bytes: int) -> Trend | None:
    """Others that take more and more of the device."""
    lately = [room for time_us, room in rooms if now_us - time_us <= ROOM_LOOKBACK_US]
    losses = [earlier - later for earlier, later in pairwise(lately)]
    moves = sorted(loss for loss in losses if loss > ROOM_MOVE * total_bytes)
    if len(moves) < ROOM_MOVES or not _counted(losses[-ROOM_RECENT:], ROOM_MOVE * total_bytes):
        return None
    gains = -sum(loss for loss in losses if loss < 0)
    if 2 * gains > sum(moves):  # to and fro
        return None
    return Trend(sum(moves[:-1]) / (len(moves) - 1) / (ROOM_EVERY_US / 1e6), len(moves))


def _counted(moves: Iterable[int], more_than: float) -> int:
    return sum(move > more_than for move in moves)


def _elapsed_s(windows: Sequence[Window]) -> float:
    return (windows[-1].number - windows[0].number) * WINDOW_US / 1e6
