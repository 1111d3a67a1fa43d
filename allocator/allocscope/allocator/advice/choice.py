"""Which of what was tried is worth it.

The rules, so that they can be told:

- Only what serves every recorded request is advised, and nothing that a hazard blocks.
- Of those that do, how much room they leave counts first, and of near-equals (`near_bytes`) what is simplest: fewest keys, of them
  those whose effect hangs least on how requests happen to fall (`_SURE`), and then fewest calls to the driver and flushes.
- Where nothing failed, other settings are worth it only for a run that is said to be at risk, or flushed its cache `MANY_FLUSHES`
  times or more, or grows so that what is left would not last as long again, or is near its limit (it needs more than `NEAR_LIMIT` of
  its room) and not settled (it first reserved its most in the second half, or flushed). And only if they need `WORTH` of the room less, or need
  no more and leave a fifth of many flushes at most.
"""

from __future__ import annotations

from collections.abc import Iterable

from allocscope.allocator.settings import entries_of
from allocscope.model import Trial

NEAR_LIMIT = 0.9
WORTH = 0.05
MANY_FLUSHES = 5
_FEW_FLUSHES = 0.2
_SURE = (
    "expandable_segments",
    "roundup_power2_divisions",
    "max_split_size_mb",
    "large_segment_size_mb",
    "garbage_collection_threshold",
)
"""The surest first: with expandable segments no hole that is larger than a page stays, wherever requests fall."""
_NEAR = 0.01
_NEAR_OF_LEFT = 0.25
_CALLS_A_FLUSH = 10
"""How many calls to the driver a flush is worth: it waits for the device, and much of what it gives back is asked for again."""


def serves(trial: Trial) -> bool:
    """Whether every request is served, and nothing is known against it."""
    return trial.failed_at is None and trial.blocked is None


def near_bytes(room_bytes: int, best_needed_bytes: int) -> int:
    """How much more than the best one may need and be near-equal: a hundredth of the room, or a quarter of what the best leaves."""
    return int(max(_NEAR * room_bytes, _NEAR_OF_LEFT * (room_bytes - best_needed_bytes)))


def best_of(trials: Iterable[Trial], room_bytes: int | None) -> Trial | None:
    """The one to take; None: none serves. Where the room that they need was not measured, the simplest."""
    served = [trial for trial in trials if serves(trial)]
    measured = [(trial.needed_bytes, trial) for trial in served if trial.needed_bytes is not None]
    if not measured:
        return min(served, key=burden, default=None)
    least = min(needed for needed, _ in measured)
    bound = least + (0 if room_bytes is None else near_bytes(room_bytes, least))
    return min((trial for needed, trial in measured if needed <= bound), key=burden)


def burden(trial: Trial) -> tuple[int, int, int]:
    """What is less is simpler."""
    keys = [key for key, _ in entries_of(trial.conf)]
    unsure = max((_SURE.index(key) for key in keys if key in _SURE), default=0)
    calls = trial.num_device_alloc + trial.num_device_free
    return len(keys), unsure, calls + _CALLS_A_FLUSH * trial.num_alloc_retries


def is_near_limit(recorded: Trial, room_bytes: int | None) -> bool:
    """Whether a run in which nothing failed had little left."""
    needed = recorded.needed_bytes
    return room_bytes is not None and needed is not None and needed > NEAR_LIMIT * room_bytes


def will_outgrow(recorded: Trial, growth_bytes: int, room_bytes: int | None) -> bool:
    """Whether what it grew by over half of the recording would use up what is left before as much again was recorded.

    So it is of a run that needs more than the least room that it had: it was served only because that came late.
    """
    if room_bytes is None or recorded.needed_bytes is None:
        return False
    return room_bytes - recorded.needed_bytes < 2 * growth_bytes


def flushes_much(recorded: Trial) -> bool:
    """Whether it flushed its cache so often that ending that is a gain."""
    return recorded.num_alloc_retries >= MANY_FLUSHES


def is_worth_it(trial: Trial, recorded: Trial, room_bytes: int | None) -> bool:
    """Whether it gains enough for a run in which nothing failed."""
    if trial.needed_bytes is None or recorded.needed_bytes is None:
        return False
    saved = recorded.needed_bytes - trial.needed_bytes
    ends_flushes = flushes_much(recorded) and trial.num_alloc_retries <= _FEW_FLUSHES * recorded.num_alloc_retries
    return saved >= WORTH * (room_bytes or recorded.reserved_peak_bytes) or (saved >= 0 and ends_flushes)
