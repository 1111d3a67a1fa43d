"""What would have helped a job, and what would not: judged by a replay of its own requests, never by a table of hints."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class AdviceKind(Enum):
    """What the advice comes to."""

    SETTING = "setting"
    """Other settings of the allocator help."""
    PROGRAM = "program"
    """No setting does; a change to the program does."""
    NOTHING = "nothing"
    """None of what was tried helps."""
    NO_CHANGE = "no_change"
    """Nothing is wrong, and nothing that was tried gains enough to be worth a change."""
    UNKNOWN = "unknown"
    """No replay could be made that says anything; `summary` says why."""


@dataclass(frozen=True, slots=True)
class Trial:
    """The same requests once more, under some settings or after some change to the program. Bytes and counts."""

    conf: str
    """PYTORCH_CUDA_ALLOC_CONF; "" is the default configuration."""
    change: str | None = None
    """What the program does otherwise, as `allocscope replay --change` takes it ("buckets:8"); None: nothing."""
    failed_at: int | None = None
    """The request that ends in an OutOfMemoryError; None: none does."""
    failed_us: int | None = None
    reserved_peak_bytes: int = 0
    stranded_peak_bytes: int = 0
    allocated_peak_bytes: int = 0
    num_alloc_retries: int = 0
    num_device_alloc: int = 0
    num_device_free: int = 0
    needed_bytes: int | None = None
    """The least that the allocator may reserve for every request to be served; None: not looked for."""
    blocked: str | None = None
    """Why it is not advised, whatever its figures: a hazard. None: none is known."""


@dataclass(frozen=True, slots=True)
class Advice:
    """What would help one allocator."""

    kind: AdviceKind
    summary: str
    """The recommendation in a sentence or two, with its figures."""
    conf: str | None = None
    """The settings to take; None: those that are in force."""
    change: str | None = None
    """The change to the program to make; None: none."""
    gains: tuple[str, ...] = ()
    """What it gains, a phrase each, with figures of the replay."""
    costs: tuple[str, ...] = ()
    hazards: tuple[str, ...] = ()
    """What is to be known of the settings in force and of those that were tried."""
    is_exact: bool = False
    """Whether the replay under the recorded settings did what really happened, to the byte; else all figures are estimates."""
    exactness: str = ""
    """How well it did, for people."""
    torch_version: str = ""
    """By whose rules."""
    requests: int = 0
    trials: tuple[Trial, ...] = ()
    """Everything that was tried, as it was recorded first."""
