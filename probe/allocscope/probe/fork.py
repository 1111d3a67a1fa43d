"""What fork() may not interrupt, and what a forked child must not go on with.

A module lock held by a thread of the parent stays locked in the child for ever: a child that then imports protobuf would hang.
So a fork waits while a thread of ours imports (a moment, once a process).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

LONGEST_WAIT_S = 1.0
"""A fork goes ahead after this, whatever is going on: the job is never held up for longer."""

_gate = threading.Lock()
_passed = False


@contextmanager
def held_off() -> Iterator[None]:
    """No fork in here, if it can be helped."""
    with _gate:
        yield


def _before() -> None:
    global _passed  # noqa: PLW0603 (hooks have no other place to keep it)
    _passed = _gate.acquire(timeout=LONGEST_WAIT_S)


def _after_in_parent() -> None:
    if _passed:
        _gate.release()


def _after_in_child() -> None:
    global _gate  # noqa: PLW0603
    _gate = threading.Lock()


os.register_at_fork(before=_before, after_in_parent=_after_in_parent, after_in_child=_after_in_child)
