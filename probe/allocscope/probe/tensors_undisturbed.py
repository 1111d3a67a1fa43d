"""Calls in which no other thread comes to run, where Python's garbage collector would let one.

Up to Python 3.11 it begins wherever memory for a container is asked for, in the middle of a call of C, too. It frees tensors, and
calls what the job wants called then; both let other threads run. In `sys._current_frames` that may even stop the job for good: a
thread that ends meanwhile waits for that function's lock, with the GIL in its hand (CPython's issue 106883, not mended in 3.11).
From 3.12 on the collector begins between two instructions of Python only.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from functools import partial
from itertools import compress
from operator import methodcaller
from typing import Any

_call = methodcaller("__call__")
_BEGINS_ANYWHERE = sys.version_info < (3, 12)


def undisturbed(call: Callable[[], Any]) -> Any:
    """What `call`, which must be C throughout, gives or raises.

    Whether the collector is on is looked up, and it is set off and on again, in the same call of C: nobody sees it off.
    """
    if not _BEGINS_ANYWHERE:
        return call()
    afterwards: list[Callable[[], None]] = []
    remember = partial(afterwards.extend, compress((gc.enable,), iter(gc.isenabled, None)))
    try:
        return list(map(_call, (remember, gc.disable, call, partial(list, map(_call, afterwards)))))[2]
    except BaseException:
        list(map(_call, afterwards))
        raise
