"""What a program asked for, read off an allocator's own history, to be asked again under other settings (ALLOCATOR.md 13).

A history tells allocations and frees. What else was asked follows: a free that does not complete at once waited for another
stream; segments given back by no allocation were an empty_cache, or a private pool's end. To tell whose doing it was the
requests are simulated under the settings they were made with, with the addresses that the history tells, and what the simulator
does is held against what was recorded: where it is the same, what it says of other settings is to be trusted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import product, takewhile
from typing import Any

from allocscope.allocator.settings import AllocatorSettings
from allocscope.allocator.simulator.ask import Outcome, ask_again
from allocscope.allocator.simulator.asked import Asked, OtherUsed
from allocscope.allocator.simulator.beginning import RELEASES, Beginning, walk_back
from allocscope.allocator.simulator.reading import BehindError, Reading
from allocscope.allocator.simulator.rules import NEWEST
from allocscope.allocator.simulator.simulator import Simulator
from allocscope.allocator.simulator.told_addresses import told_device
from allocscope.allocator.snapshot import TraceEntry

__all__ = ["Asked", "History", "OtherUsed", "Outcome", "ask_again", "read_history"]

_KNOWN = frozenset((*RELEASES, "segment_alloc", "segment_map", "alloc", "free_requested", "free_completed", "oom"))
_ENDINGS = (*RELEASES, "free_completed")
_VERSIONS = (NEWEST, "2.12.1", "2.11.0")


@dataclass(frozen=True, slots=True)
class History:
    """The requests of a history, and how well they explain it."""

    asked: tuple[Asked, ...]
    version: str
    """Of PyTorch, whose rules explain it best."""
    entries: int
    """How many there are that a request explains."""
    explained: int
    """How many the simulator wrote too, from the first on; all of them: the simulation is exact."""
    failed_at: int | None
    """The last request, of `asked`, that ended in an OutOfMemoryError; None: none did. With `survived` it did not end the run."""
    is_whole: bool = True
    """Whether it begins with an allocator that holds nothing; else `asked` begins with what was there (see `Asked.what`)."""
    num_alloc_retries: int | None = None
    """How often the cache was flushed for a request; None: the simulation went astray, and so it is not known."""
    ties: int = 0
    """How often one of two equally large free blocks was chosen as the history has it, since it is not told which is older."""
    contradictions: int = 0
    """How many entries cannot have led to the segments that came with them: these are of something else."""
    differs_us: int | None = None
    """When the first entry was recorded that is not explained; None: all are."""

    @property
    def exact(self) -> bool:
        """Whether the simulator does exactly what was recorded."""
        return self.explained == self.entries


def read_history(
    trace: Sequence[TraceEntry],
    settings: AllocatorSettings,
    *,
    device_total_bytes: int,
    other_used: OtherUsed,
    allowed_bytes: int | None = None,
    version: str | None = None,
    segments: Iterable[Mapping[str, Any]] = (),
) -> History:
    """The requests of one device's history.

    `segments` are those after its last entry, as torch.cuda.memory_snapshot() gives them: where the history begins in the middle
    of a run, what is walked back from them is there before. Without them it must begin with the first allocation to be explained in
    full. A snapshot does not tell PyTorch's version: where `version` is None, it is the one whose order of equal blocks explains
    most, with the least taken from the history itself.

    `allowed_bytes` is what a memory fraction lets be reserved; None: what the settings' own does. Sizes are bytes.
    """
    entries = [entry for entry in trace if entry.action in _KNOWN]
    # what a request before the first did may end here: it is taken to have been done before
    ended = len(list(takewhile(lambda entry: entry.action in _ENDINGS, entries)))
    del entries[:ended]
    begins = walk_back(entries, segments, settings) if segments else Beginning([], 0)
    # segments that are of something else may still come with a history that is whole by itself
    befores = [begins.segments, []] if begins.contradictions else [begins.segments]
    best: History | None = None
    for candidate, before in product(_VERSIONS if version is None else (version,), befores):
        simulator = Simulator(settings, told_device(device_total_bytes), version=candidate)
        if allowed_bytes is not None:
            simulator.set_allowed(allowed_bytes)
        reading = Reading(
            simulator, other_used, entries, before, at_least=0 if best is None else best.explained - ended
        )
        with suppress(BehindError):
            reading.read()
            found = _history(reading, entries, ended, begins.contradictions)
            best = found if best is None else max(best, found, key=_worth)
        if best is not None and best.exact and not best.ties:
            break
    assert best is not None
    return best


def _history(reading: Reading, entries: Sequence[TraceEntry], ended: int, contradictions: int) -> History:
    astray_at = reading.astray_at
    return History(
        asked=tuple(reading.asked),
        version=reading.simulator.version,
        entries=ended + len(entries),
        explained=ended + (len(entries) if astray_at is None else astray_at),
        failed_at=reading.failed_at,
        is_whole=reading.is_whole,
        contradictions=contradictions,
        num_alloc_retries=reading.simulator.stats()["num_alloc_retries"] if astray_at is None else None,
        ties=reading.ties,
        differs_us=None if astray_at is None else entries[min(astray_at, len(entries) - 1)].time_us,
    )


def _worth(history: History) -> tuple[int, int]:
    return history.explained, -history.ties
