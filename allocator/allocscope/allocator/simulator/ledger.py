"""The simulator's books: memory_stats() and the history."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from allocscope.allocator.simulator.blocks import PoolId, PrivatePool
from allocscope.allocator.simulator.rules import Rules
from allocscope.allocator.simulator.tallies import Gauge, Tally
from allocscope.allocator.snapshot import DEFAULT_POOL, TraceEntry

_KINDS = ("current", "peak", "allocated", "freed")
_SCALARS = (
    "num_alloc_retries",
    "num_ooms",
    "num_oom_rejections",
    "num_sync_all_streams",
    "num_device_alloc",
    "num_device_free",
)
_TOTALS = (
    "count",
    "count_peak",
    "bytes",
    "bytes_peak",
    "requested",
    "requested_peak",
    "waiting_count",
    "waiting_bytes",
    "active_count_peak",
    "active_bytes_peak",
    "split_count",
    "split_count_peak",
    "split_bytes",
    "split_bytes_peak",
)

new_entry: Callable[..., TraceEntry] = tuple.__new__


class Ledger:
    """What memory_stats() tells of one allocator, and its history where it is kept.

    Of `all` only what cannot be had from the small and the large pools' figures together is kept here: the peaks, and what
    they are compared with.
    """

    __slots__ = (
        *_TOTALS,
        *_SCALARS,
        "_accumulated_before",
        "large",
        "max_split_size",
        "oversize_allocations",
        "oversize_segments",
        "private",
        "reserved",
        "rules",
        "segments",
        "small",
        "time_us",
        "trace",
    )

    count: int
    count_peak: int
    bytes: int
    bytes_peak: int
    requested: int
    requested_peak: int
    waiting_count: int
    waiting_bytes: int
    active_count_peak: int
    active_bytes_peak: int
    split_count: int
    split_count_peak: int
    split_bytes: int
    split_bytes_peak: int
    num_alloc_retries: int
    num_ooms: int
    num_oom_rejections: int
    num_sync_all_streams: int
    num_device_alloc: int
    num_device_free: int

    def __init__(self, rules: Rules, *, max_split_size: int, trace: bool) -> None:
        for name in (*_TOTALS, *_SCALARS):
            setattr(self, name, 0)
        self.rules, self.max_split_size = rules, max_split_size
        self.small, self.large = Tally(), Tally()
        self.segments, self.reserved = Gauge(), Gauge()
        self.oversize_allocations, self.oversize_segments = Gauge(), Gauge()
        self.private: dict[PoolId, tuple[Gauge, Gauge, Gauge]] = {}
        """What private pools have reserved: all, of it small, large."""
        self.trace: list[TraceEntry] | None = [] if trace else None
        self.time_us = 0
        """What entries of the history are stamped with."""
        self._accumulated_before: dict[str, int] = {}

    # what happens

    def note(self, action: str, address: int, size: int, stream: int, pool_id: PoolId) -> None:
        """An entry of the history, if it is kept."""
        if self.trace is not None:
            self.trace.append(new_entry(TraceEntry, (action, address, size, stream, self.time_us, pool_id, None, None)))

    def note_oom(self, device_free: int, size: int, stream: int, pool_id: PoolId) -> None:
        """The entry of a request that failed."""
        self.num_ooms += 1
        if self.trace is not None:
            self.trace.append(new_entry(TraceEntry, ("oom", 0, size, stream, self.time_us, pool_id, device_free, None)))

    def reserve(self, size: int, tally: Tally, owner: PrivatePool | None) -> None:
        """Memory was got from the driver, by one call."""
        self.num_device_alloc += 1
        for gauge in self._reserved(tally, owner):
            gauge.add(size)

    def unreserve(self, size: int, tally: Tally, owner: PrivatePool | None) -> None:
        """Memory was given back, by one call."""
        self.num_device_free += 1
        for gauge in self._reserved(tally, owner):
            gauge.take(size)

    def _reserved(self, tally: Tally, owner: PrivatePool | None) -> Iterator[Gauge]:
        yield self.reserved
        yield tally.reserved
        if owner is not None:
            everything, small, large = self.private.setdefault(owner.pool_id, (Gauge(), Gauge(), Gauge()))
            yield everything
            yield small if tally is self.small else large

    def reserved_in(self, pool_id: PoolId) -> int:
        """What a private pool has reserved, bytes."""
        return self.private[pool_id][0].current if pool_id in self.private else 0

    def mark_active(self, tally: Tally) -> None:
        """An allocation was made while something waited: active may be at its most."""
        tally.mark_active()
        self.active_count_peak = max(self.active_count_peak, self.count + self.waiting_count)
        self.active_bytes_peak = max(self.active_bytes_peak, self.bytes + self.waiting_bytes)

    def change_split(self, tally: Tally, count: int, size: int) -> None:
        """Free pieces of partly used segments came or went, on balance."""
        tally.change_split(count, size)
        self.split_count += count
        if self.split_count > self.split_count_peak:
            self.split_count_peak = self.split_count
        self.split_bytes += size
        if self.split_bytes > self.split_bytes_peak:
            self.split_bytes_peak = self.split_bytes

    # what is told

    def stats(self) -> dict[str, int]:
        """memory_stats(): flat names, sorted; counts, and bytes where the name says so."""
        found = self._accumulated()
        before = self._accumulated_before
        if before:
            found = {key: value - before.get(key, 0) for key, value in found.items()}
        return dict(sorted(found.items()))

    def _accumulated(self) -> dict[str, int]:
        found: dict[str, int] = {}
        small, large = dict(self.small.families()), dict(self.large.families())
        for family, peak in self._peaks():
            s, l = small[family], large[family]
            both = (s[0] + l[0], peak, s[2] + l[2], s[3] + l[3])
            for pool, figures in (("all", both), ("small_pool", s), ("large_pool", l)):
                _tell(found, f"{family}.{pool}", figures)
        for family, gauge in self._oversize():
            _tell(found, family, gauge.told())
        for name in _SCALARS:
            if name != "num_oom_rejections" or self.rules.tells_rejections:
                found[name] = getattr(self, name)
        found["max_split_size"] = self.max_split_size
        if self.rules.tells_private_pools:
            for (first, second), gauges in self.private.items():
                for pool, gauge in zip(("all", "small_pool", "large_pool"), gauges, strict=True):
                    _tell(found, f"reserved_bytes_by_private_pools.{first}_{second}.{pool}", gauge.told())
        return found

    def _oversize(self) -> tuple[tuple[str, Gauge], ...]:
        return ("oversize_allocations", self.oversize_allocations), ("oversize_segments", self.oversize_segments)

    def _peaks(self) -> tuple[tuple[str, int], ...]:
        return (
            ("allocation", self.count_peak),
            ("allocated_bytes", self.bytes_peak),
            ("active", max(self.active_count_peak, self.count_peak)),
            ("active_bytes", max(self.active_bytes_peak, self.bytes_peak)),
            ("requested_bytes", self.requested_peak),
            ("inactive_split", self.split_count_peak),
            ("inactive_split_bytes", self.split_bytes_peak),
            ("segment", self.segments.peak),
            ("reserved_bytes", self.reserved.peak),
        )

    def reset_accumulated(self) -> None:
        """torch.cuda.reset_accumulated_memory_stats(): allocated, freed and num_… start from 0 anew."""
        self._accumulated_before = {
            key: value
            for key, value in self._accumulated().items()
            if key.startswith("num_") or key.endswith((".allocated", ".freed"))
        }

    def reset_peaks(self) -> None:
        """torch.cuda.reset_peak_memory_stats(): the most there was is what there is."""
        self.small.reset_peaks()
        self.large.reset_peaks()
        self.count_peak, self.bytes_peak, self.requested_peak = self.count, self.bytes, self.requested
        self.active_count_peak = self.count + self.waiting_count
        self.active_bytes_peak = self.bytes + self.waiting_bytes
        self.split_count_peak, self.split_bytes_peak = self.split_count, self.split_bytes
        private = (gauge for gauges in self.private.values() for gauge in gauges)
        oversize = (gauge for _, gauge in self._oversize())
        for gauge in (self.segments, self.reserved, *oversize, *private):
            gauge.peak = gauge.current

    def copy(self, *, trace: bool) -> Ledger:
        """The same, to go on apart; its history begins empty."""
        other = Ledger(self.rules, max_split_size=self.max_split_size, trace=trace)
        for name in (*_TOTALS, *_SCALARS, "time_us"):
            setattr(other, name, getattr(self, name))
        other.small, other.large = self.small.copy(), self.large.copy()
        for name in ("segments", "reserved", "oversize_allocations", "oversize_segments"):
            setattr(other, name, getattr(self, name).copy())
        other.private = {key: (a.copy(), s.copy(), l.copy()) for key, (a, s, l) in self.private.items()}
        other._accumulated_before = self._accumulated_before
        return other


def _tell(found: dict[str, int], name: str, figures: tuple[int, int, int, int]) -> None:
    for kind, figure in zip(_KINDS, figures, strict=True):
        found[f"{name}.{kind}"] = figure


def pool_id_of(owner: PrivatePool | None) -> PoolId:
    """A private pool's id, or that of everybody's."""
    return DEFAULT_POOL if owner is None else owner.pool_id
