"""The node's devices: what NVML and the jobs know of each, put together into one reading with its bill."""

from __future__ import annotations

import socket
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

from allocscope.allocator.bill import ProcessUse, allocator_lines, device_bill
from allocscope.allocator.headroom import headroom
from allocscope.daemon.exposition import AllocatorView
from allocscope.daemon.node import Allocator, Attached, Node
from allocscope.daemon.nvml import NvmlRound
from allocscope.daemon.nvml_device import NvmlDevice
from allocscope.daemon.owners import Owners
from allocscope.daemon.peers import Peer, Peers
from allocscope.daemon.procfs import HostProcess, Hosts, Procfs, is_same, join
from allocscope.model.bill import DeviceBill
from allocscope.model.identity import Device, Process
from allocscope.model.node import DeviceProcess, DeviceReading, Owner

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

    def __init__(self, node: Node, procfs: Procfs, owners: Owners | None = None) -> None:
        """`owners`: who says whose a process is; None: nobody."""
        self._node, self._procfs, self._owners = node, procfs, owners
        self._hosts, self._peers = Hosts(procfs), Peers(procfs)
        self._owned: set[int] = set()
        self._host_name = socket.gethostname()
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
        peer = self._peer(process)
        if peer is not None and (alive := self._peers.is_alive(peer)) is not None:
            return alive
        if process.host != self._host_name:
            return None
        host = self._procfs.look_up(process.pid)
        if host is None:
            return None if self._procfs.hides_processes else False
        return is_same(host, process) or None

    def owners(self, process: Process) -> frozenset[int]:
        """The user ids that a process runs under, by the kernel's word where it reported; empty: this daemon cannot tell."""
        peer = self._peer(process)
        if peer is not None:
            return self._peers.uids(peer)
        host = self._procfs.look_up(process.pid) if process.host == self._host_name else None
        return host.uids if host is not None and is_same(host, process) else frozenset()

    def _peer(self, process: Process) -> Peer | None:
        introduced = self._node.introduction(process.process_id)
        return introduced.peer if introduced is not None else None

    def read(self, latest: NvmlRound, time_us: int) -> tuple[DeviceReading, ...]:
        """A reading of each device that NVML or a job knows."""
        self._hosts.begin(time_us)
        self._nvml = {device.uuid: device for device in latest.devices if device.uuid}
        known = {
            uuid: Device(uuid, d.index, d.model, d.total_bytes, parent_uuid=d.parent_uuid)
            for uuid, d in self._nvml.items()
        }
        for attached in self._node:
            for allocator in attached.allocators.values():
                known.setdefault(allocator.device.uuid, replace(allocator.device, allowed_bytes=None))
        self._owned.clear()
        ordered = sorted(known.values(), key=lambda d: (d.index, d.uuid))
        readings = tuple(self._read(device, time_us) for device in ordered)
        if self._owners:
            self._owners.forget_others(self._owned)
        return readings

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
            processes=tuple(self._processes(device.uuid, nvml, probed)),
            problem=nvml.problem.text if nvml and nvml.problem else None,
            problem_kind=nvml.problem.kind.value if nvml and nvml.problem else None,
        )
        return replace(reading, bill=_bill(reading, probed, bool(nvml and nvml.processes is not None)))

    def _processes(self, uuid: str, nvml: NvmlDevice | None, probed: list[_Probed]) -> Iterator[DeviceProcess]:
        """Those with a probe, then the others, the largest first."""
        seen = {p.pid: p.used_bytes for p in (nvml.processes or () if nvml else ())}
        pids = self._pids(seen, probed)
        joined = set(pids.values())
        for one in probed[:MOST_PROCESSES_TOLD]:
            pid = pids.get(one.process.process_id)
            used_bytes = seen.get(pid) if pid is not None else None
            if used_bytes is None and one.allocator.sample is not None:
                used_bytes = one.allocator.sample.process_used_bytes
            owner = self._owner(self._host(one.process, pid), uuid, one.process.host)
            yield DeviceProcess(pid, one.process.process_id, one.process.program, used_bytes, owner)
        others = sorted(((used or 0, pid) for pid, used in seen.items() if pid not in joined), reverse=True)
        for _, pid in others[:MOST_PROCESSES_TOLD]:
            host = self._hosts.look_up(pid)
            yield DeviceProcess(pid, None, host.name if host else None, seen[pid], self._owner(host, uuid))

    def _pids(self, seen: Collection[int], probed: list[_Probed]) -> dict[str, int]:
        """Of processes with a probe, by the kernel's word for whose their connections are, else by what the driver has `seen`.

        No pid is two's, since its bytes are counted once: it is that of the one that came last.
        """
        connected = {p.process.process_id: pid for p in probed if (pid := self._peer_pid(p.attached)) is not None}
        told = {pid: process_id for process_id, pid in connected.items()}
        rest = [p.process for p in probed if p.process.process_id not in connected]
        joined = told | join(set(seen) - told.keys(), rest, self._hosts.look_up)
        return {process_id: pid for pid, process_id in joined.items()}

    def _peer_pid(self, attached: Attached) -> int | None:
        """None: the kernel does not tell, or it has become another process's."""
        peer = attached.peer
        if peer is None or peer.host is None:
            return None
        host = self._hosts.look_up(peer.host.pid)
        return host.pid if host is not None and host.started_us == peer.host.started_us else None

    def _host(self, process: Process, pid: int | None) -> HostProcess | None:
        """A process with a probe as /proc has it: by its pid, or by its own view of that where it can only be the same."""
        if pid is not None:
            return self._hosts.look_up(pid)
        host = self._hosts.look_up(process.pid) if process.host == self._host_name else None
        return host if host is not None and is_same(host, process) else None

    def _owner(self, host: HostProcess | None, uuid: str, host_name: str | None = None) -> Owner | None:
        if self._owners is None or host is None:
            return None
        self._owned.add(host.pid)
        return self._owners.of(host, uuid, host_name)


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
