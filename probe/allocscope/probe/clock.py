"""What tells the probe the time, and what draws lots: a test has its own."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from allocscope.probe.uplink import wall_us


@dataclass(frozen=True, slots=True)
class Clock:
    """The wall's microseconds, seconds that only go forward, and a number from 0 to 1."""

    wall_us: Callable[[], int] = wall_us
    seconds: Callable[[], float] = time.perf_counter
    chance: Callable[[], float] = random.random
