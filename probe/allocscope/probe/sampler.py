"""What is looked at, and when: counters each second, a block map now and then, all there is at an out-of-memory error."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from allocscope.model.blocks import BlockMap
from allocscope.model.orders import CaptureOrder, Intervals, Order
from allocscope.model.sample import Sample
from allocscope.probe.allocators import Allocator, Allocators
from allocscope.probe.captures import Captures, Moment
from allocscope.probe.clock import Clock
from allocscope.probe.counters import is_used
from allocscope.probe.history import History
from allocscope.probe.log import log
from allocscope.probe.reports import Reading, Reports, Shortage
from allocscope.probe.torch_blocks import TorchBlocks, groups_of, no_garbage_collected
from allocscope.probe.torch_cuda import TORCH_ERRORS, TorchCuda

SAMPLE_INTERVAL_S, MAP_INTERVAL_S = 1.0, 10.0
SHORTEST_SAMPLE_INTERVAL_S, LONGEST_INTERVAL_S = 0.1, 3600.0
SAMPLE_COST_FACTOR = 100
"""A round of samples is followed by a pause of so many times what its calls took: they may hold the GIL at most 1 % of the time …"""
LONGEST_PAUSE_S = 10.0
"""… but a stall, which is worth seeing, does not blind the probe for longer."""
MAP_COST_FACTOR = 1000
"""Block maps stay under 0.1 % of the time."""
MAP_JITTER = 0.4
"""So that maps do not fall on the same moment of every step."""
SHORTEST_MAP_INTERVAL_S = 2.0
MAP_INTERVAL_IN_HISTORY_S = 60.0
"""At least, while the program records a history: each map leaves an entry in it."""
SLOW_DRIVER_S = 0.05
"""Far more than a busy job's other threads keep ours waiting for the GIL, after a call that let go of it."""
ROUNDS_BETWEEN_LOOKS = 10
"""Unused devices are looked at, and a slow driver asked, only every so many rounds."""
MOST_ORDERS_WAITING = 512
"""More than a daemon keeps of them (256), which it may tell all at once to a process that comes again: each is to be answered."""


