"""Which devices this process uses by torch, and what it says of itself: its devices, the settings in force."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from allocscope.model.identity import AllocatorRef, Device, Process
from allocscope.probe.log import log
from allocscope.probe.torch_blocks import large_page_bytes
from allocscope.probe.torch_cuda import TorchCuda
from allocscope.probe.uplink import Uplink


@dataclass(slots=True)
class Allocator:
    """One device in use, and what its last sample said."""

    device: Device
    ref: AllocatorRef
    counts: bool = False
    """Whether its counters ever told anything: where torch's caching is off they stay 0, which is not so."""
    signals: tuple[int | None, int | None] = (None, None)
    """num_alloc_retries, num_sync_all_streams."""


class Allocators:
    """Those that are known; the daemon is told of each once it is first used, and of settings when they change."""

    def __init__(self, torch: TorchCuda, uplink: Uplink, process: Process, environ: Mapping[str, str]) -> None:
        self._torch, self._uplink, self._environ = torch, uplink, environ
        self.process = process
        """As it was last introduced."""
        self.page_bytes = large_page_bytes(process.allocator_conf)
        """The page of a large expandable segment."""
        self._by_index: dict[int, Allocator] = {}
        self._nameless: set[int] = set()
        self._introducing = threading.RLock()

    def __len__(self) -> int:
        return len(self._by_index)

    def __iter__(self) -> Iterator[Allocator]:
        return iter(list(self._by_index.values()))

    def get(self, index: int) -> Allocator | None:
        """By torch's index; one that was not in use yet is introduced. None: it cannot be told apart."""
        return self._by_index.get(index) or self._add(index)

    def look(self) -> None:
        """Introduce what is newly in use."""
        for index in range(self._torch.device_count):
            known = index in self._by_index or index in self._nameless
            if not known and self._torch.is_used(index):
                self._add(index)

    def look_for_changed_settings(self) -> None:
        """The job may change its allocator's settings, or its memory fraction, while it runs."""
        conf = self._torch.allocator_conf(self._environ)
        changed = conf != self.process.allocator_conf
        for allocator in self:
            device = self._torch.device(allocator.device.index)
            if device is not None and device != allocator.device and device.uuid == allocator.device.uuid:
                allocator.device, changed = device, True
        if changed:
            self.page_bytes = large_page_bytes(conf)
            self.amend(allocator_conf=conf)

    def amend(self, **known: Any) -> None:
        """Tell the daemon what became known of the process: fields of `Process`, by name."""
        with self._introducing:
            devices = tuple(self._by_index[index].device for index in sorted(self._by_index))
            self.process = replace(self.process, devices=devices, **known)
            self._uplink.introduce(self.process)

    def _add(self, index: int) -> Allocator | None:
        device = None if index in self._nameless else self._torch.device(index)
        if device is None:
            if index not in self._nameless:
                log.info("allocscope: device %d is left out: this torch does not tell its UUID", index)
            self._nameless.add(index)
            return None
        with self._introducing:
            known = self._by_index.get(index)
            if known is None:
                known = Allocator(device, AllocatorRef(self.process.process_id, device.uuid))
                self._by_index[index] = known
                self.amend()
        return known
