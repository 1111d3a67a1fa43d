"""What a history tells of an address before a moment, in one reading for all moments."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence

from allocscope.allocator.snapshot import TraceEntry

_TELLS_A_BLOCK = frozenset(("alloc", "free_requested", "free_completed"))


class Past:
    """A trace, read backwards once, and no further than is asked for.

    `before` is the index of a trace entry, and never more than at the first question.
    """

    def __init__(self, trace: Sequence[TraceEntry]) -> None:
        self._trace = trace
        self._read_to: int | None = None
        # By address, the entries' indices, the latest first; negative, for bisect wants them to ascend.
        self._allocs: defaultdict[int, list[int]] = defaultdict(list)
        self._told: defaultdict[int, list[int]] = defaultdict(list)
        self._addresses: list[int] = []

    def alloc(self, address: int, before: int) -> int | None:
        """The latest entry that allocated a block there."""
        found = _latest(self._allocs.get(address, ()), before)
        return self._read_on(address, before) if found is None else found

    def told(self, above: int, upto: int, before: int) -> Iterator[tuple[int, int]]:
        """The addresses in (above, upto] of which what was read tells a block, each with the latest entry that does."""
        if len(self._addresses) != len(self._told):
            self._addresses = sorted(self._told)
        for place in range(bisect_right(self._addresses, above), bisect_right(self._addresses, upto)):
            address = self._addresses[place]
            found = _latest(self._told[address], before)
            if found is not None:
                yield address, found

    def _read_on(self, address: int, before: int) -> int | None:
        """Up to the next entry that allocated a block there."""
        allocs, told = self._allocs, self._told
        for index in range((before if self._read_to is None else self._read_to) - 1, -1, -1):
            entry = self._trace[index]
            action = entry.action
            if action in _TELLS_A_BLOCK:
                at = entry.address
                key = -index
                told[at].append(key)
                if action == "alloc":
                    allocs[at].append(key)
                    if at == address and index < before:
                        self._read_to = index
                        return index
        self._read_to = 0
        return None


def _latest(indices: Sequence[int], before: int) -> int | None:
    place = bisect_right(indices, -before)
    return -indices[place] if place < len(indices) else None
