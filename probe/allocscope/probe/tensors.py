"""Who holds the live CUDA tensors of this process: `tensors()`.

It looks, and runs nothing of the job's; it makes no CUDA call and keeps nothing alive. How each part sees to that is said where
it is done: `tensors_heap` (all objects), `tensors_torch` (tensors), `tensors_gate` (what other threads do meanwhile),
`tensors_graph` (what autograd saved), `tensors_frames` (variables), `tensors_steps` and `tensors_holders` (names). They are
imported once somebody asks.

A report ends before Python does. It may be the last to let go of a tensor, and torch lets go of the GIL while it frees one: a thread
that wants it back while Python ends is ended where it stands (up to Python 3.13), here in C++ that forbids this, and the job would abort.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from allocscope.model.tensors import TensorReport
    from allocscope.probe.tensors_pace import Pace

LONGEST_END_S = 0.5
"""Python's end waits so long for a report to be given up; it takes some milliseconds, or as long as a list of all objects."""

_one_at_a_time = threading.Lock()
_pace: Pace | None = None
"""Of the report that is being made."""
_is_end = False


def tensors(*, time_limit_s: float = 2.0, rest_s: float = 0.0, device_type: str = "cuda") -> TensorReport:
    """Tell who holds the live tensors on devices of `device_type`, in about `time_limit_s` seconds at most. Never raises.

    One that runs in another thread than the main one is cut short where Python ends.

    `rest_s`: to sleep for so long after each millisecond of work, so that the job's threads come to run; 0 where they wait
    anyway, as when the job itself calls this.
    """
    from allocscope.model.tensors import TensorReport
    from allocscope.probe.tensors_pace import Pace
    from allocscope.probe.tensors_report import report

    global _pace  # noqa: PLW0603
    time_us = time.time_ns() // 1000
    if not _one_at_a_time.acquire(blocking=False):
        return TensorReport(time_us, device_type, absence="another report is being made", complete=False)
    try:
        pace = _pace = Pace(time_limit_s, rest_s)
        if _is_end and threading.current_thread() is not threading.main_thread():
            pace.end()
        return report(time_us, pace, device_type, sys.modules)
    except Exception as error:  # noqa: BLE001 (never into the job)
        return TensorReport(time_us, device_type, absence=f"the report failed: {error!r}"[:500], complete=False)
    finally:
        _pace = None
        _one_at_a_time.release()


def end_reports() -> None:
    """Python ends: reports of other threads than the main one are cut short, from now on."""
    global _is_end  # noqa: PLW0603
    _is_end = True
    pace = _pace
    if pace is not None:
        pace.end()
    if _one_at_a_time.acquire(timeout=LONGEST_END_S):
        _one_at_a_time.release()


def _after_fork_in_child() -> None:
    """Another thread may have held it, and is not here."""
    global _one_at_a_time, _pace
    _one_at_a_time, _pace = threading.Lock(), None


atexit.register(end_reports)
os.register_at_fork(after_in_child=_after_fork_in_child)
