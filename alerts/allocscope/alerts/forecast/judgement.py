"""From what is remembered to a forecast."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from allocscope.alerts.forecast import trends
from allocscope.alerts.forecast.history import Flush, History, Window
from allocscope.alerts.forecast.trends import Trend
from allocscope.alerts.forecast.words import describe
from allocscope.model import Cause, Forecast, State

WARMUP_S = 100.0
"""Before that there is nothing to say: everything grows at first."""
HORIZON_S = {State.CRITICAL: 400.0, State.AT_RISK: 900.0, State.WATCH: 3600.0}
"""Need and room are going to meet within so long."""
NARROW = {State.CRITICAL: 0.005, State.AT_RISK: 0.02, State.WATCH: 0.05}
"""The narrowest flush of late left less than this part of the device. It is critical only where flushes left less and less: a
job whose steps are all alike comes as near to the limit as it ever will with the first, and stays there. Anything looser
(two flushes, 2 %) was wrong three times for once right, over replays of runs of varying sizes on devices just large enough."""
NARROWING_FLUSHES = 3
"""So many, each narrower than the one before …"""
NARROWING_STEPS = 1.0
"""… and so many more steps like the last would take more than what is left."""
CALM = 0.05
"""A margin of more than this part of the device ends a critical state that no trend holds up any more …"""
CALM_FOR_S = 120.0
"""… once it has lasted so long."""
FLUSHES_S = 600.0
"""So long a flush counts."""
STRANDED_WINDOWS = 10
"""What lies stranded at peaks is looked up in so many windows."""
LIFTS = 0.05
"""A leak matters by itself where it takes this part of the device before the horizon."""
LEAK_SHARE = 0.5
"""Troughs that rise at least by this part of what the peaks rise by make it a leak, not growth."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What a forecast is made from, at a moment."""

    total_bytes: int
    room_bytes: int
    """What the others leave of the device, or a limit allows."""
    peak_bytes: int
    """The highest of late."""
    stranded_bytes: int
    """Lies stranded when it peaks."""
    growth: Trend | None
    leak: Trend | None
    pressure: Trend | None
    flushes: tuple[Flush, ...]
    """Of late."""
    troughs: Trend | None
    """How they rise, steadily or not."""
    moved: Cause | None
    """What took most of the margin, over all that is remembered."""
    request_bytes: int | None = None
    headroom_bytes: int | None = None
    hole_count: int | None = None

    @property
    def margin_bytes(self) -> int:
        """What is left of the room at peaks, if what lies stranded then served nothing."""
        return self.room_bytes - self.peak_bytes - self.stranded_bytes

    @property
    def margin_ratio(self) -> float | None:
        """What the largest known request would leave of the headroom, as a part of the device; None: not known."""
        if self.headroom_bytes is None or self.request_bytes is None:
            return None
        return (self.headroom_bytes - self.request_bytes) / self.total_bytes

    @property
    def slack_bytes(self) -> int | None:
        """What the narrowest flush left; None: there was none."""
        return min((flush.slack_bytes for flush in self.flushes), default=None)

    @property
    def narrowing(self) -> bool:
        """Whether flushes left less and less, and few more such steps are more than there is."""
        slacks = [flush.slack_bytes for flush in self.flushes if flush.exact][-NARROWING_FLUSHES:]
        if len(slacks) < NARROWING_FLUSHES or any(later >= earlier for earlier, later in pairwise(slacks)):
            return False
        return slacks[-1] < NARROWING_STEPS * (slacks[-2] - slacks[-1])

    @property
    def closing_bytes_per_s(self) -> float:
        """How fast need and room near each other; 0: no trend."""
        return self.growing_bytes_per_s + (self.pressure.bytes_per_s if self.pressure else 0.0)

    @property
    def growing_bytes_per_s(self) -> float:
        """How fast the need grows. A leak below peaks that do not grow counts where it is going to lift them."""
        growth = self.growth.bytes_per_s if self.growth else 0.0
        leak = self.leak.bytes_per_s if self.leak else 0.0
        lifts = leak * HORIZON_S[State.CRITICAL] >= LIFTS * self.total_bytes
        return max(growth, leak) if self.growth or lifts else 0.0

    def lifted(self, troughs: Trend | None) -> bool:
        """Whether it is troughs that rise so which lift the peaks."""
        return troughs is not None and troughs.bytes_per_s >= LEAK_SHARE * self.growing_bytes_per_s

    @property
    def seconds_left(self) -> float | None:
        """Until they meet; None: no trend."""
        closing = self.closing_bytes_per_s
        return max(self.margin_bytes, 0) / closing if closing > 0 else None

    @property
    def seconds_left_between(self) -> tuple[float, float] | None:
        """By the faster and the slower half of the trends; None: no trend."""
        left = self.seconds_left
        if left is None:
            return None
        trends_ = [trend for trend in (self.growth, self.leak, self.pressure) if trend]
        unevenness = max(trend.unevenness for trend in trends_)
        return left / (1 + unevenness), left / max(1 - unevenness, 0.25)


