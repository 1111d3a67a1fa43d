"""Who holds the live CUDA tensors of this process: `tensors()`.

It looks, and runs nothing of the job's; it makes no CUDA call and keeps nothing alive. How each part sees to that is said where
it is done: `tensors_heap` (all objects), `tensors_torch` (tensors), `tensors_gate` (what other threads do meanwhile),
`tensors_graph` (what autograd saved), `tensors_frames` (variables), `tensors_steps` and `tensors_holders` (names). They are
imported once somebody asks.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from allocscope.model.tensors import TensorReport

_one_at_a_time = threading.Lock()


def tensors(*, time_limit_s: float = 2.0, rest_s: float = 0.0, device_type: str = "cuda") -> TensorReport:
    """Tell who holds the live tensors on devices of `device_type`, in about `time_limit_s` seconds at most. Never raises.

    `rest_s`: to sleep for so long after each millisecond of work, so that the job's threads come to run; 0 where they wait
    anyway, as when the job itself calls this.
    """
    from allocscope.model.tensors import TensorReport
    from allocscope.probe.tensors_pace import Pace
    from allocscope.probe.tensors_report import report

    time_us = time.time_ns() // 1000
    if not _one_at_a_time.acquire(blocking=False):
        return TensorReport(time_us, device_type, absence="another report is being made", complete=False)
    try:
        return report(time_us, Pace(time_limit_s, rest_s), device_type, sys.modules)
    except Exception as error:  # noqa: BLE001 (never into the job)
        return TensorReport(time_us, device_type, absence=f"the report failed: {error!r}"[:500], complete=False)
    finally:
        _one_at_a_time.release()


def _after_fork_in_child() -> None:
    """Another thread may have held it, and is not here."""
    global _one_at_a_time  # noqa: PLW0603
    _one_at_a_time = threading.Lock()


os.register_at_fork(after_in_child=_after_fork_in_child)
