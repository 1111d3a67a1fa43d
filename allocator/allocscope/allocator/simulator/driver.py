"""What the allocator gets from the driver and gives back: whole segments, and pages of expandable ones (ALLOCATOR.md 2.6, 2.7, 4)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from allocscope.allocator.errors import UndefinedStateError
from allocscope.allocator.settings import AllocatorSettings
from allocscope.allocator.simulator.blocks import FREE, UNMAPPED, Block, FreeSet, Pool, Segment
from allocscope.allocator.simulator.device import Device
from allocscope.allocator.simulator.ledger import Ledger, pool_id_of
from allocscope.allocator.simulator.rules import Order

_RELEASED = -1


class Driver:
    """Segments got and given back, booked, and the numbers that blocks are told apart by."""

    __slots__ = ("_numbers", "_order", "device", "expandable_segments", "ledger", "limit", "settings")

    def __init__(self, device: Device, ledger: Ledger, settings: AllocatorSettings) -> None:
        self.device, self.ledger, self.settings = device, ledger, settings
        self.limit = no_limit(settings)
        """From this size on blocks are oversize."""
        self.expandable_segments = 0
        self._order, self._numbers = ledger.rules.order, 0

    def new_block(self, segment: Segment, address: int, size: int, counter: int) -> Block:
        """A block by itself; `counter` is the segment's, where that decides."""
        block = Block()
        block.segment, block.address, block.size = segment, address, size
        block.requested = block.gc_base = 0
        block.state, block.prev, block.next = FREE, None, None
        block.counter = self.next_number() if self._order is Order.BLOCK else counter
        return block

    def next_number(self) -> int:
        """Of a block or a segment."""
        self._numbers += 1
        return self._numbers

    def _segment_number(self) -> int:
        return self.next_number() if self._order is Order.SEGMENT else 0

    # whole segments

    def get_segment(self, free_set: FreeSet, size: int) -> Block | None:
        """A new segment as one block that is in no set; None where the device has not so much."""
        address = self.device.malloc(size)
        if address is None:
            return None
        pool, ledger = free_set.pool, self.ledger
        ledger.reserve(size, pool.tally, pool.owner)
        pool.tally.segments.add(1)
        ledger.segments.add(1)
        if size >= self.limit:
            ledger.oversize_segments.add(1)
        if pool.owner is not None:
            pool.owner.segment_count += 1
        ledger.note("segment_alloc", address, size, free_set.stream, pool_id_of(pool.owner))
        segment = Segment(address, size, free_set)
        return self.new_block(segment, address, size, self._segment_number())

    def release(self, block: Block) -> None:
        """A free block that is a whole segment goes back."""
        free_set, size = block.segment.free_set, block.size
        pool, ledger = free_set.pool, self.ledger
        free_set.remove(block)
        block.state = _RELEASED
        self.device.free(block.address, size)
        ledger.unreserve(size, pool.tally, pool.owner)
        pool.tally.segments.take(1)
        ledger.segments.take(1)
        if size >= self.limit:
            ledger.oversize_segments.take(1)
        if pool.owner is not None:
            pool.owner.segment_count -= 1
        ledger.note("segment_free", block.address, size, free_set.stream, pool_id_of(pool.owner))

    def release_all(self, pool: Pool) -> None:
        """All that is whole goes back: segments, and then pages of expandable segments."""
        expandable: list[Block] = []
        for block in pool.in_order():
            if block.segment.expandable:
                expandable.append(block)
            elif block.prev is None and block.next is None:
                self.release(block)
        for block in expandable:
            self._unmap(block)
            if block.state == UNMAPPED and block.prev is None and block.next is None:
                self._release_addresses(block)

    # pages of expandable segments

    def grow(self, free_set: FreeSet, size: int) -> Block | None:
        """A block of at least so much that is in no set, its pages mapped; None where the device has not so many.

        What was mapped before that stays.
        """
        block = self._find(free_set, size) or self._new_addresses(free_set)
        if block.state == UNMAPPED and not self._map(block, min(block.size, size)):
            return None
        while block.size < size:
            following = block.next
            if following is None:
                raise UndefinedStateError("an expandable segment's addresses are too few")
            if not self._map(following, min(size - block.size, following.size)):
                return None
            block = following
        free_set.remove(block)
        if free_set.pool.owner is not None:
            free_set.pool.owner.segment_count += 1
        return block

    def _find(self, free_set: FreeSet, size: int) -> Block | None:
        for unmapped in free_set.unmapped:
            before = unmapped.prev
            first = before if before is not None and before.state == FREE else unmapped
            if _reaches(first, size):
                return first
        return None

    def _new_addresses(self, free_set: FreeSet) -> Block:
        page, total = self._page(free_set), self.device.total_bytes
        size = -(-(total + total // 8) // page) * page
        address = self.device.reservations.take(size)
        segment = Segment(address, size, free_set, page=page)
        block = self.new_block(segment, address, size, self._segment_number())
        free_set.add_unmapped(block)
        self.expandable_segments += 1
        return block

    def _page(self, free_set: FreeSet) -> int:
        return self.settings.page_bytes(small=free_set.pool.small)

    def _map(self, block: Block, size: int) -> bool:
        """Give the first pages of an unmapped block memory; False where the device has not so much."""
        free_set, pool = block.segment.free_set, block.segment.free_set.pool
        page = block.segment.page
        mapped = -(-size // page) * page
        if not self.device.commit(mapped):
            return False
        free_set.remove_unmapped(block)
        address = block.address
        if mapped < block.size:
            rest = self.new_block(block.segment, address + mapped, block.size - mapped, block.counter)
            _splice(block, rest, block.next)
            block.size = mapped
            free_set.add_unmapped(rest)
        for neighbour in (block.prev, block.next):
            if neighbour is not None and neighbour.state == FREE:
                free_set.remove(neighbour)
                absorb(block, neighbour)
        free_set.add(block)
        self.ledger.reserve(mapped, pool.tally, pool.owner)
        self.ledger.note("segment_map", address, mapped, free_set.stream, pool_id_of(pool.owner))
        return True

    @staticmethod
    def kept_bytes(block: Block) -> int:
        """What of a free block cannot be given back."""
        if block.segment.expandable:
            first, last = _whole_pages(block)
            return block.size - max(last - first, 0)
        return 0 if block.prev is None and block.next is None else block.size

    def _unmap(self, block: Block) -> None:
        """Take the memory from the whole pages of a free block; what is left at its ends stays free."""
        segment = block.segment
        free_set, pool = segment.free_set, segment.free_set.pool
        end = block.address + block.size
        first, last = _whole_pages(block)
        if last <= first:
            return
        free_set.remove(block)
        if first > block.address:
            before = self.new_block(segment, block.address, first - block.address, block.counter)
            _splice(block.prev, before, block)
            free_set.add(before)
        if end > last:
            after = self.new_block(segment, last, end - last, block.counter)
            _splice(block, after, block.next)
            free_set.add(after)
        block.address, block.size = first, last - first
        for neighbour in (block.prev, block.next):
            if neighbour is not None and neighbour.state == UNMAPPED:
                free_set.remove_unmapped(neighbour)
                absorb(block, neighbour)
        free_set.add_unmapped(block)
        self.device.uncommit(last - first)
        self.ledger.unreserve(last - first, pool.tally, pool.owner)
        if pool.owner is not None:
            pool.owner.segment_count -= 1
        self.ledger.note("segment_unmap", first, last - first, free_set.stream, pool_id_of(pool.owner))

    def _release_addresses(self, block: Block) -> None:
        block.segment.free_set.remove_unmapped(block)
        block.state = _RELEASED
        self.device.reservations.give_back(block.address, block.size)
        self.expandable_segments -= 1

    # what was there before

    def adopt(self, free_set: FreeSet, address: int, pieces: Sequence[tuple[int, int, int]], page: int) -> list[Block]:
        """A segment, or an expandable one's addresses, that is there already, as (size, requested, state) one after the other."""
        segment = Segment(address, sum(size for size, _, _ in pieces), free_set, page=page)
        number, at = self._segment_number(), address
        blocks: list[Block] = []
        for size, requested, state in pieces:
            block = self.new_block(segment, at, size, number)
            block.requested, block.state = requested, state
            if blocks:
                block.prev, blocks[-1].next = blocks[-1], block
            blocks.append(block)
            at += size
        for block in blocks:
            if block.state == UNMAPPED:
                free_set.add_unmapped(block)
            elif block.state == FREE:
                free_set.add(block)
        self._book_adopted(segment, blocks)
        return blocks

    def _book_adopted(self, segment: Segment, blocks: Sequence[Block]) -> None:
        pool, ledger = segment.free_set.pool, self.ledger
        mapped = sum(block.size for block in blocks if block.state != UNMAPPED)
        self.device.take_over(mapped)
        ledger.reserve(mapped, pool.tally, pool.owner)
        if pool.owner is not None:
            pool.owner.segment_count += 1
        if segment.expandable:
            self.expandable_segments += 1
            return
        pool.tally.segments.add(1)
        ledger.segments.add(1)
        if mapped >= self.limit:
            ledger.oversize_segments.add(1)
        if len(blocks) > 1:
            for block in blocks:
                if block.state == FREE:
                    ledger.change_split(pool.tally, 1, block.size)

    def copy(self, device: Device, ledger: Ledger) -> Driver:
        """The same, to go on apart."""
        other = Driver(device, ledger, self.settings)
        other.expandable_segments, other._numbers = self.expandable_segments, self._numbers
        return other


def no_limit(settings: AllocatorSettings) -> int:
    """max_split_size in bytes, or more than any block has."""
    return (1 << 62) if settings.max_split_bytes is None else settings.max_split_bytes


def _whole_pages(block: Block) -> tuple[int, int]:
    """The first page that lies in a block of an expandable segment as a whole, and the end of the last; there may be none."""
    start, page = block.segment.address, block.segment.page
    first = start - (start - block.address) // page * page
    last = start + (block.address + block.size - start) // page * page
    return first, last


def absorb(block: Block, neighbour: Block) -> None:
    """Two neighbours in one state become one; the neighbour is in no set."""
    if neighbour is block.prev:
        block.address = neighbour.address
        block.prev = neighbour.prev
        if block.prev is not None:
            block.prev.next = block
    else:
        block.next = neighbour.next
        if block.next is not None:
            block.next.prev = block
    block.size += neighbour.size


def _splice(before: Block | None, block: Block, after: Block | None) -> None:
    block.prev, block.next = before, after
    if before is not None:
        before.next = block
    if after is not None:
        after.prev = block


def _reaches(block: Block, size: int) -> bool:
    """Whether the free and unmapped blocks from this one on come to so much."""
    run = 0
    for each in _following(block):
        if each.state not in (FREE, UNMAPPED):
            return False
        run += each.size
        if run >= size:
            return True
    return False


def _following(block: Block) -> Iterator[Block]:
    at: Block | None = block
    while at is not None:
        yield at
        at = at.next
