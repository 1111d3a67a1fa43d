"""What one out-of-memory text says."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from allocscope.allocator.messages.figures import Figure


class Origin(Enum):
    """Who ran out."""

    ALLOCATOR = "allocator"
    """PyTorch's caching allocator, of any device."""
    ASYNC = "cudaMallocAsync"
    """PyTorch's cudaMallocAsync backend."""
    POLICY = "policy"
    """The allocator refused before it asked the driver (throw_on_cudamalloc_oom, PyTorch 2.12 on)."""
    DRIVER = "driver"
    """The driver refused somebody who asked it directly; nothing is said of how much."""
    LIBRARY = "library"
    """cuBLAS, cuDNN and their like could not allocate."""
    NCCL = "nccl"
    HOST = "host"
    """The computer's memory, not the device's."""
    MASKED = "masked"
    """The allocator failed an assertion while it was telling of an out-of-memory, so that the text is lost."""
    ASSERT = "assert"
    """A device-side assert: no matter of memory, though often met as one."""
    RETRY = "retry"
    """PyTorch 2.13 on: an attempt failed and is made again after flushing; by itself no out-of-memory."""


@dataclass(frozen=True, slots=True)
class ProcessFigure:
    """A process that the text names."""

    pid: int
    used: Figure | None
    """None: it is named, but how much it uses is not known."""


@dataclass(frozen=True, slots=True)
class OomMessage:
    """One out-of-memory text, or a retry warning; None wherever the text does not say, or not any more."""

    line: int
    """Where it begins, from 1."""
    origin: Origin
    kind: str | None = None
    """cuda, hip, xpu, npu, mps, cpu, …: as the text names it."""
    rank: int | None = None
    worker: str | None = None
    """Whose line it is, as its prefix says: `EngineCore_0 pid=7`."""
    device: int | None = None
    requested: Figure | None = None
    """What was asked for: for PyTorch's caching allocator the SEGMENT, not the tensor."""
    total: Figure | None = None
    free: Figure | None = None
    """What the driver says is free on the device."""
    allowed: Figure | None = None
    """What the allocator may reserve (a memory fraction; MPS: the high watermark)."""
    this_process: Figure | None = None
    other_processes: tuple[ProcessFigure, ...] = ()
    allocated: Figure | None = None
    """As printed. Since PyTorch 2.4 it holds `private_pools` too, though these are free."""
    reserved: Figure | None = None
    unallocated: Figure | None = None
    """Reserved, neither allocated nor in `private_pools`."""
    private_pools: Figure | None = None
    """FREE bytes that private pools keep, whatever the text calls them."""
    cached: Figure | None = None
    """PyTorch 1.0 to 1.3: reserved and not allocated."""
    active: Figure | None = None
    other: Figure | None = None
    """MPS: what else Metal gave to this process."""
    limit: Figure | None = None
    """cudaMallocAsync: the user's memory fraction; XPU: the largest single allocation."""
    over_limit: bool = False
    """More than can be asked for at all: an exabyte; MPS: more than Metal gives in one buffer."""
    expandable: bool | None = None
    """Are expandable segments on? False: the text recommends them (which before 2.14 it does even where they are on)."""
    conf_name: str | None = None
    """The variable that the text recommends: PYTORCH_CUDA_ALLOC_CONF."""
    times: int = 1
    """How often it is in the log (see `log.OomReport`)."""

    @property
    def is_oom(self) -> bool:
        """Did something run out of memory, and was it told so?"""
        return self.origin not in (Origin.RETRY, Origin.ASSERT)
