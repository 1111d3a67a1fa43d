"""In which order the segments were made that a history finds there already.

It decides between equally large free blocks (from PyTorch 2.13 on), and no snapshot tells it. Where the history shows one to have been
chosen before the other, the order is known from then on.
"""

from __future__ import annotations

from bisect import bisect_left, insort

from allocscope.allocator.simulator.blocks import FREE, Block, FreeSet
from allocscope.allocator.simulator.rules import Order
from allocscope.allocator.simulator.simulator import Simulator

_SPACING = 1 << 1000
"""Between the numbers of two neighbours, so that there is room for all that may come to lie between them."""


class Ties:
    """The order among the segments that a simulator adopted; at first by address. New ones come after them."""

    def __init__(self, simulator: Simulator) -> None:
        self._chosen: set[tuple[int, int]] = set()
        """Which segment (by its address) is known to come before which."""
        self._numbers: list[int] = []
        """Those in use, ascending."""
        self.count = 0
        """How often a choice was taken from the history."""
        if simulator.order is Order.SEGMENT:
            blocks = list(simulator.blocks())
            before = sorted({block.counter for block in blocks})
            anew = {number: (at - len(before)) * _SPACING for at, number in enumerate(before)}
            self._numbers = list(anew.values())
            for block in blocks:
                block.counter = anew[block.counter]  # in the same order as before, so that all sets stay sorted

    def choose(self, free_set: FreeSet, size: int, taken: int, address: int) -> bool:
        """Whether the free block at `address` can have been preferred to the one at `taken`; it is from now on.

        Both free and of the same size, which is `size` or more.
        """
        for found in free_set.sizes[bisect_left(free_set.sizes, size) :]:
            equals = {block.address: block for block in free_set.by_size[found]}
            if taken in equals:
                return address in equals and self._prefer(equals[address], equals[taken])
        return False

    def _prefer(self, rival: Block, block: Block) -> bool:
        if max(rival.counter, block.counter) >= 0 or rival.segment is block.segment:
            return False  # made within the history: its order is known
        pair = rival.segment.address, block.segment.address
        if pair[::-1] in self._chosen:
            return False
        self._chosen.add(pair)
        at = bisect_left(self._numbers, block.counter)
        lower = self._numbers[at - 1] if at else block.counter - 2 * _SPACING
        number = (lower + block.counter) // 2
        if not lower < number < block.counter:
            return False
        self._numbers.remove(rival.counter)
        insort(self._numbers, number)
        for each in _whole_segment(rival):
            _renumber(each, number)
        self.count += 1
        return True


def _whole_segment(block: Block) -> list[Block]:
    while block.prev is not None:
        block = block.prev
    found = [block]
    while (following := found[-1].next) is not None:
        found.append(following)
    return found


def _renumber(block: Block, number: int) -> None:
    if block.state != FREE:
        block.counter = number
        return
    free_set, gc_base = block.segment.free_set, block.gc_base
    free_set.remove(block)
    block.counter = number
    free_set.add(block)
    block.gc_base = gc_base
