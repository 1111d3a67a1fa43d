"""The node's devices: what NVML and the jobs know of each, put together into one reading with its bill."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

from allocscope.allocator.bill import ProcessUse, allocator_lines, device_bill
from allocscope.allocator.headroom import headroom
from allocscope.daemon.exposition import AllocatorView
from allocscope.daemon.node import Allocator, Attached, Node
from allocscope.daemon.nvml import NvmlDevice, NvmlRound
from allocscope.daemon.procfs import Procfs, is_same, join
from allocscope.model.bill import DeviceBill
from allocscope.model.identity import Device, Process
from allocscope.model.node import DeviceProcess, DeviceReading

MOST_PROCESSES_TOLD = 256
"""Processes in one reading; those of most memory."""


class _Probed(NamedTuple):
    """A process with a probe, and its allocator on one device."""

    attached: Attached
    allocator: Allocator

    @property
    def process(self) -> Process:
        return self.attached.process

    def use(self, used_bytes: int | None) -> ProcessUse:
        """What it uses of the device, for the bill."""
        settings, process_id = self.attached.settings, self.process.process_id
        expandable = settings.expandable if settings else None
        lines = allocator_lines(process_id, self.allocator.sample, self.allocator.block_map, expandable=expandable)
        return ProcessUse(process_id, lines, used_bytes)

    def view(self, device_free_bytes: int | None) -> AllocatorView | None:
        """What /metrics tells of it; None: it has said nothing yet."""
        sample, block_map, settings = self.allocator.sample, self.allocator.block_map, self.attached.settings
        if sample is None:
            return None
        view = AllocatorView(self.process, self.allocator.device.uuid, sample)
        if block_map is None:
            return view
        largest = max((group.largest_free_block_bytes or 0 for group in block_map.groups), default=None)
        room = None
        if settings is not None and device_free_bytes is not None:
            allowed = self.allocator.device.allowed_bytes
            room = headroom(block_map, settings, device_free_bytes=device_free_bytes, allowed_bytes=allowed)
        return replace(
            view, largest_free_block_bytes=largest, headroom_bytes=room.request_bytes if room is not None else None
        )


class Devices:
    """Puts readings together."""

    def __init__(self, node: Node, procfs: Procfs) -> None:
        self._node, self._procfs = node, procfs
        self._host = socket.gethostname()
        self._nvml: dict[str, NvmlDevice] = {}

    def total_bytes(self, uuid: str) -> int | None:
        """What a device has: by NVML, else as the first process that is on it said."""
        nvml = self._nvml.get(uuid)
        if nvml is not None and nvml.total_bytes is not None:
            return nvml.total_bytes
        totals = (t.allocator.device.total_bytes for t in self._probed(uuid))
        return next((total for total in totals if total is not None), None)

    def is_alive(self, process: Process) -> bool | None:
        """Whether a process is there; None: this daemon's /proc cannot tell."""
        if process.host != self._host:
            return None
        host = self._procfs.look_up(process.pid)
        if host is None:
            return False
        return is_same(host, process) or None

    def read(self, latest: NvmlRound, time_us: int) -> tuple[DeviceReading, ...]:
        """A reading of each device that NVML or a job knows."""
        self._nvml = {device.uuid: device for device in latest.devices}
        known = {uuid: Device(d.uuid, d.index, d.model, d.total_bytes) for uuid, d in self._nvml.items()}
        for attached in self._node:
            for allocator in attached.allocators.values():
                known.setdefault(allocator.device.uuid, replace(allocator.device, allowed_bytes=None))
        return tuple(self._read(device, time_us) for device in sorted(known.values(), key=lambda d: (d.index, d.uuid)))

    def allocators(self, readings: Iterable[DeviceReading]) -> Iterator[AllocatorView]:
        """Every allocator that has said anything."""
        free = {reading.device.uuid: reading.free_bytes for reading in readings}
        for attached in self._node:
            for uuid, allocator in attached.allocators.items():
                view = _Probed(attached, allocator).view(free.get(uuid))
                if view:
                    yield view

    def _probed(self, uuid: str) -> list[_Probed]:
        return [_Probed(a, a.allocators[uuid]) for a in self._node if uuid in a.allocators]

    def _read(self, device: Device, time_us: int) -> DeviceReading:
        nvml = self._nvml.get(device.uuid)
        probed = self._probed(device.uuid)
        free_bytes = nvml.free_bytes if nvml else None
        reading = DeviceReading(
            device=replace(device, total_bytes=self.total_bytes(device.uuid) or _newest(probed, "device_total_bytes")),
            time_us=time_us,
            from_nvml=free_bytes is not None,
            free_bytes=_newest(probed, "device_free_bytes") if free_bytes is None else free_bytes,
            driver_bytes=nvml.driver_bytes if nvml else None,
            processes=tuple(self._processes(nvml, probed)),
            problem=nvml.problem if nvml else None,
        )
        return replace(reading, bill=_bill(reading, probed, bool(nvml and nvml.processes is not None)))

    def _processes(self, nvml: NvmlDevice | None, probed: list[_Probed]) -> Iterator[DeviceProcess]:
        """Those with a probe, then the others, the largest first."""
        seen = {p.pid: p.used_bytes for p in (nvml.processes or () if nvml else ())}
        joined = join(seen, [p.process for p in probed], self._procfs)
        pids = {process_id: pid for pid, process_id in joined.items()}
        for one in probed[:MOST_PROCESSES_TOLD]:
            pid = pids.get(one.process.process_id)
            used_bytes = seen[pid] if pid is not None else None
            if used_bytes is None and one.allocator.sample is not None:
                used_bytes = one.allocator.sample.process_used_bytes
            yield DeviceProcess(pid, one.process.process_id, one.process.program, used_bytes)
        others = sorted(((used or 0, pid) for pid, used in seen.items() if pid not in joined), reverse=True)
        for _, pid in others[:MOST_PROCESSES_TOLD]:
            host = self._procfs.look_up(pid)
            yield DeviceProcess(pid, None, host.name if host else None, seen[pid])


def _bill(reading: DeviceReading, probed: list[_Probed], others_known: bool) -> DeviceBill | None:
    total_bytes = reading.device.total_bytes
    if total_bytes is None:
        return None
    used = {p.process_id: p.used_bytes for p in reading.processes if p.process_id}
    others = [p.used_bytes for p in reading.processes if not p.process_id]
    known = [figure for figure in others if figure is not None]
    return device_bill(
        total_bytes,
        free_bytes=reading.free_bytes,
        driver_bytes=reading.driver_bytes,
        probed=[one.use(used.get(one.process.process_id)) for one in probed],
        others_used_bytes=sum(known) if others_known and len(known) == len(others) else None,
    )


def _newest(probed: list[_Probed], name: str) -> int | None:
    """The figure of the newest sample that has it."""
    samples = [p.allocator.sample for p in probed if p.allocator.sample is not None]
    told = [(sample.time_us, figure) for sample in samples if (figure := getattr(sample, name)) is not None]
    return max(told)[1] if told else None
