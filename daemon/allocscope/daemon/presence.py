"""Whether anything more is to be expected of a process, and whether a note can be its own."""

from __future__ import annotations

import time
from collections.abc import Callable

from allocscope.daemon.node import Node
from allocscope.daemon.notes import ReadNote
from allocscope.model.identity import Process
from allocscope.model.wire import WireError
from allocscope.proto.v1 import identity_pb2

RETURNS_WITHIN_S = 10.0
"""A process whose stream broke comes again before: a probe tries every five seconds, whatever became of its daemon."""
ROOT = 0


class Presence:
    """Asks the node, and this machine's /proc."""

    def __init__(
        self,
        node: Node,
        *,
        is_alive: Callable[[Process], bool | None],
        owners: Callable[[Process], frozenset[int]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`is_alive` says None, and `owners` (user ids) nothing, where that cannot be told; `clock` in seconds, monotonic."""
        self._node, self._is_alive, self._owners, self._clock = node, is_alive, owners, clock
        self._began_s = clock()

    def is_gone(self, process_id: str, since_s: float, process: Process | None = None) -> bool:
        """Whether nothing more will come of it; `since_s`: when it is sure to have been there, or was asked for, monotonic."""
        attached = self._node.get(process_id)
        if attached is not None and attached.stream is not None:
            return False
        introduced = self._node.introduction(process_id)
        process = introduced.process if introduced is not None else process
        alive = None if process is None else self._is_alive(process)
        if alive is not None:
            return not alive
        heard_s = attached.news_s if attached is not None else max(since_s, self._began_s)
        return self._clock() - heard_s > RETURNS_WITHIN_S

    def may_bring(self, process_id: str, sequence: int) -> bool:
        """Whether a process's stream may still bring what has this number."""
        attached = self._node.get(process_id)
        return attached is None or (attached.stream is not None and attached.seen < sequence)

    def check(self, read: ReadNote) -> None:
        """WireError: a note is not of the process that it names, as far as can be told."""
        process = read.note.process
        attached = self._node.get(process.process_id)
        if attached is not None and (attached.process.pid, attached.process.started_us) != (
            process.pid,
            process.started_us,
        ):
            raise WireError(
                "process_id_taken", f"process id {process.process_id} is that of pid {attached.process.pid}"
            )
        owners = self._owners(process)
        if owners and read.uid not in owners and read.uid != ROOT:
            raise WireError(
                "foreign_owner", f"the note is user {read.uid}'s, pid {process.pid} is user {min(owners)}'s"
            )

    def introduction(self, process_id: str) -> identity_pb2.Process | None:
        """How a process introduced itself; None: it did not, or long ago."""
        introduced = self._node.introduction(process_id)
        return introduced.message if introduced is not None else None
