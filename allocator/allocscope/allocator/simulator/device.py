"""The device as the allocator sees it: how much memory there is, and which addresses it gives.

Nothing but an account: sizes and addresses in bytes. How a real driver chooses addresses is nobody's to know; here it is a
parameter, because up to PyTorch 2.11 addresses decide between equal free blocks.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Protocol

from allocscope.allocator.settings import MIB

PAGE_BYTES = 2 * MIB
"""What cudaMalloc and cuMemCreate give memory in."""
GIB = 1 << 30
_ENDLESS = 1 << 128
"""Addresses are never used up, whatever a snapshot or somebody says of a device."""


class Addresses(Protocol):
    """Where ranges of addresses come from."""

    def take(self, size: int) -> int:
        """The start of a range of so many bytes that nobody has."""
        ...

    def give_back(self, address: int, size: int) -> None:
        """That range is nobody's again."""
        ...

    def copy(self) -> Addresses:
        """The same, to go on apart."""
        ...


class LowestGap:
    """Ranges from an address up, in pages: the lowest gap that fits, given back on free."""

    def __init__(self, start: int, page_bytes: int = PAGE_BYTES) -> None:
        self._page_bytes = page_bytes
        self._starts, self._ends = [start], [_ENDLESS]

    def take(self, size: int) -> int:
        """The start of the lowest gap of so many bytes."""
        size = _whole(size, self._page_bytes)
        starts, ends = self._starts, self._ends
        index = next(i for i, (start, end) in enumerate(zip(starts, ends, strict=True)) if end - start >= size)
        address = starts[index]
        if address + size == ends[index]:
            del starts[index], ends[index]
        else:
            starts[index] = address + size
        return address

    def take_at(self, address: int, size: int) -> None:
        """That very range, which must lie within one gap."""
        end = address + _whole(size, self._page_bytes)
        starts, ends = self._starts, self._ends
        index = bisect_right(starts, address) - 1
        if index < 0 or end > ends[index]:
            raise ValueError(f"{size} bytes at {address:#x} are not all free")
        pieces = [(s, e) for s, e in ((starts[index], address), (end, ends[index])) if s < e]
        starts[index : index + 1] = [start for start, _ in pieces]
        ends[index : index + 1] = [end for _, end in pieces]

    def give_back(self, address: int, size: int) -> None:
        """That range is part of a gap again."""
        end = address + _whole(size, self._page_bytes)
        starts, ends = self._starts, self._ends
        index = bisect_right(starts, address)
        joins_before = index > 0 and ends[index - 1] == address
        joins_after = index < len(starts) and starts[index] == end
        if joins_before and joins_after:
            ends[index - 1] = ends[index]
            del starts[index], ends[index]
        elif joins_before:
            ends[index - 1] = end
        elif joins_after:
            starts[index] = address
        else:
            starts.insert(index, address)
            ends.insert(index, end)

    def copy(self) -> LowestGap:
        """The same, to go on apart."""
        other = LowestGap(0, self._page_bytes)
        other._starts, other._ends = self._starts.copy(), self._ends.copy()
        return other


class Rising:
    """Ranges one after the other from an address up; none is used twice."""

    def __init__(self, start: int, step_bytes: int = GIB) -> None:
        self._next, self._step_bytes = start, step_bytes

    def take(self, size: int) -> int:
        """The next range; its size is rounded up to a multiple of the step."""
        address = self._next
        self._next += _whole(size, self._step_bytes)
        return address

    def give_back(self, address: int, size: int) -> None:
        """Nothing: it is not used again."""

    def copy(self) -> Rising:
        """The same, to go on apart."""
        return Rising(self._next, self._step_bytes)


class Device:
    """The memory of one device: what there is, what others use, and what this allocator took."""

    def __init__(
        self,
        total_bytes: int,
        *,
        other_bytes: int = 0,
        outside_bytes: int | None = None,
        segments: Addresses | None = None,
        reservations: Addresses | None = None,
    ) -> None:
        """`other_bytes` is what is in use and not this allocator's; it may be set anew at any time. `outside_bytes` is what of it
        is this process's own, as NVML tells it to the text of an OutOfMemoryError; None: there is no NVML.

        `segments` is where cudaMalloc's addresses come from, `reservations` where expandable segments' do; None for the
        latter: from the same.
        """
        self.total_bytes, self.other_bytes, self.outside_bytes = total_bytes, other_bytes, outside_bytes
        self.used_bytes = 0
        """By this allocator."""
        self.segments: Addresses = LowestGap(1 << 44) if segments is None else segments
        self.reservations: Addresses = self.segments if reservations is None else reservations

    @property
    def free_bytes(self) -> int:
        """What cudaMemGetInfo calls free."""
        return max(self.total_bytes - self.other_bytes - self.used_bytes, 0)

    def malloc(self, size: int) -> int | None:
        """An address, or None where there is not so much free."""
        if not self.commit(size):
            return None
        return self.segments.take(size)

    def free(self, address: int, size: int) -> None:
        """What `malloc` gave is free again."""
        self.segments.give_back(address, size)
        self.uncommit(size)

    def commit(self, size: int) -> bool:
        """Take so much memory without an address of its own (cuMemCreate); False where there is not so much free."""
        size = _whole(size, PAGE_BYTES)
        if self.used_bytes + size > self.total_bytes - self.other_bytes:
            return False
        self.used_bytes += size
        return True

    def take_over(self, size: int) -> None:
        """So much was this allocator's already."""
        self.used_bytes += _whole(size, PAGE_BYTES)

    def uncommit(self, size: int) -> None:
        """Give memory back that `commit` took."""
        self.used_bytes -= _whole(size, PAGE_BYTES)

    def copy(self) -> Device:
        """The same, to go on apart."""
        segments = self.segments.copy()
        own = self.reservations is not self.segments
        other = Device(
            self.total_bytes,
            other_bytes=self.other_bytes,
            outside_bytes=self.outside_bytes,
            segments=segments,
            reservations=self.reservations.copy() if own else segments,
        )
        other.used_bytes = self.used_bytes
        return other


def _whole(size: int, page_bytes: int) -> int:
    return -(-size // page_bytes) * page_bytes
