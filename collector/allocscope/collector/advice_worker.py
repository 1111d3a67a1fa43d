"""`python -m allocscope.collector.advice_worker`: replays one capture in a process of its own, and judges what would help.

On standard input, a file: a line that says what is known beside the snapshot (`advice_task`), and then the snapshot as it is kept. On
standard output a line for each device. Whatever the snapshot holds, it can take this process only: it may use so much memory and time,
write no file, and ends with its collector.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import BinaryIO

from allocscope.allocator.advice import Circumstances, advise
from allocscope.allocator.errors import AllocatorError
from allocscope.allocator.simulator.rules import is_version
from allocscope.allocator.simulator.sources import sources_of
from allocscope.allocator.simulator.what_if import Source, script_of
from allocscope.allocator.snapshot import Snapshot, read_snapshot
from allocscope.collector.advice_expected import with_expected
from allocscope.collector.advice_task import (
    Answer,
    DeviceFacts,
    Failure,
    Limits,
    ReplayTask,
    answer_to_line,
    task_of_line,
)
from allocscope.collector.advice_words import ESTIMATE, how_exact
from allocscope.model import Advice
from allocscope.model.figures import size

NICENESS = 10
FOR_TRIALS = 0.7
"""Of the time: no further trial is begun after it, so that what was found by then is told."""
PR_SET_PDEATHSIG = 1
"""prctl(2)."""
PIECE_BYTES = 1 << 20
LARGEST_LINE_BYTES = 1 << 22


def main() -> int:
    """0: it answered, if only with why it cannot."""
    began_s = time.monotonic()
    task_line = sys.stdin.buffer.readline(LARGEST_LINE_BYTES)
    task = task_of_line(task_line)
    restrict(task.limits)
    until_s = began_s + task.limits.time_s * FOR_TRIALS
    try:
        for answer in answers(task, sys.stdin.buffer, len(task_line), lambda: time.monotonic() < until_s):
            _tell(answer)
    except (AllocatorError, MemoryError) as error:
        _tell(_failure(error, task.limits))
    return 0


def _failure(error: Exception, limits: Limits) -> Failure:
    if isinstance(error, MemoryError) or isinstance(error.__cause__, MemoryError):
        return Failure(
            "memory", f"the replay needs more than {size(limits.memory_bytes)} of memory (advice_memory_bytes)"
        )
    return Failure("snapshot", str(error))


def restrict(limits: Limits) -> None:
    """From here on this process cannot take more than it may, and does not outlive whoever started it."""
    for what, most in (
        (resource.RLIMIT_AS, limits.memory_bytes),
        (resource.RLIMIT_CPU, round(limits.time_s) + 1),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        _, hard = resource.getrlimit(what)
        least = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(what, (least, least))
    os.nice(NICENESS)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def answers(task: ReplayTask, file: BinaryIO, offset: int, time_left: Callable[[], bool]) -> Iterator[Answer]:
    """One for each device that has a history."""
    snapshot = read_snapshot(lambda: _pieces(file, offset), task.name, tolerant=True)
    found = [facts for facts in task.devices if facts.ordinal < len(snapshot.traces) and snapshot.traces[facts.ordinal]]
    for facts in found:
        yield facts.uuid, advice_of(snapshot, facts, task.torch_version, time_left)
    if not found:
        yield Failure("no_history", "the snapshot has no history of a device that its process is known to use")


def advice_of(
    snapshot: Snapshot, facts: DeviceFacts, torch_version: str | None, time_left: Callable[[], bool]
) -> Advice:
    """What would help one device's allocator."""
    source = source_of(snapshot, facts, torch_version)
    history, script = script_of(source)
    circumstances = Circumstances(torch_version=source.version)
    advice = advise(source, circumstances=circumstances, at_risk=facts.at_risk, history=history, time_left=time_left)
    advice = with_expected(
        advice, source, history, script, facts.request_bytes, circumstances=circumstances, time_left=time_left
    )
    return qualified(advice, snapshot, facts)


def qualified(advice: Advice, snapshot: Snapshot, facts: DeviceFacts) -> Advice:
    """The same, with what was not known to the replay: then it is an estimate, however well it explains what was recorded."""
    unknown = []
    if not facts.other_used:
        unknown.append("what other processes held of the device meanwhile is not known, and taken to be nothing")
    if snapshot.settings_problem:
        unknown.append(
            f"the recorded settings cannot be read, and the defaults are taken ({snapshot.settings_problem})"
        )
    if not unknown:
        return advice
    exactness = f"an estimate: {'; '.join(filter(None, (*unknown, how_exact(advice.exactness))))}"
    summary = f"{advice.summary} {ESTIMATE}" if advice.is_exact else advice.summary
    return replace(advice, is_exact=False, exactness=exactness, summary=summary)


def source_of(snapshot: Snapshot, facts: DeviceFacts, torch_version: str | None) -> Source:
    """A device's history, with what is known of the device then."""
    source = sources_of(snapshot, device_total_bytes=facts.total_bytes)[facts.ordinal]
    told = torch_version if torch_version is not None and is_version(torch_version) else None
    return replace(
        source,
        other_used=_steps(facts.other_used) if facts.other_used else source.other_used,
        version=source.version or told,
    )


def _steps(other_used: tuple[tuple[int, int], ...]) -> Callable[[int], int]:
    times_us = [at_us for at_us, _ in other_used]

    def at(time_us: int) -> int:
        return other_used[max(bisect_right(times_us, time_us) - 1, 0)][1]

    return at


def _pieces(file: BinaryIO, offset: int) -> Iterator[bytes]:
    file.seek(offset)
    while piece := file.read(PIECE_BYTES):
        yield piece


def _tell(answer: Answer) -> None:
    sys.stdout.buffer.write(answer_to_line(answer))
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    sys.exit(main())