class Sampler:
    """Samples one process's allocators. `step` is called by one thread, `obey` by another, `on_oom` by whichever runs out of memory."""

    def __init__(
        self,
        torch: TorchCuda,
        blocks: TorchBlocks,
        history: History,
        allocators: Allocators,
        reports: Reports,
        captures: Captures,
        clock: Clock,
    ) -> None:
        self._torch, self._blocks, self._history, self._clock = torch, blocks, history, clock
        self._allocators, self._reports, self._captures = allocators, reports, captures
        self._orders: deque[Order] = deque(maxlen=MOST_ORDERS_WAITING)
        self._rounds = 0
        self._sample_interval_s, self._map_interval_s = SAMPLE_INTERVAL_S, MAP_INTERVAL_S
        self._next_sample_s = self._last_sample_s = -LONGEST_INTERVAL_S
        self._map_cost_s = 0.0
        self._last_map_s = self._next_map_s = 0.0
        self._last_oom_map_s = -LONGEST_INTERVAL_S
        self._driver_is_slow = False
        self._closing = threading.Lock()

    def obey(self, order: Order) -> None:
        """Do so with the next step."""
        self._orders.append(order)

    def step(self) -> float:
        """Do what is due; how many seconds to wait before the next step."""
        while self._orders:
            self._obey(self._orders.popleft())
        if self._clock.seconds() >= self._next_sample_s:
            self._sample_all()
        if len(self._allocators) and self._clock.seconds() >= self._next_map_s:
            self._take_map()
        due_s = min(self._next_sample_s, self._captures.step())
        if len(self._allocators):
            due_s = min(due_s, self._next_map_s)
        return max(due_s - self._clock.seconds(), 0.0)

    def close(self) -> None:
        """The process ends in order, or wants no more of this; `step` is not called again, this may be.

        By the thread that calls `step`, where it can: torch switches a history off without a warning only in the thread that
        switched it on (torch 2.14.1).
        """
        if self._closing.acquire(blocking=False):  # for ever
            self._captures.close([order for order in self._orders if isinstance(order, CaptureOrder)])
            self._reports.stopped()

    def _obey(self, order: Order) -> None:
        if isinstance(order, CaptureOrder):
            self._captures.order(order)
        elif isinstance(order, Intervals):
            if order.sample_us is not None:
                self._sample_interval_s = _clamp(order.sample_us / 1e6, SHORTEST_SAMPLE_INTERVAL_S)
                self._next_sample_s = self._last_sample_s + self._sample_interval_s
            if order.block_map_us is not None:
                self._map_interval_s = _clamp(order.block_map_us / 1e6, SHORTEST_MAP_INTERVAL_S)
                self._next_map_s = min(
                    self._next_map_s, max(self._last_map_s + self._map_interval_s, self._earliest_map_s())
                )

    # samples

    def _sample_all(self) -> None:
        """One round over all devices, and when the next one is due."""
        began = self._clock.seconds()
        self._history.look()
        if self._rounds % ROUNDS_BETWEEN_LOOKS == 0:
            self._allocators.look()
        calls_us, is_alarming = 0, False
        for allocator in self._allocators:
            sample = self._sample(allocator)
            if sample is not None:
                calls_us += sample.call_us or 0
                is_alarming |= _is_alarmed(allocator, sample)
        self._rounds += 1
        if is_alarming:
            self._next_map_s = min(self._next_map_s, self._earliest_map_s())
        self._last_sample_s = began
        pause_s = min(SAMPLE_COST_FACTOR * calls_us / 1e6, LONGEST_PAUSE_S)
        self._next_sample_s = max(began + self._sample_interval_s, self._clock.seconds() + pause_s)

    def _sample(self, allocator: Allocator) -> Sample | None:
        """Hand one on; None where torch does not tell."""
        index = allocator.device.index
        try:
            stats, call_us = self._read(index)
            allocator.counts = allocator.counts or is_used(stats)
        except TORCH_ERRORS:
            return None
        if not allocator.counts:
            return None
        free, total = self._ask_driver(index) or (None, None)
        return self._reports.sample(allocator.ref, Reading(stats, call_us, free, total))

    def _read(self, index: int) -> tuple[Mapping[Any, Any], int]:
        began = self._clock.seconds()
        stats = self._torch.stats(index)
        return stats, round((self._clock.seconds() - began) * 1e6)

    def _ask_driver(self, index: int) -> tuple[int, int] | None:
        """The device's free and total bytes; seldom where that is slow."""
        if self._driver_is_slow and self._rounds % ROUNDS_BETWEEN_LOOKS:
            return None
        asked = self._clock.seconds()
        info = self._torch.memory_info(index)
        self._driver_is_slow = self._clock.seconds() - asked > SLOW_DRIVER_S
        return info

    # block maps

    def _take_map(self) -> None:
        self._allocators.look_for_changed_settings()
        began = self._clock.seconds()
        with no_garbage_collected():
            segments = self._segments()
            if segments is not None:
                for allocator in self._allocators:
                    if allocator.counts:
                        self._hand_on_map(allocator, segments, began)
            del segments
        self._map_cost_s = self._clock.seconds() - began
        self._last_map_s = began
        jitter = 1 + MAP_JITTER * (2 * self._clock.chance() - 1)
        self._next_map_s = began + jitter * max(self._map_interval_s, self._least_map_interval_s / (1 - MAP_JITTER))

    def _earliest_map_s(self) -> float:
        return self._last_map_s + max(SHORTEST_MAP_INTERVAL_S, self._least_map_interval_s)

    @property
    def _least_map_interval_s(self) -> float:
        """For what a map costs, and leaves behind."""
        in_history_s = MAP_INTERVAL_IN_HISTORY_S if self._history.is_programs else 0.0
        return max(MAP_COST_FACTOR * self._map_cost_s, in_history_s)

    def _segments(self) -> list[Mapping[str, Any]] | None:
        """None also where blocks may have stacks that torch would have to import its compiler for, or copy a history."""
        can_be_had = self._blocks.has_words_for_stacks and self._blocks.can_leave_traces_out
        return self._blocks.segments() if can_be_had or not self._history.has_stacks else None

    def _hand_on_map(
        self, allocator: Allocator, segments: Sequence[Mapping[str, Any]], began_s: float | None = None
    ) -> BlockMap | None:
        time_us = self._clock.wall_us()
        groups = groups_of(segments, allocator.device.index, self._allocators.page_bytes)
        if groups is None:
            return None
        call_us = None if began_s is None else round((self._clock.seconds() - began_s) * 1e6)
        return self._reports.block_map(allocator.ref, groups, time_us=time_us, call_us=call_us)

    # out of memory

    def on_oom(self, index: int, shortage: Shortage) -> None:
        """Called by torch on the thread that runs out of memory, before the error is raised: quick, and never raising."""
        allocator = self._allocators.get(index)
        if allocator is None:
            return
        sample, block_map = self._sample_at_oom(allocator), self._map_at_oom(allocator)
        event = self._reports.out_of_memory(allocator.ref, shortage)
        self._allocators.look_for_changed_settings()
        self._captures.on_oom(Moment(allocator, sample, block_map, event, partial(self._hand_on_map, allocator)))

    def _sample_at_oom(self, allocator: Allocator) -> Sample | None:
        """Without the driver's figures: they come with the error."""
        try:
            reading = Reading(*self._read(allocator.device.index))
        except TORCH_ERRORS as error:
            log.debug("allocscope: no counters at an out-of-memory error: %r", error)
            return None
        return self._reports.sample(allocator.ref, reading)

    def _map_at_oom(self, allocator: Allocator) -> BlockMap | None:
        """None where one was made moments before (a program may catch many errors), or would take seconds."""
        now_s = self._clock.seconds()
        if now_s - self._last_oom_map_s < SHORTEST_MAP_INTERVAL_S:
            return None
        self._last_oom_map_s = now_s
        segments = self._segments()
        return None if segments is None else self._hand_on_map(allocator, segments, now_s)


def _is_alarmed(allocator: Allocator, sample: Sample) -> bool:
    """Whether the cache was flushed since the sample before: that calls for a block map."""
    before, allocator.signals = allocator.signals, (sample.num_alloc_retries, sample.num_sync_all_streams)
    return any(a is not None and b is not None and b > a for a, b in zip(before, allocator.signals, strict=True))


def _clamp(seconds: float, shortest: float) -> float:
    return min(max(seconds, shortest), LONGEST_INTERVAL_S)
