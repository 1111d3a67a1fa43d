"""The text of torch.OutOfMemoryError (ALLOCATOR.md 2.8), as PyTorch 2.6 to 2.14 write it."""

from __future__ import annotations

from dataclasses import dataclass

from allocscope.allocator.messages import amount


@dataclass(frozen=True, slots=True)
class Shortage:
    """What the text tells; bytes."""

    device_index: int
    segment_bytes: int
    """What was asked of the device, not what the program asked for."""
    total_bytes: int
    free_bytes: int
    process_bytes: int | None
    """All that this process uses, by NVML; None: without NVML."""
    allowed_bytes: int | None
    allocated_bytes: int
    reserved_bytes: int
    private_free_bytes: int
    """Free in private pools, which the text calls allocated there."""


def out_of_memory(shortage: Shortage, *, hint: bool, documentation: str) -> str:
    """The text; `hint`: whether it recommends expandable segments."""
    s = shortage
    private = s.private_free_bytes
    text = (
        f"CUDA out of memory. Tried to allocate {amount(s.segment_bytes)}. GPU {s.device_index} has a total capacity of "
        f"{amount(s.total_bytes)} of which {amount(s.free_bytes)} is free. "
    )
    if s.process_bytes is not None:
        text += f"Including non-PyTorch memory, this process has {amount(s.process_bytes)} memory in use. "
    if s.allowed_bytes is not None:
        text += f"{amount(s.allowed_bytes)} allowed; "
    text += f"Of the allocated memory {amount(s.allocated_bytes + private)} is allocated by PyTorch, "
    if private > 0:
        text += f"with {amount(private)} allocated in private pools (e.g., CUDA Graphs), "
    text += f"and {amount(s.reserved_bytes - s.allocated_bytes - private)} is reserved by PyTorch but unallocated."
    if hint:
        text += (
            " If reserved but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
            f" to avoid fragmentation.  See documentation for Memory Management  ({documentation})"
        )
    return text


def rejected(request_bytes: int) -> str:
    """The text where throw_on_cudamalloc_oom refuses a request; from 2.12 on."""
    return (
        "CUDA out of memory. Allocation was preemptively rejected because it would exceed per_process_memory_fraction "
        f"limit. Requested size: {amount(request_bytes)}"
    )
