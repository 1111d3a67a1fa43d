"""Which batches the collector has, and what of it a restart must know. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

LARGEST_SEQUENCE = 1 << 62
"""No daemon comes to that many batches: what tells of more, a file or a collector, is not believed."""


@dataclass(slots=True)
class SpoolState:
    """A daemon's numbers, and how far the collector has them. One thread changes it, others may look."""

    daemon_id: str
    next_sequence: int = 1
    acknowledged: int = 0
    """The collector has every batch up to this number, but for those that come late."""
    late: tuple[range, ...] = ()
    """Numbers that were overtaken, and are not acknowledged yet; in order, apart from each other."""

    @classmethod
    def from_json(cls, text: str) -> SpoolState:
        """ValueError: it is damaged. An older daemon's knows of nothing late."""
        try:
            return cls._from_told(json.loads(text))
        except (
            KeyError,
            TypeError,
            OverflowError,
            RecursionError,
        ) as error:  # of JSON that is something else, or without end
            raise ValueError(f"no state of a spool: {error!r}") from error

    @classmethod
    def _from_told(cls, told: dict[str, Any]) -> SpoolState:
        daemon_id = told["daemon_id"]
        if not isinstance(daemon_id, str) or not daemon_id:
            raise ValueError(f"no daemon has the id {daemon_id!r}")
        next_sequence, acknowledged = int(told["next_batch"]), int(told["acknowledged"])
        if not 0 <= acknowledged < next_sequence <= LARGEST_SEQUENCE:
            raise ValueError(f"batch {next_sequence} cannot be the next after {acknowledged}")
        late = tuple(range(int(first), int(last) + 1) for first, last in told.get("late", ()))
        ends = [end for numbers in late for end in (numbers.start, numbers.stop)]
        if ends and not (ends == sorted(set(ends)) and ends[0] > 0 and ends[-1] <= acknowledged + 1):
            raise ValueError(f"no such batches can come late: {told['late']}")
        return cls(daemon_id, next_sequence, acknowledged, late)

    def to_json(self) -> str:
        """A line."""
        late = [(numbers.start, numbers.stop - 1) for numbers in self.late]
        told = {"daemon_id": self.daemon_id, "next_batch": self.next_sequence, "acknowledged": self.acknowledged}
        return json.dumps(told | ({"late": late} if late else {})) + "\n"

    def acknowledge(self, through: int) -> None:
        """The collector has those that were sent in order, up to this number."""
        self.acknowledged = max(self.acknowledged, through)
        self.next_sequence = max(self.next_sequence, through + 1)

    def acknowledge_late(self, through: int) -> None:
        """The collector has those that came late, up to this number."""
        rest = (range(max(numbers.start, through + 1), numbers.stop) for numbers in self.late)
        self.late = tuple(numbers for numbers in rest if numbers)

    def postponed(self) -> SpoolState:
        """The same, with every batch so far that is not acknowledged among those that come late."""
        first, late = self.acknowledged + 1, self.late
        if late and late[-1].stop == first:
            first, late = late[-1].start, late[:-1]
        numbers = range(first, self.next_sequence)
        late = (*late, numbers) if numbers else self.late
        return SpoolState(self.daemon_id, self.next_sequence, max(self.acknowledged, self.next_sequence - 1), late)

    def waiting(self, first: int, last: int) -> Iterator[range]:
        """Which of these numbers are not acknowledged."""
        for numbers in (*self.late, range(self.acknowledged + 1, last + 1)):
            some = range(max(numbers.start, first), min(numbers.stop, last + 1))
            if some:
                yield some
