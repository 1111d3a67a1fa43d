"""The node's devices: what NVML and the jobs know of each, put together into one reading with its bill."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import dataclass, replace

from allocscope.daemon.billing import Tenant, device_bill
from allocscope.daemon.exposition import AllocatorView
from allocscope.daemon.node import Allocator, Node
from allocscope.daemon.nvml import NvmlDevice, NvmlRound
from allocscope.daemon.procfs import Procfs, is_same, join
from allocscope.model.bill import DeviceBill
from allocscope.model.identity import Device, Process
from allocscope.model.node import DeviceProcess, DeviceReading

MOST_PROCESSES_TOLD = 256
"""Processes in one reading; those of most memory."""


@dataclass(frozen=True, slots=True)
class _Probed:
    """A process with a probe, on one device."""

    process: Process
    allocator: Allocator


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

    def allocators(self) -> Iterator[AllocatorView]:
        """Every allocator that has said anything."""
        for attached in self._node:
            for uuid, allocator in attached.allocators.items():
                if allocator.sample is not None:
                    yield AllocatorView(attached.process, uuid, allocator.sample, None, _largest_free(allocator))

    def _probed(self, uuid: str) -> list[_Probed]:
        return [_Probed(a.process, a.allocators[uuid]) for a in self._node if uuid in a.allocators]

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
        total_bytes=total_bytes,
        free_bytes=reading.free_bytes,
        driver_bytes=reading.driver_bytes,
        tenants=[
            Tenant(p.process.process_id, p.allocator.sample, p.allocator.block_map, used.get(p.process.process_id))
            for p in probed
        ],
        others_bytes=sum(known) if others_known and len(known) == len(others) else None,
    )


def _newest(probed: list[_Probed], name: str) -> int | None:
    """The figure of the newest sample that has it."""
    samples = [p.allocator.sample for p in probed if p.allocator.sample is not None]
    told = [(sample.time_us, figure) for sample in samples if (figure := getattr(sample, name)) is not None]
    return max(told)[1] if told else None


def _largest_free(allocator: Allocator) -> int | None:
    if allocator.block_map is None:
        return None
    return max((group.largest_free_block_bytes or 0 for group in allocator.block_map.groups), default=None)
