"""What is handed on: numbered and given to the uplink in one go, by one thread after the other."""

from __future__ import annotations

import threading
from typing import NamedTuple

from allocscope.model.blocks import BlockGroup, BlockMap
from allocscope.model.events import Event, EventKind
from allocscope.model.identity import AllocatorRef
from allocscope.model.sample import Sample
from allocscope.probe.clock import Clock
from allocscope.probe.counters import Stats
from allocscope.probe.torch_cuda import TorchCuda
from allocscope.probe.uplink import Uplink


class Reading(NamedTuple):
    """An allocator's counters as torch tells them."""

    stats: Stats
    call_us: int
    free_bytes: int | None = None
    """Of the device, by the driver."""
    total_bytes: int | None = None


class Shortage(NamedTuple):
    """What torch tells of an OutOfMemoryError before it is raised."""

    segment_bytes: int
    """Asked of the driver in vain."""
    total_bytes: int
    """The device's memory, or what the process is allowed of it."""
    free_bytes: int


class Reports:
    """One process's. What it hands on it also gives back, since a capture tells the same."""

    def __init__(self, torch: TorchCuda, uplink: Uplink, process_id: str, clock: Clock) -> None:
        self._uplink, self._process_id, self._clock = uplink, process_id, clock
        self._sample_of = torch.sample_of
        self._numbering = threading.RLock()

    def sample(self, ref: AllocatorRef, reading: Reading) -> Sample:
        """Counters."""
        with self._numbering:
            sample = self._sample_of(
                reading.stats,
                self._uplink.next_sequence(),
                self._clock.wall_us(),
                call_us=reading.call_us,
                device_total_bytes=reading.total_bytes,
                device_free_bytes=reading.free_bytes,
            )
            self._uplink.sample(ref, sample)
        return sample

    def block_map(
        self, ref: AllocatorRef, groups: tuple[BlockGroup, ...], *, time_us: int, call_us: int | None
    ) -> BlockMap:
        """Blocks, as they were at `time_us`."""
        with self._numbering:
            block_map = BlockMap(self._uplink.next_sequence(), time_us, groups, call_us)
            self._uplink.block_map(ref, block_map)
        return block_map

    def out_of_memory(self, ref: AllocatorRef, shortage: Shortage) -> Event:
        """An OutOfMemoryError is about to be raised."""
        with self._numbering:
            event = Event(
                self._process_id,
                self._uplink.next_sequence(),
                self._clock.wall_us(),
                EventKind.OOM,
                device_uuid=ref.device_uuid,
                requested_bytes=shortage.segment_bytes,
                device_total_bytes=shortage.total_bytes,
                device_free_bytes=shortage.free_bytes,
            )
            self._uplink.event(event)
        return event

    def stopped(self) -> None:
        """The process ends in order, or wants no more of this."""
        with self._numbering:
            event = Event(self._process_id, self._uplink.next_sequence(), self._clock.wall_us(), EventKind.STOPPED)
            self._uplink.event(event)
