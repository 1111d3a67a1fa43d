"""A rank is one process's: whoever reports as rank 3 of a job keeps others of this node from doing so, for as long as it lives.

Held by a name in the abstract namespace of unix sockets (unix(7)): the kernel gives it to one process, and frees it when that ends,
however it ends; there is no file, no lock to clean up and nothing to wait for.
"""

from __future__ import annotations

import errno
import hashlib
import os
import socket
import weakref

from allocscope.probe import fork


class RankClaim:
    """At most one rank, toward the daemon at `daemon`."""

    def __init__(self, daemon: str) -> None:
        self._daemon = daemon
        self._held: tuple[str, int] | None = None
        self._socket: socket.socket | None = None
        _all.add(self)

    def take(self, job: str, rank: int) -> bool:
        """Whether this process may call itself that rank; what it held before is let go. Never waits."""
        if self._held == (job, rank):
            return True
        self.release()
        try:
            with fork.held_off():
                self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
                self._socket.bind(self._name(job, rank))
        except OSError as error:
            self.release()
            return error.errno != errno.EADDRINUSE  # where there are no such names, nothing is claimed by them
        self._held = (job, rank)
        return True

    def release(self) -> None:
        """Let it go."""
        if self._socket is not None:
            self._socket.close()
        self._socket = self._held = None

    def __del__(self) -> None:
        self.release()

    def _name(self, job: str, rank: int) -> bytes:
        words = "\0".join((self._daemon, str(os.getuid()), job, str(rank)))
        return b"\0allocscope/rank/" + hashlib.sha256(words.encode(errors="replace")).hexdigest()[:40].encode()


_all: weakref.WeakSet[RankClaim] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    """The rank stays the parent's, and ends with it."""
    for claim in list(_all):
        claim.release()


os.register_at_fork(after_in_child=_after_fork_in_child)
