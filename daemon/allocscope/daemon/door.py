"""How many may come in, by user, so that one user's jobs keep no other's out."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import grpc
import structlog

from allocscope.daemon.allowance import Allowance
from allocscope.daemon.call import CallRefused
from allocscope.daemon.peers import Peer

if TYPE_CHECKING:
    from allocscope.daemon.connection import Connection

log = structlog.get_logger()

MOST_CONNECTIONS, MOST_OF_USER = 1024, 576
"""Connections, and calls; a node has at most 512 processes, and one that comes again may be there twice."""
MOST_HELD_BYTES, MOST_HELD_OF_USER_BYTES = 96 << 20, 64 << 20
"""Of messages that are not whole yet, or not taken."""
TIME_RATIO_OF_USER, MOST_TIME_OF_USER_S = 0.5, 5.0
"""Of the daemon's time, in the long run and at once."""


class Door:
    """Counts who is inside."""

    def __init__(self, most_connections: int = MOST_CONNECTIONS) -> None:
        """`most_connections`, and calls, of all users."""
        self._most_connections = most_connections
        self.connections: set[Connection] = set()
        self._connections: Counter[int] = Counter()
        self._calls: Counter[int] = Counter()
        self._held_bytes: Counter[int] = Counter()
        self._time: dict[int, Allowance] = {}
        self._told: set[int] = set()

    def enter(self, peer: Peer, connection: Connection) -> bool:
        """Whether this connection may stay."""
        if not self._has_room(self._connections, peer):
            return False
        self._connections[peer.uid] += 1
        self.connections.add(connection)
        return True

    def leave(self, peer: Peer, connection: Connection) -> None:
        """One that was let in is over."""
        self.connections.discard(connection)
        _less(self._connections, peer.uid, 1)

    def check_room_for_call(self, peer: Peer) -> None:
        """CallRefused: there are too many."""
        if not self._has_room(self._calls, peer):
            raise CallRefused(grpc.StatusCode.RESOURCE_EXHAUSTED, f"user {peer.uid} has too many calls here")

    def begin_call(self, peer: Peer) -> None:
        """One is served."""
        self._calls[peer.uid] += 1

    def end_call(self, peer: Peer) -> None:
        """One that was begun is over."""
        _less(self._calls, peer.uid, 1)

    def hold(self, peer: Peer, more_bytes: int) -> None:
        """So much more (less) is held of what a user's jobs sent; CallRefused: that is too much."""
        if more_bytes <= 0:
            _less(self._held_bytes, peer.uid, -more_bytes)
            return
        of_user, of_all = self._held_bytes[peer.uid] + more_bytes, self._held_bytes.total() + more_bytes
        if of_user > MOST_HELD_OF_USER_BYTES or of_all > MOST_HELD_BYTES:
            text = f"user {peer.uid}'s jobs send more at a time than is kept in memory: send it again later"
            raise CallRefused(grpc.StatusCode.RESOURCE_EXHAUSTED, text)
        self._held_bytes[peer.uid] = of_user

    def spend(self, peer: Peer, seconds: float) -> float:
        """A user's job took so much of the daemon's time; for how long it may take no more, in seconds."""
        if peer.uid not in self._time:
            if len(self._time) >= MOST_CONNECTIONS:
                del self._time[next(iter(self._time))]
            self._time[peer.uid] = Allowance(TIME_RATIO_OF_USER, MOST_TIME_OF_USER_S)
        return self._time[peer.uid].spend(seconds)

    def _has_room(self, counted: Counter[int], peer: Peer) -> bool:
        if counted[peer.uid] < MOST_OF_USER and counted.total() < self._most_connections:
            return True
        if peer.uid not in self._told and len(self._told) < MOST_CONNECTIONS:
            self._told.add(peer.uid)
            counts = {"of_user": counted[peer.uid], "of_all": counted.total(), "further": "not logged"}
            log.warning("too many connections on the jobs' socket: hung up", uid=peer.uid, pid=peer.pid, **counts)
        return False


def _less(counted: Counter[int], uid: int, by: int) -> None:
    counted[uid] -= by
    if counted[uid] <= 0:
        del counted[uid]
