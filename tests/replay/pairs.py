"""One profile's history under one of its settings, replayed under another, beside what PyTorch did under that one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations

from allocscope.allocator.settings import parse_settings
from allocscope.allocator.simulator import Device, Simulator
from allocscope.allocator.simulator.ask import ask_again
from allocscope.allocator.simulator.history import History
from allocscope.allocator.simulator.what_if import script_of
from allocscope.allocator.snapshot import TraceEntry
from tests.replay.cases import Case

_REQUESTS = ("alloc", "free_requested", "oom")
_GROWTH = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}


@dataclass(frozen=True, slots=True)
class Pair:
    """What is the same, as far as both sequences go: either ends where it ran out of memory."""

    history: str
    other: str
    segments: bool
    """Each segment got, mapped, unmapped, given back: its size and stream, in order."""
    peak: bool
    """What was reserved at most."""
    retries: bool | None
    """None: PyTorch's own figure is of more requests than both have."""
    failure: bool
    """Whether a request fails, and which."""
    shown: bool
    """Whether the history shows each call of empty_cache; one that gave nothing back leaves no trace, and may elsewhere."""

    @property
    def equal(self) -> bool:
        """All that is known."""
        return self.segments and self.peak and self.failure and self.retries is not False


def pairs_of(cases: Sequence[Case]) -> Iterator[Pair]:
    """Each with each other of one profile, on the same device."""
    histories = {case.name: script_of(case.source)[0] for case in cases}
    for case, other in permutations(cases, 2):
        yield _pair(case, histories[case.name], other)


def _pair(case: Case, history: History, other: Case) -> Pair:
    then = other.source
    assert then.device_total_bytes is not None
    simulator = Simulator(
        parse_settings(then.conf), Device(then.device_total_bytes), memory_fraction=then.memory_fraction, trace=True
    )
    other_bytes = then.other_used
    assert isinstance(other_bytes, int)
    outcome = ask_again(history.asked, simulator, lambda _: other_bytes)
    count = min(_requests(case.source.trace), _requests(then.trace))
    replayed, real = _first(simulator.trace, count), _first(then.trace, count)
    whole = _requests(then.trace) == count
    return Pair(
        history=case.name,
        other=other.name,
        segments=_driver_calls(replayed) == _driver_calls(real),
        peak=_peak(replayed) == _peak(real),
        retries=outcome.num_alloc_retries == other.stats["num_alloc_retries"]
        if whole and _requests(simulator.trace) == count
        else None,
        failure=_failed(replayed) == _failed(real),
        shown=sum(each.what == "empty_cache" for each in history.asked) == case.empty_caches,
    )


def _requests(trace: Iterable[TraceEntry]) -> int:
    return sum(entry.action in _REQUESTS for entry in trace)


def _first(trace: Iterable[TraceEntry], requests: int) -> list[TraceEntry]:
    """What so many requests wrote, without what the next one did before it was served."""
    found: list[TraceEntry] = []
    for entry in trace:
        if entry.action in _REQUESTS:
            if not requests:
                break
            requests -= 1
        found.append(entry)
    while found and found[-1].action not in _REQUESTS and not _ends_a_free(found):
        found.pop()
    return found


def _ends_a_free(entries: Sequence[TraceEntry]) -> bool:
    return len(entries) > 1 and [entry.action for entry in entries[-2:]] == ["free_requested", "free_completed"]


def _driver_calls(trace: Iterable[TraceEntry]) -> list[tuple[str, int, int]]:
    return [(entry.action, entry.size, entry.stream) for entry in trace if entry.action in _GROWTH]


def _peak(trace: Iterable[TraceEntry]) -> int:
    reserved = peak = 0
    for entry in trace:
        reserved += _GROWTH.get(entry.action, 0) * entry.size
        peak = max(peak, reserved)
    return peak


def _failed(trace: Iterable[TraceEntry]) -> list[int]:
    requests = (entry for entry in trace if entry.action in _REQUESTS)
    return [at for at, entry in enumerate(requests) if entry.action == "oom"]
