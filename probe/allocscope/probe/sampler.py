"""What is looked at, and when: counters each second, a block map now and then, all there is at an out-of-memory error."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from allocscope.model.blocks import BlockMap
from allocscope.model.events import Event, EventKind
from allocscope.model.identity import AllocatorRef, Device, Process
from allocscope.model.orders import Intervals, Order
from allocscope.model.sample import Sample
from allocscope.probe.counters import Stats, is_used, sample_of
from allocscope.probe.torch_cuda import TORCH_ERRORS, TorchCuda, groups_of, large_page_bytes
from allocscope.probe.uplink import Uplink, wall_us

log = logging.getLogger("allocscope.probe")

SAMPLE_INTERVAL_S, MAP_INTERVAL_S = 1.0, 10.0
SHORTEST_SAMPLE_INTERVAL_S, LONGEST_INTERVAL_S = 0.1, 3600.0
SAMPLE_COST_FACTOR = 100
"""A round of samples is followed by a pause of so many times its own length: it may hold the GIL at most 1 % of the time …"""
LONGEST_PAUSE_S = 10.0
"""… but a stall, which is worth seeing, does not blind the probe for longer."""
MAP_COST_FACTOR = 1000
"""Block maps stay under 0.1 % of the time."""
MAP_JITTER = 0.4
"""So that maps do not fall on the same moment of every step."""
SHORTEST_MAP_INTERVAL_S = 2.0
SLOW_DRIVER_S = 0.005
ROUNDS_BETWEEN_LOOKS = 10
"""Unused devices are looked at, and a slow driver asked, only every so many rounds."""


@dataclass(frozen=True, slots=True)
class Clock:
    """What tells the time, and what draws lots."""

    wall_us: Callable[[], int] = wall_us
    seconds: Callable[[], float] = time.perf_counter
    chance: Callable[[], float] = random.random


@dataclass(slots=True)
class _Allocator:
    """One device in use, and what its last sample said."""

    device: Device
    ref: AllocatorRef
    signals: tuple[int | None, int | None] = (None, None)
    """num_alloc_retries, num_sync_all_streams."""


class Sampler:
    """Samples one process's allocators. `step` is called by one thread; `on_oom` by whichever thread runs out of memory."""

    def __init__(
        self,
        torch: TorchCuda,
        uplink: Uplink,
        process: Process,
        environ: Mapping[str, str],
        clock: Clock = Clock(),
    ) -> None:
        self._torch, self._uplink, self._process, self._environ, self._clock = torch, uplink, process, environ, clock
        self._allocators: dict[int, _Allocator] = {}
        self._nameless: set[int] = set()
        self._numbering = threading.RLock()
        self._rounds = 0
        self._sample_interval_s, self._map_interval_s = SAMPLE_INTERVAL_S, MAP_INTERVAL_S
        self._map_cost_s = 0.0
        self._last_map_s = self._next_map_s = 0.0
        self._last_oom_map_s = -LONGEST_INTERVAL_S
        self._driver_is_slow = False
        self._page_bytes = large_page_bytes(process.allocator_conf)

    def obey(self, order: Order) -> None:
        """Look more or less often; other orders are not for this version."""
        if isinstance(order, Intervals):
            if order.sample_us is not None:
                self._sample_interval_s = _clamp(order.sample_us / 1e6, SHORTEST_SAMPLE_INTERVAL_S)
            if order.block_map_us is not None:
                self._map_interval_s = _clamp(order.block_map_us / 1e6, SHORTEST_MAP_INTERVAL_S)
        else:
            log.info("allocscope: this version's probe cannot follow %s", order)

    def step(self) -> float:
        """Do what is due; how many seconds to wait before the next step."""
        began = self._clock.seconds()
        if self._rounds % ROUNDS_BETWEEN_LOOKS == 0:
            self._look_for_devices()
        is_alarming = False
        for allocator in list(self._allocators.values()):
            is_alarming |= self._sample(allocator)
        ended = self._clock.seconds()
        self._rounds += 1
        if is_alarming:
            self._next_map_s = min(self._next_map_s, self._earliest_map_s())
        if self._allocators and ended >= self._next_map_s:
            self._take_map(ended)
        pause_s = max(
            self._sample_interval_s - (ended - began), min(SAMPLE_COST_FACTOR * (ended - began), LONGEST_PAUSE_S)
        )
        return max(pause_s - (self._clock.seconds() - ended), 0.0)

    # devices

    def _look_for_devices(self) -> None:
        for index in range(self._torch.device_count):
            if index in self._allocators or index in self._nameless:
                continue
            try:
                used = is_used(self._torch.stats(index))
            except TORCH_ERRORS:
                continue
            if used:
                self._add(index)

    def _add(self, index: int) -> _Allocator | None:
        """Introduce a device that was first used."""
        device = self._torch.device(index)
        if device is None:
            self._nameless.add(index)
            log.info("allocscope: device %d is left out: this torch does not tell its UUID", index)
            return None
        with self._numbering:
            known = self._allocators.get(index)
            if known is None:
                known = _Allocator(device, AllocatorRef(self._process.process_id, device.uuid))
                self._allocators[index] = known
                self._introduce()
        return known

    def _introduce(self) -> None:
        devices = tuple(self._allocators[index].device for index in sorted(self._allocators))
        self._process = replace(self._process, devices=devices)
        self._uplink.introduce(self._process)

    def _look_for_changed_settings(self) -> None:
        """The job may change its allocator's settings, or its memory fraction, while it runs."""
        conf = self._torch.allocator_conf(self._environ)
        changed = conf != self._process.allocator_conf
        for allocator in self._allocators.values():
            device = self._torch.device(allocator.device.index)
            if device is not None and device != allocator.device and device.uuid == allocator.device.uuid:
                allocator.device, changed = device, True
        if changed:
            with self._numbering:
                self._page_bytes = large_page_bytes(conf)
                self._process = replace(self._process, allocator_conf=conf)
                self._introduce()

    # samples

    def _sample(self, allocator: _Allocator) -> bool:
        """Take one; whether it calls for a block map."""
        try:
            stats, call_us = self._read(allocator.device.index)
        except TORCH_ERRORS:
            return False
        info = None
        if not self._driver_is_slow or self._rounds % ROUNDS_BETWEEN_LOOKS == 0:
            asked = self._clock.seconds()
            info = self._torch.memory_info(allocator.device.index)
            self._driver_is_slow = self._clock.seconds() - asked > SLOW_DRIVER_S
        sample = self._hand_on_sample(allocator.ref, stats, call_us, info)
        before, allocator.signals = allocator.signals, (sample.num_alloc_retries, sample.num_sync_all_streams)
        return any(a is not None and b is not None and b > a for a, b in zip(before, allocator.signals, strict=True))

    def _read(self, index: int) -> tuple[Stats, int]:
        began = self._clock.seconds()
        stats = self._torch.stats(index)
        return stats, round((self._clock.seconds() - began) * 1e6)

    def _hand_on_sample(self, ref: AllocatorRef, stats: Stats, call_us: int, info: tuple[int, int] | None) -> Sample:
        free, total = info if info is not None else (None, None)
        with self._numbering:
            sample = sample_of(
                stats,
                self._uplink.next_sequence(),
                self._clock.wall_us(),
                call_us=call_us,
                device_total_bytes=total,
                device_free_bytes=free,
            )
            self._uplink.sample(ref, sample)
        return sample

    # block maps

    def _take_map(self, now_s: float) -> None:
        self._look_for_changed_settings()
        began = self._clock.seconds()
        segments = self._torch.segments()
        if segments is not None:
            for allocator in list(self._allocators.values()):
                self._hand_on_map(allocator, segments, began)
        self._map_cost_s = self._clock.seconds() - began
        self._last_map_s = now_s
        jitter = 1 + MAP_JITTER * (2 * self._clock.chance() - 1)
        self._next_map_s = now_s + jitter * max(
            self._map_interval_s, MAP_COST_FACTOR * self._map_cost_s / (1 - MAP_JITTER)
        )

    def _earliest_map_s(self) -> float:
        return self._last_map_s + max(SHORTEST_MAP_INTERVAL_S, MAP_COST_FACTOR * self._map_cost_s)

    def _hand_on_map(self, allocator: _Allocator, segments: list[Mapping[str, Any]], began_s: float) -> None:
        time_us = self._clock.wall_us()
        groups = groups_of(segments, allocator.device.index, self._page_bytes)
        if groups is None:
            return
        call_us = round((self._clock.seconds() - began_s) * 1e6)
        with self._numbering:
            self._uplink.block_map(allocator.ref, BlockMap(self._uplink.next_sequence(), time_us, groups, call_us))

    # out of memory

    def on_oom(self, index: int, segment_bytes: int, total_bytes: int, free_bytes: int) -> None:
        """Called by torch on the thread that runs out of memory, before the error is raised: quick, and never raising."""
        allocator = self._allocators.get(index) or self._add(index)
        if allocator is None:
            return
        try:
            self._hand_on_sample(allocator.ref, *self._read(index), None)
            now_s = self._clock.seconds()
            if now_s - self._last_oom_map_s >= SHORTEST_MAP_INTERVAL_S:  # a program may catch many of them
                self._last_oom_map_s = now_s
                segments = self._torch.segments()
                if segments is not None:
                    self._hand_on_map(allocator, segments, now_s)
        except TORCH_ERRORS as error:
            log.debug("allocscope: no counters at an out-of-memory error: %r", error)
        with self._numbering:
            self._uplink.event(
                Event(
                    self._process.process_id,
                    self._uplink.next_sequence(),
                    self._clock.wall_us(),
                    EventKind.OOM,
                    device_uuid=allocator.ref.device_uuid,
                    requested_bytes=segment_bytes,
                    device_total_bytes=total_bytes,
                    device_free_bytes=free_bytes,
                )
            )

    def say_stopped(self) -> None:
        """The process ends in order, or wants no more of this."""
        with self._numbering:
            self._uplink.event(
                Event(self._process.process_id, self._uplink.next_sequence(), self._clock.wall_us(), EventKind.STOPPED)
            )


def _clamp(seconds: float, shortest: float) -> float:
    return min(max(seconds, shortest), LONGEST_INTERVAL_S)
