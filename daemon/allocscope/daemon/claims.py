"""What a process may say of itself: everything it sends is somebody else's claim, judged here before anybody believes it.

Pure. `WireError` says what cannot be, with a fixed word for the counter and a text for the process's log.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from allocscope.model.blocks import BlockMap
from allocscope.model.captures import Capture
from allocscope.model.events import Event
from allocscope.model.identity import AllocatorRef, Process
from allocscope.model.sample import SampleChunk
from allocscope.model.wire import WireError
from allocscope.proto.v1 import block_map_pb2, identity_pb2, sample_pb2

if TYPE_CHECKING:
    from allocscope.daemon.peers import Peer

LARGEST_DEVICE_INDEX = 1023
MOST_DEVICES = 256
MOST_SAMPLES = 8192
"""In one chunk; a probe sends a few hundred at most."""
MOST_GROUPS = 4096
MOST_SIZE_CLASSES, MOST_SIZE_CLASSES_OF_MAP = 512, 32_768
LONGEST_NAME = 256
LONGEST_CONF = 4096
LARGEST_HELLO_BYTES = 12 << 10
"""On the wire, with what only a newer version knows: every batch describes every process, and must fit into one message."""
LONGEST_MESSAGE = 16384
LARGEST_WORLD = 1 << 22
LARGEST_DEVICE_BYTES = 1 << 46
"""64 TiB: no device has as much, so a claim of more is a sentinel or a lie."""
SLACK_BYTES = 64 << 20
"""Figures that are read one after the other, or by different means, may disagree by a segment or so."""

ON_DEVICE = (
    "allocated_bytes",
    "active_bytes",
    "requested_bytes",
    "reserved_bytes",
    "inactive_split_bytes",
    "reserved_peak_bytes",
    "private_pools_reserved_bytes",
    "device_free_bytes",
    "process_used_bytes",
)
"""Columns that cannot be more than the device has."""
RESERVED = ("allocated_bytes", "active_bytes", "inactive_split_bytes", "private_pools_reserved_bytes")
"""Columns that cannot be more than what is reserved."""


def check_size(message: identity_pb2.Process | sample_pb2.SampleChunk | block_map_pb2.BlockMap) -> None:
    """How much is in a message, before anything is made of it: a million things that hold nothing fit into 2 MiB."""
    match message:
        case identity_pb2.Process():
            if (size_bytes := message.ByteSize()) > LARGEST_HELLO_BYTES:
                raise WireError("too_long", f"a hello of {size_bytes} bytes (at most {LARGEST_HELLO_BYTES})")
        case sample_pb2.SampleChunk():
            if (samples := len(message.sequence)) > MOST_SAMPLES:
                raise WireError("too_many_samples", f"{samples} samples in one chunk (at most {MOST_SAMPLES})")
        case block_map_pb2.BlockMap():
            if (groups := len(message.groups)) > MOST_GROUPS:
                raise WireError("too_many_groups", f"{groups} groups in one block map (at most {MOST_GROUPS})")
            sizes = [[len(g.free_stranded), len(g.free_releasable), len(g.live)] for g in message.groups]
            if (classes := max(map(max, sizes), default=0)) > MOST_SIZE_CLASSES:
                text = f"{classes} size classes in one group (at most {MOST_SIZE_CLASSES})"
                raise WireError("too_many_classes", text)
            if (classes := sum(map(sum, sizes))) > MOST_SIZE_CLASSES_OF_MAP:
                text = f"{classes} size classes in one block map (at most {MOST_SIZE_CLASSES_OF_MAP})"
                raise WireError("too_many_classes", text)


def check_process(process: Process) -> None:
    """A hello."""
    if len(process.process_id) != 32 or set(process.process_id) - set("0123456789abcdef"):
        raise WireError("process_id", f"a process id is 32 hex digits, not {process.process_id[:64]!r}")
    named = {
        "job": process.job,
        "host": process.host,
        "program": process.program,
        "torch_version": process.torch_version,
    }
    for what, name in named.items():
        _check_text(what, name, LONGEST_NAME)
    _check_text("allocator_conf", process.allocator_conf, LONGEST_CONF)
    _check_range("rank", process.rank, LARGEST_WORLD)
    _check_range("world_size", process.world_size, LARGEST_WORLD)
    _check_range("local_rank", process.local_rank, LARGEST_WORLD)
    if len(process.devices) > MOST_DEVICES:
        raise WireError(
            "device_out_of_range", f"{len(process.devices)} devices in one process (at most {MOST_DEVICES})"
        )
    for device in process.devices:
        _check_text("device's uuid", device.uuid, LONGEST_NAME)
        _check_text("device's model", device.model, LONGEST_NAME)
        if device.index > LARGEST_DEVICE_INDEX:
            raise WireError("device_out_of_range", f"device index {device.index} (at most {LARGEST_DEVICE_INDEX})")
        for figure in (device.total_bytes, device.allowed_bytes):
            _check_range("device's memory", figure, LARGEST_DEVICE_BYTES)


def check_allocator(ref: AllocatorRef, process: Process) -> None:
    """Whose it is: the process's own, and on a device that it told of."""
    if ref.process_id != process.process_id:
        raise WireError(
            "foreign_process", f"process {process.process_id} sent figures of process {ref.process_id[:64]!r}"
        )
    if all(ref.device_uuid != device.uuid for device in process.devices):
        raise WireError(
            "unknown_device", f"device {ref.device_uuid[:64]!r} is in no hello of process {process.process_id}"
        )


