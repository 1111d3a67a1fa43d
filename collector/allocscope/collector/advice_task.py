"""What a worker is told beside a snapshot, and what it answers: plain values, a line of JSON each."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from allocscope.model import Advice
from allocscope.model.advice_plain import advice_of_plain, advice_to_plain


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """What is known of one device while the history was recorded, which the snapshot does not tell; bytes."""

    uuid: str
    ordinal: int
    """CUDA's, in the process."""
    total_bytes: int | None = None
    other_used: tuple[tuple[int, int], ...] = ()
    """What was in use and not this allocator's: since when (unix microseconds, the process's clock), and how much. Empty: not known."""
    request_bytes: int | None = None
    """The largest request that the forecast knows of."""
    at_risk: bool = False
    """Whether it was about to run out of memory, or had."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a worker may take."""

    time_s: float
    """By the clock on the wall, reading the snapshot included."""
    memory_bytes: int
    """Of address space."""


@dataclass(frozen=True, slots=True)
class ReplayTask:
    """A capture to replay."""

    name: str
    """What errors call the snapshot."""
    torch_version: str | None
    devices: tuple[DeviceFacts, ...]
    limits: Limits

    def to_line(self) -> bytes:
        """As JSON."""
        return json.dumps(asdict(self)).encode() + b"\n"


def task_of_line(line: bytes) -> ReplayTask:
    """What `to_line` gave."""
    told = json.loads(line)
    devices = tuple(
        DeviceFacts(**{**facts, "other_used": tuple((at, used) for at, used in facts["other_used"])})
        for facts in told["devices"]
    )
    return ReplayTask(told["name"], told["torch_version"], devices, Limits(**told["limits"]))


@dataclass(frozen=True, slots=True)
class Failure:
    """Why nothing, or not all, came of a replay."""

    reason: str
    """A fixed word, for counters: snapshot, no_history, memory, time, killed, crashed, gone, system, given_up."""
    text: str
    """For people."""


Answer = tuple[str, Advice] | Failure
"""A device's UUID with its advice; or why there is none."""


def answer_to_line(answer: Answer) -> bytes:
    """As JSON."""
    plain: Mapping[str, Any]
    if isinstance(answer, Failure):
        plain = asdict(answer)
    else:
        plain = {"uuid": answer[0], "advice": advice_to_plain(answer[1])}
    return json.dumps(plain).encode() + b"\n"


def answer_of_line(line: bytes) -> Answer:
    """What `answer_to_line` gave. ValueError, TypeError, KeyError: it is no answer."""
    told = json.loads(line)
    if "advice" in told:
        return str(told["uuid"]), advice_of_plain(told["advice"])
    return Failure(**{field.name: str(told[field.name]) for field in fields(Failure)})
