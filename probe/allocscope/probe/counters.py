"""From the nested statistics of torch's raw call to a sample."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from allocscope.model.sample import Sample

Stats = Mapping[Any, Any]
"""`{family: {"all": {"current", "peak", "allocated", "freed"}}, counter: number}` (ALLOCATOR.md 6)."""
KNOWN_OF_ASYNC = frozenset(
    (
        "allocated_bytes",
        "active_bytes",
        "reserved_bytes",
        "allocated_peak_bytes",
        "active_peak_bytes",
        "reserved_peak_bytes",
    )
)
_SIGNS_OF_USE = (("reserved_bytes", "current"), ("reserved_bytes", "peak"), ("allocation", "allocated"))


def sample_of(
    stats: Stats,
    sequence: int,
    time_us: int,
    *,
    call_us: int | None = None,
    device_total_bytes: int | None = None,
    device_free_bytes: int | None = None,
) -> Sample:
    """The sample; what this version of torch does not tell is None."""
    try:
        allocated, active = stats["allocated_bytes"]["all"], stats["active_bytes"]["all"]
        requested, reserved = stats["requested_bytes"]["all"], stats["reserved_bytes"]["all"]
        allocation = stats["allocation"]["all"]
        # By position, in the order of Sample's fields: a sample costs little more than the call itself.
        return Sample(
            sequence,
            time_us,
            allocated["current"],
            active["current"],
            requested["current"],
            reserved["current"],
            stats["inactive_split_bytes"]["all"]["current"],
            allocated["peak"],
            active["peak"],
            requested["peak"],
            reserved["peak"],
            allocation["current"],
            stats["active"]["all"]["current"],
            stats["segment"]["all"]["current"],
            stats["inactive_split"]["all"]["current"],
            allocation["allocated"],
            allocated["allocated"],
            stats["num_alloc_retries"],
            stats["num_ooms"],
            stats["num_device_alloc"],
            stats["num_device_free"],
            stats["num_sync_all_streams"],
            _private_pools_reserved(stats),
            device_total_bytes,
            device_free_bytes,
            None,
            call_us,
        )
    except (KeyError, TypeError, AttributeError):
        return _patchy_sample(stats, sequence, time_us, call_us, device_total_bytes, device_free_bytes)


def async_sample_of(
    stats: Stats,
    sequence: int,
    time_us: int,
    *,
    call_us: int | None = None,
    device_total_bytes: int | None = None,
    device_free_bytes: int | None = None,
) -> Sample:
    """The sample of a cudaMallocAsync backend, which has all other figures too, but always as 0 (ALLOCATOR.md 3.5)."""
    return Sample(
        sequence,
        time_us,
        **{name: _figure(stats, *path) for name, path in _FIGURES if name in KNOWN_OF_ASYNC},
        device_total_bytes=device_total_bytes,
        device_free_bytes=device_free_bytes,
        call_us=call_us,
    )


def is_used(stats: Stats) -> bool:
    """Whether the allocator of this device holds, or ever held, anything."""
    counts = (_figure(stats, family, "all", key) for family, key in _SIGNS_OF_USE)
    return any(count for count in counts)


def allocations_ever(stats: Stats) -> int:
    """How many were made, since the start or since the user reset the counters; 0 where that is not told."""
    return _figure(stats, "allocation", "all", "allocated") or 0


def _private_pools_reserved(stats: Stats) -> int | None:
    """Told from torch 2.13 on."""
    pools = stats.get("reserved_bytes_by_private_pools")
    return None if pools is None else sum(pool["all"]["current"] for pool in pools.values())


def _figure(stats: Any, *path: str) -> int | None:
    for key in path:
        try:
            stats = stats[key]
        except (KeyError, TypeError, IndexError):
            return None
    return stats if isinstance(stats, int) and stats >= 0 else None


def _or_none(read: Callable[[], int | None]) -> int | None:
    try:
        return read()
    except (KeyError, TypeError, AttributeError):
        return None


_FIGURES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("allocated_bytes", ("allocated_bytes", "all", "current")),
    ("active_bytes", ("active_bytes", "all", "current")),
    ("requested_bytes", ("requested_bytes", "all", "current")),
    ("reserved_bytes", ("reserved_bytes", "all", "current")),
    ("inactive_split_bytes", ("inactive_split_bytes", "all", "current")),
    ("allocated_peak_bytes", ("allocated_bytes", "all", "peak")),
    ("active_peak_bytes", ("active_bytes", "all", "peak")),
    ("requested_peak_bytes", ("requested_bytes", "all", "peak")),
    ("reserved_peak_bytes", ("reserved_bytes", "all", "peak")),
    ("allocation_count", ("allocation", "all", "current")),
    ("active_count", ("active", "all", "current")),
    ("segment_count", ("segment", "all", "current")),
    ("inactive_split_count", ("inactive_split", "all", "current")),
    ("allocations_total", ("allocation", "all", "allocated")),
    ("allocated_bytes_total", ("allocated_bytes", "all", "allocated")),
    ("num_alloc_retries", ("num_alloc_retries",)),
    ("num_ooms", ("num_ooms",)),
    ("num_device_alloc", ("num_device_alloc",)),
    ("num_device_free", ("num_device_free",)),
    ("num_sync_all_streams", ("num_sync_all_streams",)),
)


def _patchy_sample(
    stats: Stats, sequence: int, time_us: int, call_us: int | None, total_bytes: int | None, free_bytes: int | None
) -> Sample:
    """Figure by figure, where one or the other is missing."""
    return Sample(
        sequence,
        time_us,
        **{name: _figure(stats, *path) for name, path in _FIGURES},
        private_pools_reserved_bytes=_or_none(lambda: _private_pools_reserved(stats)),
        device_total_bytes=total_bytes,
        device_free_bytes=free_bytes,
        call_us=call_us,
    )
