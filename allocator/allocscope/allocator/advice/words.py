"""What advice says: sentences and phrases with figures of the replays."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from allocscope.allocator.advice.attempt import Attempt
from allocscope.allocator.advice.demand import Demand
from allocscope.model import Trial
from allocscope.model.figures import percent, size

_TOLD = 0.1
"""A difference in figures beside the point is told from this share on."""
_ONLY_JUST = 0.03
"""What is left of the room, below which it is told."""


def name_of(tried: Attempt | Trial) -> str:
    """Settings, or a change to the program, for people."""
    return tried.change or tried.conf or "the default configuration"


def told_change(change: str) -> str:
    """A change to the program, as one would ask for it."""
    name, _, number = change.partition(":")
    match name:
        case "buckets":
            return f"pad shapes to {number} sizes"
        case "empty_cache":
            return f"call torch.cuda.empty_cache() after every {number} steps"
        case "one_stream":
            return "do all work on one stream"
        case _:
            return "run the largest step once more at the start"


def told_action(trial: Trial, in_force: str) -> str:
    """What to do to have it so."""
    parts = []
    if trial.conf != in_force:
        parts.append(f"set PYTORCH_CUDA_ALLOC_CONF={trial.conf}" if trial.conf else "unset PYTORCH_CUDA_ALLOC_CONF")
    if trial.change:
        parts.append(told_change(trial.change))
    action = " and ".join(parts)
    return action[:1].upper() + action[1:]


def helped(trial: Trial, recorded: Trial, in_force: str, room_bytes: int | None) -> str:
    """The recommendation for a run that died."""
    action = told_action(trial, in_force)
    if trial.needed_bytes is None or room_bytes is None:
        return f"{action}: every recorded request is served then, the one that failed too."
    if trial.needed_bytes > room_bytes:
        return f"{action}: every recorded request is served then, though only because there was more room at first."
    fits = (
        f"{action}: the recorded requests then need {size(trial.needed_bytes)} of the {size(room_bytes)} that was there"
    )
    if room_bytes - trial.needed_bytes < _ONLY_JUST * room_bytes:
        fits += " (only just)"
    if recorded.needed_bytes is None:
        return f"{fits}; as it was set, one failed."
    return f"{fits}; as it was set they need {size(recorded.needed_bytes)}, and one failed."


def improved(trial: Trial, recorded: Trial, in_force: str, room_bytes: int | None) -> str:
    """The recommendation for a run in which nothing failed."""
    of = "" if room_bytes is None else f" of {size(room_bytes)}"
    return f"{told_action(trial, in_force)}: the recorded requests then need {_amount(trial)}{of} instead of {_amount(recorded)}."


def unchanged(recorded: Trial, room_bytes: int | None, *, settled: bool = False, looked: bool = False) -> str:
    """That nothing is to be done."""
    if room_bytes is None:
        return "No change: nothing failed. How near its limit the job is is not known, since the device's size is not."
    needs = f"No change: the recorded requests need {_amount(recorded)} of {size(room_bytes)}"
    if looked:
        return f"{needs}, and nothing that was tried gains enough to be worth it."
    return (
        f"{needs}, and in the second half of the recording it reserved no more than in the first."
        if settled
        else f"{needs}."
    )


def helpless(demand: Demand, *, died: bool, blocked: Sequence[str]) -> str:
    """That nothing helps, and why; `blocked` would, but must not be used here."""
    if demand.exceeds:
        why = (
            f"at its highest {size(demand.live_bytes)} is live or asked for, and {size(demand.room_bytes)} was there, "
            "too little even without any holes"
        )
        if demand.other_growth_bytes > demand.live_bytes - demand.room_bytes:
            why += f" (others on the device took {size(demand.other_growth_bytes)} more during the recording)"
    elif died and blocked:
        why = f"every request would be served with {blocked[0]}, but that must not be used here"
    elif died:
        why = (
            f"the {size(demand.live_bytes)} that is live or asked for would fit in {size(demand.room_bytes)}, but nothing that was "
            "tried brings the holes together"
        )
    else:
        why = "nothing that was tried needs much less than the job does now"
    growth = f" {_grew(demand)}" if demand.growth_bytes else ""
    return f"Nothing that was tried helps: {why}.{growth}"


def _grew(demand: Demand) -> str:
    grown = "Memory that is never freed" if demand.keeps_growth else "What it needs at a time"
    return f"{grown} grew by {size(demand.growth_bytes)} over the second half of the recording."


def outlook(demand: Demand, left_bytes: int | None) -> str | None:
    """What the advice does not cure; None: nothing is seen that would use up what is left in the time that was recorded."""
    if left_bytes is None:
        return None
    left = max(left_bytes, 0)
    if demand.growth_bytes and left < 2 * demand.growth_bytes:
        lasts = f"{percent(left / demand.growth_bytes / 2)} of the time recorded here"
        return f"{_grew(demand)} If that goes on, what is left lasts for {lasts}."
    if left < demand.other_growth_bytes:
        return (
            f"Others on the device took {size(demand.other_growth_bytes)} more during the recording, "
            f"and {size(left)} would be left."
        )
    return None


def gains_of(trial: Trial, recorded: Trial, room_bytes: int | None) -> Iterator[str]:
    """What it gains, as phrases; nothing where it fails: its figures then end where it did."""
    if trial.failed_at is not None:
        return
    if recorded.failed_at is not None:
        yield f"every recorded request is served; as it was set request {recorded.failed_at:,} failed"
    if trial.needed_bytes is not None and room_bytes is not None:
        left = room_bytes - trial.needed_bytes
        if left >= 0:
            yield f"{size(left)} of {size(room_bytes)} is left"
    if trial.needed_bytes is not None and recorded.needed_bytes is not None:
        saved = recorded.needed_bytes - trial.needed_bytes
        if saved > 0:
            yield f"needs {size(saved)} less than as it was set"
    yield from _compared(trial, recorded, less=True)


def costs_of(trial: Trial, recorded: Trial, room_bytes: int | None) -> Iterator[str]:
    """What it costs, as phrases; nothing: the replay shows no costs."""
    if trial.failed_at is not None:
        yield f"request {trial.failed_at:,} fails"
        return
    if trial.needed_bytes is not None and room_bytes is not None and trial.needed_bytes > room_bytes:
        yield f"in the least room that there was at any time ({size(room_bytes)}) it would have failed"
    yield from _compared(trial, recorded, less=False)
    rounding = trial.allocated_peak_bytes - recorded.allocated_peak_bytes
    if recorded.failed_at is None and rounding > 0:
        yield f"{size(rounding)} more allocated at most"
    match (trial.change or "").partition(":")[0]:
        case "one_stream":
            yield "work of different streams no longer overlaps"
        case "empty_cache":
            yield "each call waits for the device, and what it gives back is asked for again"
        case "buckets":
            yield "padded shapes take time to compute as well"
        case "largest_first":
            yield "one step's time at the start"


def _compared(trial: Trial, recorded: Trial, *, less: bool) -> Iterator[str]:
    """Flushes, calls to the driver, holes: what there is less of, or more."""
    for now, before, what, shown in (
        (trial.num_alloc_retries, recorded.num_alloc_retries, "flushes of the cache", _count),
        (_calls(trial), _calls(recorded), "calls to the driver for memory", _count),
        (trial.stranded_peak_bytes, recorded.stranded_peak_bytes, "in holes at most", size),
        (trial.reserved_peak_bytes, recorded.reserved_peak_bytes, "reserved at most", size),
    ):
        if abs(now - before) > _TOLD * before and (now < before) == less:
            yield f"{shown(now)} {what} instead of {shown(before)}"


def _calls(trial: Trial) -> int:
    return trial.num_device_alloc + trial.num_device_free


def _count(number: int) -> str:
    return f"{number:,}"


def _amount(trial: Trial) -> str:
    return size(trial.reserved_peak_bytes if trial.needed_bytes is None else trial.needed_bytes)
