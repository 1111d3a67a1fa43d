"""What a process may say of itself: everything it sends is somebody else's claim, judged here before anybody believes it.

Pure. `WireError` says what cannot be, with a fixed word for the counter and a text for the process's log.
"""

from __future__ import annotations

from collections.abc import Mapping

from allocscope.model.blocks import BlockMap
from allocscope.model.events import Event
from allocscope.model.identity import AllocatorRef, Process
from allocscope.model.sample import SampleChunk
from allocscope.model.wire import WireError

LARGEST_DEVICE_INDEX = 1023
MOST_DEVICES = 256
MOST_SAMPLES = 8192
"""In one chunk; a probe sends a few hundred at most."""
MOST_GROUPS = 4096
MOST_SIZE_CLASSES = 512
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


def check_process(process: Process, size_bytes: int) -> None:
    """A hello, and how large it came."""
    if size_bytes > LARGEST_HELLO_BYTES:
        raise WireError("too_long", f"a hello of {size_bytes} bytes (at most {LARGEST_HELLO_BYTES})")
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


def check_chunk(chunk: SampleChunk, total_bytes: int | None) -> None:
    """Counters; `total_bytes` is the device's memory as the node knows it."""
    if len(chunk) > MOST_SAMPLES:
        raise WireError("too_many_samples", f"{len(chunk)} samples in one chunk (at most {MOST_SAMPLES})")
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
    if len(block_map.groups) > MOST_GROUPS:
        raise WireError("too_many_groups", f"{len(block_map.groups)} groups in one block map (at most {MOST_GROUPS})")
    reserved = sum(group.reserved_bytes for group in block_map.groups)
    total = LARGEST_DEVICE_BYTES if total_bytes is None else total_bytes + SLACK_BYTES
    if reserved > total:
        raise WireError("out_of_range", f"a block map holds {reserved} bytes, the device has {total_bytes}")
    for group in block_map.groups:
        classes = max(len(group.free_stranded), len(group.free_releasable), len(group.live))
        if classes > MOST_SIZE_CLASSES:
            raise WireError("too_many_classes", f"{classes} size classes in one group (at most {MOST_SIZE_CLASSES})")


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


def _check_text(what: str, text: str | None, longest: int) -> None:
    if text is not None and len(text) > longest:
        raise WireError("too_long", f"a {what} of {len(text)} letters (at most {longest})")
    if text is not None and not text.isprintable():
        raise WireError("unprintable", f"a {what} with unprintable letters: {text[:64]!r}")


def _check_range(what: str, figure: int | None, most: int) -> None:
    if figure is not None and figure > most:
        raise WireError("out_of_range", f"{what} is {figure} (at most {most})")
