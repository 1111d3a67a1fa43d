"""How well a replay under the recorded settings does what really happened, which is how far what it says of others is to be trusted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from allocscope.allocator.simulator.ask import Outcome
from allocscope.allocator.simulator.beginning import GAINS, RELEASES, growth_bytes, reserved_in_the_end
from allocscope.allocator.simulator.history import History
from allocscope.allocator.snapshot import SnapshotSegment, TraceEntry


@dataclass(frozen=True, slots=True)
class Recorded:
    """What a history itself tells of its run, up to the failure that ended it. Bytes and counts."""

    reserved_peak_bytes: int
    num_device_alloc: int
    """Segments got from the driver, and ranges of pages."""
    num_device_free: int
    num_ooms: int


@dataclass(frozen=True, slots=True)
class Exactness:
    """A history, and its replay under the settings that it was recorded with."""

    history: History
    recorded: Recorded
    replayed: Outcome
    rules_known: bool
    """Whether the rules are verified for the PyTorch that recorded it, as far as that is known; else they are the nearest."""

    @property
    def exact(self) -> bool:
        """Whether everything that can be compared is the same; where not, what other settings come to is an estimate."""
        return not any(True for _ in self.differences())

    def differences(self) -> Iterator[str]:
        """What is not the same or not known, in words; nothing where it is exact."""
        history, then, now = self.history, self.recorded, self.replayed
        if not self.rules_known:
            yield "the rules of the PyTorch that recorded it are not known here: these are the nearest"
        if history.contradictions:
            yield f"the history does not lead to the snapshot's segments, which {history.contradictions:,} of its entries contradict"
        if not history.exact:
            yield f"the history is explained up to entry {history.explained} of {history.entries}"
        if not history.is_whole:
            yield (
                "the history begins in the middle of the run: what was there is asked for first, in the order of addresses,"
                " and so it lies a little otherwise"
            )
        for what, before, after in (
            ("bytes reserved at most", then.reserved_peak_bytes, now.reserved_peak_bytes),
            ("segments got from the driver", then.num_device_alloc, now.num_device_alloc),
            ("segments given back", then.num_device_free, now.num_device_free),
            ("flushes", history.num_alloc_retries, now.num_alloc_retries),
            ("requests that failed", then.num_ooms, now.num_ooms),
        ):
            if before is not None and before != after:
                yield f"{what}: {before:,} then, {after:,} in the replay"

    def words(self) -> str:
        """In one sentence."""
        history, found = self.history, list(self.differences())
        if not found:
            return f"exact: all {history.entries:,} entries of the history are explained to the byte"
        explained = f"{history.explained:,} of {history.entries:,} entries are explained to the byte"
        return f"an estimate: {explained}; " + "; ".join(found)


def recorded_of(history: History, trace: Sequence[TraceEntry], segments: Sequence[SnapshotSegment]) -> Recorded:
    """What the history tells, up to the failure that ended the run. `segments` are those after its last entry."""
    end = len(trace)
    if history.failed_at is not None and not history.asked[history.failed_at].survived:
        end = 1 + max(at for at, entry in enumerate(trace) if entry.action == "oom")
    reserved = peak = reserved_in_the_end(trace, segments) - growth_bytes(trace)
    gained = released = failed = 0
    for entry in trace[:end]:
        action = entry.action
        if action in GAINS:
            gained += 1
            reserved += entry.size
            peak = max(peak, reserved)
        elif action in RELEASES:
            released += 1
            reserved -= entry.size
        elif action == "oom":
            failed += 1
    return Recorded(peak, gained, released, failed)