def gather(history: History, total_bytes: int, room_bytes: int, now_us: int) -> Facts | None:
    """The facts; None where there is nothing to judge by yet."""
    windows = list(history.scales[0].windows)
    if len(windows) < 2:
        return None
    since_us = max(history.started_us + WARMUP_S * 1e6, now_us - FLUSHES_S * 1e6)
    return Facts(
        total_bytes=total_bytes,
        room_bytes=room_bytes,
        peak_bytes=max(window.peak_bytes for window in windows),
        stranded_bytes=_stranded(windows[-STRANDED_WINDOWS:]),
        growth=trends.growth(history, total_bytes, now_us),
        leak=trends.leak(history, now_us),
        troughs=trends.troughs(history, now_us),
        pressure=trends.pressure(history.rooms, now_us, total_bytes),
        flushes=tuple(f for f in history.flushes if f.time_us > since_us),
        moved=_moved(windows, history.rooms[0].bytes - room_bytes if history.rooms else 0),
    )


def _stranded(windows: list[Window]) -> int:
    """Four of five peaks had less."""
    stranded = sorted(window.stranded_bytes for window in windows)
    return stranded[len(stranded) * 4 // 5]


def _moved(windows: list[Window], room_lost: int) -> Cause | None:
    """What took most of the margin between the beginning and the end of what is remembered."""
    third = max(len(windows) // 3, 1)
    early, late = windows[:third], windows[-third:]
    by_peaks = max(w.peak_bytes for w in late) - max(w.peak_bytes for w in early)
    by_holes = _stranded(late) - _stranded(early)
    moved = {Cause.NEIGHBOUR: room_lost, Cause.GROWTH: by_peaks, Cause.FRAGMENTATION: by_holes}
    cause = max(moved, key=lambda c: moved[c])
    return cause if moved[cause] > 0 else None


def state_of(facts: Facts) -> State:
    """How near, by itself: without regard to what was said before."""
    left, slack = facts.seconds_left, facts.slack_bytes
    for state in (State.CRITICAL, State.AT_RISK, State.WATCH):
        if left is not None and left < HORIZON_S[state]:
            return state
        narrow = slack is not None and slack < NARROW[state] * facts.total_bytes
        if narrow and (state is not State.CRITICAL or facts.narrowing):
            return state
    return State.OK


def cause_of(facts: Facts) -> Cause:
    """What it would run out for."""
    growing = facts.growing_bytes_per_s
    others = facts.pressure.bytes_per_s if facts.pressure else 0.0
    if others > growing or (facts.moved is Cause.NEIGHBOUR and facts.margin_bytes < CALM * facts.total_bytes):
        return Cause.NEIGHBOUR
    if growing > 0:
        return Cause.LEAK if facts.lifted(facts.leak) else Cause.GROWTH
    if facts.stranded_bytes > facts.margin_bytes and facts.stranded_bytes > 0:
        return Cause.FRAGMENTATION
    return Cause.CAPACITY


class Judgement:
    """What was said last, so that it is not taken back too soon."""

    __slots__ = ("_calm_since_us", "_cause", "_state")

    def __init__(self) -> None:
        self._state = State.OK
        self._cause: Cause | None = None
        self._calm_since_us: int | None = None

    def judge(self, facts: Facts, started_us: int, now_us: int) -> Forecast:
        """The forecast, with hysteresis."""
        state = state_of(facts) if now_us - started_us >= WARMUP_S * 1e6 else State.OK
        if state.level >= self._state.level or self._calm(facts, now_us):
            self._calm_since_us = None
            self._enter(state, facts)
        return Forecast(
            time_us=now_us,
            state=self._state,
            cause=self._cause,
            headroom_bytes=facts.headroom_bytes,
            request_bytes=facts.request_bytes,
            margin_ratio=facts.margin_ratio,
            seconds_to_oom=facts.seconds_left,
            summary=describe(facts) if self._state is not State.OK else "",
        )

    def unchanged(self, now_us: int) -> Forecast:
        """What was said last, where there is nothing to judge by."""
        return Forecast(now_us, self._state, self._cause)

    def _enter(self, state: State, facts: Facts) -> None:
        cause = cause_of(facts) if state is not State.OK else None
        if self._cause is Cause.LEAK and cause is Cause.GROWTH and facts.lifted(facts.troughs):
            cause = Cause.LEAK  # what was found to be a leak does not stop to be one where its troughs falter
        self._state, self._cause = state, cause

    def _calm(self, facts: Facts, now_us: int) -> bool:
        """Whether the danger has been over long enough."""
        if self._state is State.CRITICAL and facts.margin_bytes < CALM * facts.total_bytes:
            self._calm_since_us = None
            return False
        if self._calm_since_us is None or self._calm_since_us > now_us:
            self._calm_since_us = now_us
        return now_us - self._calm_since_us >= CALM_FOR_S * 1e6
