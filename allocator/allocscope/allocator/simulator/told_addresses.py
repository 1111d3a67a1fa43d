"""A device that gives the addresses that a history tells."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Hashable, Sequence

from allocscope.allocator.settings import SMALL_SEGMENT_BYTES
from allocscope.allocator.simulator.device import Device, LowestGap
from allocscope.allocator.snapshot import TraceEntry

_LOOK_AHEAD = 100


class ToldAddresses:
    """Addresses as a history tells them; where it does not, from above all that it knows."""

    def __init__(self, start: int) -> None:
        self.next: list[int] = []
        """Where the next range may begin; the first that is not in one of the same owner is taken."""
        self.owner: Hashable = None
        self._starts: dict[Hashable, list[int]] = {}
        """By owner, ascending."""
        self._ends: dict[int, tuple[int, Hashable]] = {}
        self._others = LowestGap(start)

    def take(self, size: int) -> int:
        """The next one told."""
        starts = self._starts.setdefault(self.owner, [])
        for at, address in enumerate(self.next):
            if not self._is_inside(starts, address):
                del self.next[at]
                break
        else:
            address = self._others.take(size)
        insort(starts, address)
        self._ends[address] = address + size, self.owner
        return address

    def _is_inside(self, starts: Sequence[int], address: int) -> bool:
        at = bisect_right(starts, address) - 1
        return at >= 0 and address < self._ends[starts[at]][0]

    def give_back(self, address: int, size: int) -> None:
        """Nobody has that range any more."""
        _, owner = self._ends.pop(address, (0, None))
        starts = self._starts.get(owner, [])
        at = bisect_left(starts, address)
        if at < len(starts) and starts[at] == address:
            del starts[at]

    def copy(self) -> ToldAddresses:
        """The same, to go on apart."""
        other = ToldAddresses(0)
        other.next, other.owner, other._ends = self.next.copy(), self.owner, self._ends.copy()
        other._starts = {owner: starts.copy() for owner, starts in self._starts.items()}
        other._others = self._others.copy()
        return other


def told_device(total_bytes: int) -> Device:
    """A device of that size, whose addresses a history tells."""
    return Device(total_bytes, segments=ToldAddresses(1 << 60), reservations=ToldAddresses(1 << 61))


class Maps:
    """Where memory of expandable segments is mapped in a history, by stream, private pool, and small or not."""

    def __init__(self, trace: Sequence[TraceEntry]) -> None:
        self._found: dict[tuple[int, tuple[int, int], bool], tuple[list[int], list[int]]] = {}
        for position, entry in enumerate(trace):
            if entry.action == "segment_map":
                key = (entry.stream, entry.pool_id, entry.size == SMALL_SEGMENT_BYTES)
                positions, addresses = self._found.setdefault(key, ([], []))
                positions.append(position)
                addresses.append(entry.address)

    def addresses(self, stream: int, pool_id: tuple[int, int], *, small: bool, since: int) -> list[int]:
        """The next ones from that entry on."""
        positions, addresses = self._found.get((stream, pool_id, small), ([], []))
        at = bisect_left(positions, since)
        return addresses[at : at + _LOOK_AHEAD]
