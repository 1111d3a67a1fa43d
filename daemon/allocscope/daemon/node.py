"""What the node knows now: the processes that report, and the last that each allocator said. Bounded; nothing here waits."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from allocscope.allocator.errors import SettingsError
from allocscope.allocator.settings import AllocatorSettings, parse_settings
from allocscope.model.blocks import BlockMap
from allocscope.model.identity import Device, Process
from allocscope.model.sample import Sample
from allocscope.model.wire import WireError
from allocscope.proto.v1 import identity_pb2

if TYPE_CHECKING:
    from allocscope.daemon.peers import Peer

MOST_PROCESSES = 512
MOST_ALLOCATORS = 2048
"""Of all processes; each has its lines in every bill, and every bill must fit into one message."""
GONE_REMEMBERED = 256
"""Processes that are gone, and may be asked for all the same."""


@dataclass(slots=True)
class Allocator:
    """The last that one allocator said."""

    device: Device
    sample: Sample | None = None
    block_map: BlockMap | None = None


@dataclass(frozen=True, slots=True)
class Introduction:
    """A process's last hello."""

    process: Process
    message: identity_pb2.Process
    """As it came."""
    peer: Peer | None = None
    """Whose the connection was; None: not known."""


@dataclass(slots=True)
class Attached:
    """A process with a probe."""

    process: Process
    message: identity_pb2.Process
    """Its hello, as it goes on to the collector."""
    stream: object | None
    """Its stream; None: it broke, and may come again."""
    news_s: float
    """When it last said anything, by the daemon's clock."""
    seen: int = 0
    """The highest sequence that was taken."""
    stopped: bool = False
    """It said that it ends."""
    allocators: dict[str, Allocator] = field(default_factory=dict)
    """By device UUID."""
    settings: AllocatorSettings | None = None
    """In force in it; None: not known."""
    peer: Peer | None = None
    """Whose its connection is, or was last; None: not known."""

    @property
    def introduction(self) -> Introduction:
        """Its last hello."""
        return Introduction(self.process, self.message, self.peer)

    def introduce(self, process: Process, message: identity_pb2.Process) -> None:
        """A hello, the first or with one more device."""
        self.process, self.message = process, message
        self.settings = _settings(process.allocator_conf)
        known = self.allocators
        self.allocators = {d.uuid: known[d.uuid] if d.uuid in known else Allocator(d) for d in process.devices}


def _settings(conf: str | None) -> AllocatorSettings | None:
    try:
        return None if conf is None else parse_settings(conf)
    except SettingsError:  # a newer PyTorch may take what is not known here
        return None


class Node:
    """Who reports, and what they said last."""

    def __init__(self) -> None:
        self._attached: dict[str, Attached] = {}
        self._gone: OrderedDict[str, Introduction] = OrderedDict()

    def __len__(self) -> int:
        return len(self._attached)

    def __iter__(self) -> Iterator[Attached]:
        return iter(self._attached.values())

    def get(self, process_id: str) -> Attached | None:
        """The process, or None: it is not here, or no more."""
        return self._attached.get(process_id)

    def introduction(self, process_id: str) -> Introduction | None:
        """How a process introduced itself last, also one that is gone; None: it did not, or long ago."""
        attached = self._attached.get(process_id)
        return self._gone.get(process_id) if attached is None else attached.introduction

    def attach(
        self, process: Process, message: identity_pb2.Process, stream: object, now_s: float, peer: Peer | None = None
    ) -> Attached:
        """A hello on a stream, first or further; WireError: it cannot be who it says. None for `peer`: that is not known."""
        self._check_room(process)
        self._check_taken(process, peer)
        found = self._attached.get(process.process_id)
        if found is None:
            found = self._attached[process.process_id] = Attached(process, message, stream, now_s)
        found.stream, found.news_s, found.peer = stream, now_s, peer
        found.introduce(process, message)
        return found

    def _check_taken(self, process: Process, peer: Peer | None) -> None:
        """Also the id of one that is gone is nobody else's."""
        known = self.introduction(process.process_id)
        if known is None:
            return
        of = known.process
        if (of.pid, of.started_us) != (process.pid, process.started_us):
            text = f"process id {process.process_id} is that of pid {of.pid}, not of pid {process.pid}"
            raise WireError("process_id_taken", text)
        if known.peer is not None and peer is not None and not known.peer.may_be(peer):
            raise WireError("process_id_taken", f"process id {process.process_id} is that of another process")

    def _check_room(self, process: Process) -> None:
        others = [attached for attached in self if attached.process.process_id != process.process_id]
        if len(others) >= MOST_PROCESSES:
            raise WireError("too_many_processes", f"{MOST_PROCESSES} processes report on this node already")
        if sum(len(attached.allocators) for attached in others) + len(process.devices) > MOST_ALLOCATORS:
            raise WireError("too_many_allocators", f"more than {MOST_ALLOCATORS} allocators on this node")

    def detach(self, stream: object, now_s: float) -> None:
        """A stream ended."""
        for attached in self:
            if attached.stream is stream:
                attached.stream, attached.news_s = None, now_s

    def retire(
        self, now_s: float, *, gone_after_s: float, silent_after_s: float, is_alive: Callable[[Process], bool | None]
    ) -> list[Attached]:
        """Those that are gone, who are forgotten. `is_alive` says None where that cannot be told."""
        gone = []
        for attached in list(self):
            silent_s = now_s - attached.news_s
            if attached.stream is not None:
                is_gone = silent_s > silent_after_s
            else:
                is_gone = attached.stopped or silent_s > gone_after_s or is_alive(attached.process) is False
            if is_gone:
                gone.append(self._attached.pop(attached.process.process_id))
        self._remember(gone)
        return gone

    def _remember(self, gone: Iterable[Attached]) -> None:
        for attached in gone:
            self._gone[attached.process.process_id] = attached.introduction
            self._gone.move_to_end(attached.process.process_id)
        while len(self._gone) > GONE_REMEMBERED:
            self._gone.popitem(last=False)
