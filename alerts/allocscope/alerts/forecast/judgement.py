"""From facts to a state and a cause, and what was said last, so that it is not taken back too soon."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from allocscope.alerts.forecast.facts import Facts
from allocscope.alerts.forecast.rows import Bools, Columns, Ints, Rows, Table, filled
from allocscope.model import Cause, State

STATES, CAUSES = tuple(State), tuple(Cause)
NO_CAUSE = -1
OK, WATCH, AT_RISK, CRITICAL = range(4)
FRAGMENTATION, CAPACITY, GROWTH, LEAK, NEIGHBOUR = range(5)
Levels = NDArray[np.int8]


def levels_of(facts: Facts) -> Levels:
    """How near, by itself: without regard to what was said before."""
    constants, left = facts.constants, filled(facts.seconds_left, np.inf)
    level = np.zeros(len(left), np.int8)
    for state, soon, slack in (
        (WATCH, left < constants.watch_horizon_s, constants.watch_slack),
        (AT_RISK, left < constants.at_risk_horizon_s, constants.at_risk_slack),
        (CRITICAL, _now(facts), constants.critical_slack),
    ):
        narrow = (facts.slack >= 0) & (facts.slack < slack * facts.total)
        if state == CRITICAL:
            narrow &= facts.narrowing
        level[soon | narrow] = state
    return level


def _now(facts: Facts) -> Bools:
    """Where the time left is critical, by what it is that moves."""
    constants = facts.constants
    by_holes = facts.by_holes & (facts.pressure.speed <= facts.growing)
    horizon_s = np.where(by_holes, constants.critical_holes_horizon_s, constants.critical_horizon_s)
    meet: Bools = filled(facts.meet_s, np.inf) < horizon_s
    return meet | (filled(facts.slack_left_s, np.inf) < constants.critical_holes_horizon_s)


def causes_of(facts: Facts) -> Levels:
    """What it would run out for."""
    growing, margin = facts.growing, facts.margin
    cause = np.where(facts.by_holes, FRAGMENTATION, CAPACITY)
    cause = np.where(growing > 0, np.where(facts.lifted_by(facts.leak.bytes_per_s), LEAK, GROWTH), cause)
    taken = facts.moved_by_neighbour & (margin < facts.constants.calm * facts.total)
    return np.where((facts.pressure.speed > growing) | taken, NEIGHBOUR, cause).astype(np.int8)


class Judgement(Table):
    """What was said last of each."""

    COLUMNS: ClassVar[Columns] = {
        "level": (np.int8, 1, OK),
        "cause": (np.int8, 1, NO_CAUSE),
        "calm_since_us": (np.int64, 1, 0),
    }
    level: Levels
    cause: Levels
    calm_since_us: Ints
    """0: it is not calm."""

    def judge(self, rows: Rows, facts: Facts, warm: Bools, now_us: Ints) -> None:
        """With hysteresis."""
        level = np.where(warm, levels_of(facts), OK)
        enters = level >= self.level[rows]
        falls = np.flatnonzero(~enters)
        if falls.size:
            enters[falls] = self._calm(rows[falls], facts.margin[falls], facts, falls, now_us[falls])
        at = rows[enters]
        self.calm_since_us[at] = 0
        self._enter(at, level[enters], facts, enters)

    def _enter(self, rows: Rows, level: NDArray[np.int_], facts: Facts, where: Bools) -> None:
        cause = np.full(len(rows), NO_CAUSE, np.int8)
        if (level > OK).any():
            cause = np.where(level > OK, causes_of(facts)[where], NO_CAUSE).astype(np.int8)
            # What was found to be a leak does not stop to be one where its troughs falter.
            still = (self.cause[rows] == LEAK) & (cause == GROWTH) & facts.lifted_by(facts.troughs)[where]
            cause[still] = LEAK
        self.level[rows], self.cause[rows] = level, cause

    def _calm(self, rows: Rows, margin: Ints, facts: Facts, at: Rows, now_us: Ints) -> Bools:
        """Whether the danger has been over long enough."""
        tight = (self.level[rows] == CRITICAL) & (margin < facts.constants.calm * facts.total[at])
        since = self.calm_since_us[rows]
        since = np.where(tight, 0, np.where((since == 0) | (since > now_us), now_us, since))
        self.calm_since_us[rows] = since
        calm: Bools = ~tight & (now_us - since >= facts.constants.calm_for_s * 1e6)
        return calm