def check_peer(process: Process, peer: Peer) -> None:
    """A hello against whose connection it came on. Where the kernel does not tell the process, its user stands for it.

    Its start is not looked at: the kernel's word is better, and a clock that was set would make liars of honest jobs.
    """
    own_pid = peer.own_pid
    if own_pid is not None and own_pid != process.pid:
        raise WireError("foreign_pid", f"a hello of pid {process.pid} on a connection of pid {own_pid}'s")


def check_chunk(chunk: SampleChunk, total_bytes: int | None) -> None:
    """Counters; `total_bytes` is the device's memory as the node knows it."""
    columns = chunk.columns
    claimed = max(columns.get("device_total_bytes", ()), default=0)
    total = LARGEST_DEVICE_BYTES if total_bytes is None else total_bytes + SLACK_BYTES
    if claimed > total:
        raise WireError("out_of_range", f"device_total_bytes is {claimed}, the device has {total_bytes} bytes")
    for name in ON_DEVICE:
        most = max(columns.get(name, ()), default=0)
        if most > total:
            raise WireError("out_of_range", f"{name} is {most}, the device has {total_bytes or total} bytes")
    _check_against_reserved(columns)


def _check_against_reserved(columns: Mapping[str, tuple[int, ...]]) -> None:
    reserved = columns.get("reserved_bytes")
    if not reserved:
        return
    for name in RESERVED:
        for part, whole in zip(columns.get(name, ()), reserved, strict=False):
            if part > whole + SLACK_BYTES:
                raise WireError("does_not_add_up", f"{name} is {part}, of {whole} reserved bytes")


def check_block_map(block_map: BlockMap, total_bytes: int | None) -> None:
    """A block map; each group adds up already (`allocscope.model.wire`)."""
    reserved = sum(group.reserved_bytes for group in block_map.groups)
    total = LARGEST_DEVICE_BYTES if total_bytes is None else total_bytes + SLACK_BYTES
    if reserved > total:
        raise WireError("out_of_range", f"a block map holds {reserved} bytes, the device has {total_bytes}")


def check_event(event: Event, process: Process) -> None:
    """An event."""
    if event.device_uuid is not None:
        check_allocator(AllocatorRef(event.process_id, event.device_uuid), process)
    elif event.process_id != process.process_id:
        raise WireError("foreign_process", f"process {process.process_id} sent an event of {event.process_id[:64]!r}")
    if event.message and len(event.message) > LONGEST_MESSAGE:
        raise WireError("too_long", f"an event's message has {len(event.message)} letters (at most {LONGEST_MESSAGE})")
    if event.message and "\0" in event.message:
        raise WireError("unprintable", "an event's message holds a NUL, which no database keeps")


def check_capture(capture: Capture) -> None:
    """What a note says of its capture. Its device may be one that the process does not have: who asked for that is told so."""
    if capture.problem and len(capture.problem) > LONGEST_MESSAGE:
        raise WireError(
            "too_long", f"a capture's problem has {len(capture.problem)} letters (at most {LONGEST_MESSAGE})"
        )
    if capture.problem and "\0" in capture.problem:
        raise WireError("unprintable", "a capture's problem holds a NUL, which no database keeps")
    _check_text("device's uuid", capture.device_uuid, LONGEST_NAME)


def _check_text(what: str, text: str | None, longest: int) -> None:
    if text is not None and len(text) > longest:
        raise WireError("too_long", f"a {what} of {len(text)} letters (at most {longest})")
    if text is not None and not text.isprintable():
        raise WireError("unprintable", f"a {what} with unprintable letters: {text[:64]!r}")


def _check_range(what: str, figure: int | None, most: int) -> None:
    if figure is not None and figure > most:
        raise WireError("out_of_range", f"{what} is {figure} (at most {most})")
