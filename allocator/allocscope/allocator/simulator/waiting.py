"""Frees that wait for other streams, and the events by which it is known that they need not any more (ALLOCATOR.md 3)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator

from allocscope.allocator.simulator.blocks import AWAITING, Block, PrivatePool
from allocscope.allocator.simulator.ledger import Ledger
from allocscope.allocator.simulator.twins import Twins


class Waiting:
    """The freed blocks that wait. An event is found ready when it is asked about, not before; each stream's in their order."""

    __slots__ = ("_awaiting", "_caught_up", "_clock", "_deferred", "_events", "_ledger", "complete", "ready_at_once")

    def __init__(self, ledger: Ledger, complete: Callable[[Block], None]) -> None:
        self._ledger = ledger
        self.complete = complete
        """What is to be done with a block that waits no more."""
        self.ready_at_once = False
        """Whether an event is ready as soon as it is asked about."""
        self._clock = self._caught_up = 0
        self._events: dict[int, deque[tuple[int, Block]]] = {}
        self._awaiting: dict[int, int] = {}
        """How many events a block, by its address, waits for."""
        self._deferred: list[tuple[Block, tuple[int, ...]]] = []
        """Freed within a capture, where no event may be recorded."""

    def add(self, block: Block, streams: tuple[int, ...], *, capturing: bool) -> None:
        """A block was freed, and these streams use it still."""
        tally, ledger = block.segment.free_set.tally, self._ledger
        tally.waiting_count += 1
        ledger.waiting_count += 1
        tally.waiting_bytes += block.size
        ledger.waiting_bytes += block.size
        block.state = AWAITING
        if capturing:
            self._deferred.append((block, streams))
        else:
            self._record(block, streams)

    def _record(self, block: Block, streams: Iterable[int]) -> None:
        for stream in streams:
            self._clock += 1
            self._events.setdefault(stream, deque()).append((self._clock, block))
            self._awaiting[block.address] = self._awaiting.get(block.address, 0) + 1

    def _record_deferred(self) -> None:
        for block, streams in self._deferred:
            self._record(block, streams)
        self._deferred.clear()

    def catch_up(self) -> None:
        """All events until now are ready."""
        self._caught_up = self._clock

    def finish_stream(self, stream: int) -> None:
        """One stream's events until now are ready."""
        if stream in self._events:
            self._events[stream] = deque((0, block) for _, block in self._events[stream])

    def reap(self) -> None:
        """Complete what is ready, in each stream up to the first event that is not."""
        self._record_deferred()
        for stream, queue in list(self._events.items()):
            while queue and (self.ready_at_once or queue[0][0] <= self._caught_up):
                self._finish(queue.popleft()[1])
            if not queue:
                del self._events[stream]

    def finish_all(self, private: PrivatePool | None = None) -> None:
        """Wait for all events, or for all of a private pool's, and complete."""
        self._ledger.num_sync_all_streams += 1
        self._record_deferred()
        for stream, queue in list(self._events.items()):
            kept: deque[tuple[int, Block]] = deque()
            for event in queue:
                if private is None or event[1].segment.free_set.pool.owner is private:
                    self._finish(event[1])
                else:
                    kept.append(event)
            if kept:
                self._events[stream] = kept
            else:
                del self._events[stream]

    def _finish(self, block: Block) -> None:
        left = self._awaiting[block.address] = self._awaiting[block.address] - 1
        if left:
            return
        del self._awaiting[block.address]
        tally, ledger = block.segment.free_set.tally, self._ledger
        tally.waiting_count -= 1
        ledger.waiting_count -= 1
        tally.waiting_bytes -= block.size
        ledger.waiting_bytes -= block.size
        self.complete(block)

    def blocks(self) -> Iterator[Block]:
        """Each block that waits, once."""
        yield from {id(block): block for queue in self._events.values() for _, block in queue}.values()
        yield from (block for block, _ in self._deferred)

    def copy(self, ledger: Ledger, complete: Callable[[Block], None], twins: Twins) -> Waiting:
        """The same, to go on apart."""
        other = Waiting(ledger, complete)
        other.ready_at_once, other._clock, other._caught_up = self.ready_at_once, self._clock, self._caught_up
        other._awaiting = self._awaiting.copy()
        other._events = {s: deque((at, twins[block]) for at, block in queue) for s, queue in self._events.items()}
        other._deferred = [(twins[block], streams) for block, streams in self._deferred]
        return other
