"""A simulator that is asked for what a program asked for, and what that comes to."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

from allocscope.allocator.errors import OutOfMemoryError, UndefinedStateError
from allocscope.allocator.simulator.asked import Asked, OtherUsed
from allocscope.allocator.simulator.simulator import Simulator
from allocscope.allocator.simulator.stranded import StrandedPeak
from allocscope.allocator.snapshot import DEFAULT_POOL


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the same requests come to under some settings; bytes and counts, from where the history begins."""

    failed_at: int | None
    """The request, of `asked`, whose OutOfMemoryError ends the replay; None: none does."""
    failed_us: int | None
    message: str | None
    reserved_peak_bytes: int
    stranded_peak_bytes: int
    """Free in holes that cannot be given back, at most; private pools' free bytes are not in it.

    To the byte where segments are not expandable and no private pool was used. Otherwise the most of what it was at looks some ten
    to a hundred requests apart, at each failure, and in the end: between them it may have been more.
    """
    allocated_peak_bytes: int
    reserved_bytes: int
    """At the end."""
    num_alloc_retries: int
    num_device_alloc: int
    num_device_free: int
    failed_size: int | None = None
    """Bytes that the failed request asked for."""
    num_ooms: int = 0
    """All that failed, those that the program survived as well."""
    undefined: str | None = None
    """Why PyTorch itself would be corrupt at `failed_at`, where that is what ends the replay; None: it is not."""


def ask_again(
    asked: Iterable[Asked], simulator: Simulator, other_used: OtherUsed, *, undefined_ends: bool = False
) -> Outcome:
    """Ask a new simulator for the same, until a request ends in an OutOfMemoryError that the program is not known to survive.

    UndefinedStateError: PyTorch itself would be corrupt; with `undefined_ends` the outcome says so instead, as of a failure.
    """
    asking = _Asking(simulator)
    try:
        _ask_all(asked, asking, other_used)
    except UndefinedStateError as error:
        if not undefined_ends:
            raise
        asking.undefined = str(error)
    return asking.outcome()


def _ask_all(asked: Iterable[Asked], asking: _Asking, other_used: OtherUsed) -> None:
    """In one piece, for speed, what is of every day."""
    simulator, addresses = asking.simulator, asking.addresses
    malloc, malloc_in, free, device = simulator.malloc, simulator.malloc_in, simulator.free, simulator.device
    taken, served = addresses.pop, asking.stranded.served
    now_us = None
    for asking.at, each in enumerate(asked):
        what, time_us, key, size, stream, pool_id, survived = each
        if what == "malloc":
            if time_us != now_us:
                now_us = time_us
                device.other_bytes = other_used(time_us)
            try:
                address = malloc(size, stream) if pool_id == DEFAULT_POOL else malloc_in(pool_id, size, stream)
            except OutOfMemoryError as error:
                if not asking.goes_on(each, error):
                    return
            else:
                if survived:  # then it was not served, and what the program would have done with it nobody knows
                    free(address)
                else:
                    addresses[key] = address
            served()
        elif what == "free":
            free(taken(key, 0))
            served()
        else:
            asking.ask(each)


class _Asking:
    """What is not of every day."""

    def __init__(self, simulator: Simulator) -> None:
        self.simulator, self.stranded = simulator, StrandedPeak(simulator)
        self.addresses: dict[int, int] = {}
        """By key."""
        self.at = 0
        """The request that is being made, or was last."""
        self.undefined: str | None = None
        """Why PyTorch would be corrupt by it."""
        self._holes: list[int] = []
        self._failed: tuple[Asked, OutOfMemoryError] | None = None
        self._num_ooms = 0

    def ask(self, asked: Asked) -> None:
        """Anything but malloc and free."""
        simulator, key = self.simulator, asked.key
        match asked.what:
            case "wait":
                # each waits by itself: which streams it was is not told, only when they were done
                if self.addresses.get(key):
                    simulator.record_stream(self.addresses[key], -1 - key)
            case "done":
                simulator.finish_stream(-1 - key)
            case "empty_cache":
                simulator.empty_cache()
            case "end_pool" | "free_pool":
                simulator.end_pool_if_known(asked.pool_id, empty=asked.what == "end_pool")
            case "hole":
                with suppress(OutOfMemoryError):
                    self.addresses[key] = simulator.malloc_in(asked.pool_id, asked.size, asked.stream)
                    self._holes.append(key)
            case "began":
                self._holes.clear()
                simulator.forget_past()
                self.stranded.begin()
                self._num_ooms = 0

    def goes_on(self, asked: Asked, error: OutOfMemoryError) -> bool:
        """A request failed: whether more are made."""
        simulator = self.simulator
        if self._holes:  # what is live needs the room more than what lay free
            for key in self._holes:
                simulator.free(self.addresses.pop(key, 0))
            self._holes.clear()
            with suppress(OutOfMemoryError):
                self.addresses[asked.key] = simulator.malloc_in(asked.pool_id, asked.size, asked.stream)
                return True
        self._num_ooms += 1
        self.stranded.look()
        if not asked.survived:
            self._failed = asked, error
        return asked.survived

    def outcome(self) -> Outcome:
        """So far."""
        self.stranded.look()
        stats = self.simulator.stats()
        asked, error = self._failed or (None, None)
        ended = self._failed is not None or self.undefined is not None
        return Outcome(
            failed_at=self.at if ended else None,
            failed_us=asked and asked.time_us,
            message=self.undefined if error is None else str(error),
            reserved_peak_bytes=stats["reserved_bytes.all.peak"],
            stranded_peak_bytes=self.stranded.bytes,
            allocated_peak_bytes=stats["allocated_bytes.all.peak"],
            reserved_bytes=stats["reserved_bytes.all.current"],
            num_alloc_retries=stats["num_alloc_retries"],
            num_device_alloc=stats["num_device_alloc"],
            num_device_free=stats["num_device_free"],
            failed_size=asked and asked.size,
            num_ooms=self._num_ooms,
            undefined=self.undefined,
        )
