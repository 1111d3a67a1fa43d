"""The same requests once more: under other settings, after a change to the program, or with less room."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from allocscope.allocator.advice.changes import changed
from allocscope.allocator.settings import parse_settings
from allocscope.allocator.simulator.device import Device
from allocscope.allocator.simulator.history import Asked, OtherUsed, Outcome, ask_again
from allocscope.allocator.simulator.script import Script
from allocscope.allocator.simulator.simulator import Simulator


@dataclass(frozen=True, slots=True)
class Attempt:
    """One replay to make. Small, and of plain values: it can be handed to another process."""

    conf: str
    """PYTORCH_CUDA_ALLOC_CONF."""
    change: str | None = None
    """To the program, as `changed` takes it; None: none."""
    room_bytes: int | None = None
    """What the allocator may reserve at most, at any time; None: what it could have when it was recorded."""


Replay = Callable[[Sequence[Attempt]], Iterable[Outcome]]
"""Makes attempts, in any order or at once, and gives their outcomes one by one, in the order of the attempts."""


def limit_bytes(script: Script, conf: str) -> int | None:
    """What a memory fraction, of the program or of these settings, lets the allocator reserve; None: there is none."""
    fraction = script.memory_fraction
    if fraction is None:
        fraction = parse_settings(conf).memory_fraction
    return int(fraction * script.device_total_bytes) if fraction < 1 else None


def outcome_of(script: Script, attempt: Attempt) -> Outcome:
    """Make one attempt. Where PyTorch itself would be corrupt the replay ends (`Outcome.undefined`).

    By the rules of PyTorch 2.11 to 2.14, others by the nearest. SettingsError: `conf` cannot be read; ValueError: `change` is none.
    """
    asked = changed(script.asked, attempt.change) if attempt.change else script.asked
    total, room = script.device_total_bytes, attempt.room_bytes
    limit, other_used = limit_bytes(script, attempt.conf), script.other_used
    if room is None:
        return _made(script, attempt.conf, asked, total, limit, other_used)
    # where there is a limit it is what decides (garbage collection goes by it), and else what others leave: a smaller device
    # would be another one, since expandable segments reserve addresses by its size
    total = max(total, room)
    taken = total - room if limit is None else 0
    return _made(script, attempt.conf, asked, total, None if limit is None else room, lambda _: taken)


def one_by_one(script: Script) -> Replay:
    """Makes them one after the other, here."""

    def replay(attempts: Sequence[Attempt]) -> Iterator[Outcome]:
        return (outcome_of(script, attempt) for attempt in attempts)

    return replay


def _made(
    script: Script, conf: str, asked: Iterable[Asked], total_bytes: int, limit: int | None, other_used: OtherUsed
) -> Outcome:
    simulator = Simulator(parse_settings(conf), Device(total_bytes), version=script.version, memory_fraction=1.0)
    simulator.set_allowed(limit)
    return ask_again(asked, simulator, other_used, undefined_ends=True)
