"""What is known of where a process runs, as far as it decides which settings it can take."""

from __future__ import annotations

from dataclasses import dataclass, replace

from allocscope.allocator.simulator.what_if import Source
from allocscope.allocator.snapshot import DEFAULT_POOL

_NEWEST = (2, 14)


@dataclass(frozen=True, slots=True)
class Circumstances:
    """Each None: not known."""

    torch_version: str | None = None
    """Such as "2.14.1+cu130"."""
    uses_private_pools: bool | None = None
    """MemPools, or pools of CUDA graphs."""
    uses_ipc: bool | None = None
    """Whether it shares tensors of the device with other processes (torch.multiprocessing, CUDA IPC)."""
    has_virtual_memory: bool | None = None
    """Whether the device can map memory page by page; some vGPUs cannot."""
    has_nvml: bool | None = None
    """Whether libnvidia-ml.so.1 can be loaded in the process."""

    def release(self) -> tuple[int, int] | None:
        """The version's first two numbers; None: not known, or no version."""
        first, _, rest = (self.torch_version or "").partition(".")
        second = rest.partition(".")[0]
        return (int(first), int(second)) if first.isdecimal() and second.isdecimal() else None


def release_of(*versions: str | None) -> tuple[int, int]:
    """Of the first of these that is one; of none of them the newest that is known."""
    found = (Circumstances(version).release() for version in versions)
    return next((release for release in found if release), _NEWEST)


def circumstances_of(source: Source, known: Circumstances) -> Circumstances:
    """`known`, and what a device's history and segments show: which is that private pools are in use, where they are."""
    pools = any(each.pool_id != DEFAULT_POOL for each in source.segments) or any(
        each.pool_id != DEFAULT_POOL for each in source.trace
    )
    return replace(known, uses_private_pools=True) if pools else known
