"""What has been handed on and not yet acknowledged: bounded, in order, by kind. Pure; whoever shares it between threads locks."""

from __future__ import annotations

from collections import deque
from enum import IntEnum
from typing import Any, NamedTuple


class Kind(IntEnum):
    """In the order in which they are given up when there is no room."""

    BLOCK_MAP = 0
    SAMPLE = 1
    EVENT = 2


class Item(NamedTuple):
    """One thing to hand on."""

    sequence: int
    kind: Kind
    payload: Any
    size_bytes: int = 0
    """Counted for block maps, which may be large."""
    stands_for: int = 1
    """How many things are lost with it: more than itself where it tells of things lost before."""


class _Lane:
    """The items of one kind, oldest first: those sent on the present stream, then those that wait."""

    __slots__ = ("sent", "waiting")

    def __init__(self) -> None:
        self.sent: deque[Item] = deque()
        self.waiting: deque[Item] = deque()


class Ring:
    """At most `capacity` items and `map_bytes` of block maps; the oldest maps go first, then the oldest samples, then events."""

    def __init__(self, capacity: int, map_bytes: int) -> None:
        self._capacity, self._map_bytes = max(capacity, 1), map_bytes
        self._count = self._held_map_bytes = 0
        self._lanes = tuple(_Lane() for _ in Kind)
        self._in_doubt: deque[tuple[int, int]] = deque()
        """Given up after they were sent: their number, and what they stand for. They are lost only if this stream breaks."""
        self.lost_count = 0
        """Lost since the last `take_lost_count`."""
        self.acknowledged_sequence = 0

    def __len__(self) -> int:
        return self._count

    @property
    def has_waiting(self) -> bool:
        """Whether anything is still to be sent on the present stream."""
        return any(lane.waiting for lane in self._lanes)

    @property
    def is_full(self) -> bool:
        """Whether the next item costs another one."""
        return self._count >= self._capacity

    def add(self, item: Item) -> None:
        """Keep it until it is acknowledged, giving up older ones where there is no room."""
        if item.size_bytes > self._map_bytes:
            self.lost_count += item.stands_for
            return
        if item.kind is Kind.BLOCK_MAP:
            self._held_map_bytes += item.size_bytes
        self._count += 1
        self._lanes[item.kind].waiting.append(item)
        while self._held_map_bytes > self._map_bytes:
            self._give_up(self._lanes[Kind.BLOCK_MAP])
        while self._count > self._capacity:
            self._give_up(next(lane for lane in self._lanes if lane.sent or lane.waiting))

    def take(self, limit: int) -> list[Item]:
        """The next item to send, with up to `limit` in all where it and those after it are samples of one allocator."""
        taken: list[Item] = []
        while len(taken) < limit:
            lane = min(
                (lane for lane in self._lanes if lane.waiting), key=lambda lane: lane.waiting[0].sequence, default=None
            )
            if lane is None:
                break
            item = lane.waiting[0]
            if taken and not (item.kind is Kind.SAMPLE and item.payload[0] == taken[0].payload[0]):
                break
            taken.append(lane.waiting.popleft())
            lane.sent.append(item)
            if item.kind is not Kind.SAMPLE:
                break
        return taken

    def acknowledge(self, sequence: int) -> None:
        """Forget what was sent and is numbered up to `sequence`; what still waits was not meant."""
        self.acknowledged_sequence = max(self.acknowledged_sequence, sequence)
        for lane in self._lanes:
            while lane.sent and lane.sent[0].sequence <= sequence:
                self._forget(lane.sent.popleft())
        if self._in_doubt:
            self._in_doubt = deque(item for item in self._in_doubt if item[0] > sequence)

    def withdraw(self, sequence: int) -> None:
        """Give up one item that was taken and cannot be sent."""
        for lane in self._lanes:
            for item in lane.sent:
                if item.sequence == sequence:
                    lane.sent.remove(item)
                    self._forget(item)
                    self.lost_count += item.stands_for
                    return

    def rewind(self) -> None:
        """A new stream: everything that is not acknowledged waits again, and what was given up meanwhile is lost."""
        while self._in_doubt:
            self.lost_count += self._in_doubt.popleft()[1]
        for lane in self._lanes:
            lane.waiting.extendleft(reversed(lane.sent))
            lane.sent.clear()

    def take_lost_count(self) -> int:
        """How many things were lost since the last call."""
        lost, self.lost_count = self.lost_count, 0
        return lost

    def _give_up(self, lane: _Lane) -> None:
        if not lane.sent:
            item = lane.waiting.popleft()
            self.lost_count += item.stands_for
        else:
            item = lane.sent.popleft()
            self._doubt(item)
        self._forget(item)

    def _doubt(self, item: Item) -> None:
        """The other side may have it already, or may get it yet."""
        self._in_doubt.append((item.sequence, item.stands_for))
        if len(self._in_doubt) > self._capacity:
            self.lost_count += self._in_doubt.popleft()[1]

    def _forget(self, item: Item) -> None:
        self._count -= 1
        if item.kind is Kind.BLOCK_MAP:
            self._held_map_bytes -= item.size_bytes
