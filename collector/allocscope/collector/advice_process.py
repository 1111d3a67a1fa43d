"""One worker process, from its task to its answer: bounded in time, and ended whatever becomes of whoever waits for it."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import BinaryIO

from allocscope.collector.advice_task import Failure, Limits, answer_of_line
from allocscope.model import Advice
from allocscope.model.figures import duration

WORKER = (sys.executable, "-P", "-m", "allocscope.collector.advice_worker")
LARGEST_ANSWER_BYTES = 4 << 20
LAST_WORDS_BYTES = 4096
"""Of standard error: the end of a traceback."""
PIECE_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Replayed:
    """What came of a capture."""

    advice: dict[str, Advice]
    """By device."""
    failure: Failure | None = None
    """Why there is none of the other devices."""
    last_words: str = ""
    """What it said on standard error, for the log."""


async def replay(file: BinaryIO, limits: Limits, command: Sequence[str] = WORKER) -> Replayed:
    """Have a worker read a file from its beginning. OSError: it cannot be started."""
    file.seek(0)
    worker = await asyncio.create_subprocess_exec(
        *command, stdin=file, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, env=_environment()
    )
    try:
        return await _answered(worker, limits)
    finally:
        if worker.returncode is None:
            worker.kill()
        await _gone(worker)


async def _gone(worker: asyncio.subprocess.Process) -> None:
    """Its end is known once nothing is left in its pipes."""
    assert worker.stdout
    assert worker.stderr
    await asyncio.gather(_read_last(worker.stdout, bytearray()), _read_last(worker.stderr, bytearray()))
    await worker.wait()


def _environment() -> dict[str, str]:
    """Nothing of ours, which may hold secrets."""
    return {name: value for name, value in os.environ.items() if not name.startswith("ALLOCSCOPE_")}


async def _answered(worker: asyncio.subprocess.Process, limits: Limits) -> Replayed:
    assert worker.stdout
    assert worker.stderr
    said, complained = bytearray(), bytearray()
    failure = None
    try:
        async with asyncio.timeout(limits.time_s):
            await asyncio.gather(
                _read(worker.stdout, said, LARGEST_ANSWER_BYTES), _read_last(worker.stderr, complained), worker.wait()
            )
    except TimeoutError:
        failure = Failure("time", f"the replay took longer than {duration(limits.time_s)} (advice_time_limit_s)")
    advice, told = _understood(bytes(said))
    if failure is None and (told is not None or advice):
        failure = told or _how_it_ended(worker.returncode)
    elif failure is None:
        failure = _how_it_ended(worker.returncode) or Failure("crashed", "the replay said nothing")
    return Replayed(advice, failure, complained.decode(errors="replace"))


async def _read(stream: asyncio.StreamReader, into: bytearray, most: int) -> None:
    """What is beyond the most is no answer, and nobody's."""
    while piece := await stream.read(PIECE_BYTES):
        into += piece
        del into[most:]


async def _read_last(stream: asyncio.StreamReader, into: bytearray) -> None:
    while piece := await stream.read(PIECE_BYTES):
        into += piece
        del into[:-LAST_WORDS_BYTES]


def _understood(said: bytes) -> tuple[dict[str, Advice], Failure | None]:
    """Line by line; the last may be cut off, where it was killed."""
    advice: dict[str, Advice] = {}
    for line in said.splitlines(keepends=True):
        if not line.endswith(b"\n"):
            break
        try:
            answer = answer_of_line(line)
        except (ValueError, TypeError, KeyError) as error:
            return advice, Failure("crashed", f"the replay answered what is no answer: {error}")
        if isinstance(answer, Failure):
            return advice, answer
        advice[answer[0]] = answer[1]
    return advice, None


def _how_it_ended(status: int | None) -> Failure | None:
    if status == 0:
        return None
    if status is not None and status < 0:
        name = signal.Signals(-status).name if -status in set(signal.Signals) else f"signal {-status}"
        return Failure("killed", f"the replay was ended by {name}")
    return Failure("crashed", f"the replay failed with exit status {status}; the collector's log says more")
