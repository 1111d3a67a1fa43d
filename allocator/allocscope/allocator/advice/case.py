"""What is known of a run before anything is tried: its requests, the room that it had, what it needs anyway."""

from __future__ import annotations

from dataclasses import dataclass

from allocscope.allocator.advice.attempt import limit_bytes
from allocscope.allocator.advice.circumstances import Circumstances, circumstances_of, release_of
from allocscope.allocator.advice.demand import Demand, demand_of
from allocscope.allocator.simulator.beginning import GAINS, RELEASES, growth_bytes, reserved_in_the_end
from allocscope.allocator.simulator.exactness import Recorded, recorded_of
from allocscope.allocator.simulator.history import History
from allocscope.allocator.simulator.rules import is_version
from allocscope.allocator.simulator.script import Script
from allocscope.allocator.simulator.what_if import UNKNOWN_TOTAL_BYTES, Source, script_of


@dataclass(frozen=True, slots=True)
class Case:
    """A history, and what is known of it before anything is tried."""

    source: Source
    circumstances: Circumstances
    history: History
    script: Script
    conf: str
    """In force."""
    demand: Demand
    room_bytes: int | None
    """The least that the allocator could have at any time; None: not known."""
    has_limit: bool
    """Whether a memory fraction limits the allocator."""
    torch_version: str | None
    """As it was told; None: not known."""
    recorded: Recorded
    is_settled: bool
    """Whether the most that was ever reserved was reserved in the first half of the history."""
    at_risk: bool

    @property
    def release(self) -> tuple[int, int]:
        """PyTorch's, by what is known of it or by what explains the history."""
        return release_of(self.torch_version, self.history.version)

    @property
    def died(self) -> bool:
        """Whether the run ended in an OutOfMemoryError."""
        at = self.history.failed_at
        return at is not None and not self.history.asked[at].survived


def case_of(
    source: Source, circumstances: Circumstances, version: str | None, at_risk: bool, history: History | None
) -> Case:
    """What a source tells; `version` is PyTorch's, and `history` is what was read of it, where it was. ValueError: `version` is none."""
    told = next(
        (each for each in (version, source.version, circumstances.torch_version) if each and is_version(each)), None
    )
    history, script = script_of(source, version=version or told, history=history)
    conf = source.conf_in_force
    limit, total = limit_bytes(script, conf), script.device_total_bytes
    last = len(history.asked) if history.failed_at is None else history.failed_at + 1
    asked = history.asked[:last]
    demand = demand_of(asked, device_total_bytes=total, limit_bytes=limit, other_used=script.other_used)
    room = total - max((script.other_used(each.time_us) for each in asked), default=0)
    is_known = total != UNKNOWN_TOTAL_BYTES
    recorded = recorded_of(history, source.trace, source.segments)
    return Case(
        source=source,
        circumstances=circumstances_of(source, circumstances),
        history=history,
        script=script,
        conf=conf,
        demand=demand,
        room_bytes=(room if is_known else None) if limit is None else min(room, limit),
        has_limit=limit is not None,
        torch_version=told,
        recorded=recorded,
        is_settled=_is_settled(source, recorded.reserved_peak_bytes),
        at_risk=at_risk,
    )


def _is_settled(source: Source, peak_bytes: int) -> bool:
    """Whether the most that was ever reserved was reserved in the first half of the history."""
    reserved = reserved_in_the_end(source.trace, source.segments) - growth_bytes(source.trace)
    for entry in source.trace[: len(source.trace) // 2]:
        if reserved == peak_bytes:
            return True
        reserved += entry.size * ((entry.action in GAINS) - (entry.action in RELEASES))
    return reserved == peak_bytes
