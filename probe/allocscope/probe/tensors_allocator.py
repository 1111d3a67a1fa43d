"""What CUDA's allocator says that the tensors of a report should come to."""

from __future__ import annotations

from allocscope.probe.counters import Stats
from allocscope.probe.torch_cuda import TORCH_ERRORS, Backend, TorchCuda

# Its blocks are not asked for: to list them adds to a history that the program records, and may set torch importing what puts
# their stacks into words (`torch_blocks`). A capture has them anyway, at the same addresses.


def requested_bytes(cuda: TorchCuda) -> dict[int, int]:
    """Of the live blocks of each device, as asked for; of none where the allocator does not count them."""
    if cuda.backend is not Backend.NATIVE or not cuda.is_caching:
        return {}
    found = {}
    for index in range(cuda.device_count):
        try:
            found[index] = _requested(cuda.stats(index))
        except TORCH_ERRORS:  # too old to tell
            continue
    return found


def _requested(stats: Stats) -> int:
    """requested_bytes alone counts those too that wait for another stream to be free; they are known by their blocks' bytes only."""
    requested, active, allocated = (
        int(stats[family]["all"]["current"]) for family in ("requested_bytes", "active_bytes", "allocated_bytes")
    )
    return max(requested - (active - allocated), 0)
