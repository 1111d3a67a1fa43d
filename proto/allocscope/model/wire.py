"""The one conversion between the words (`allocscope.model`) and the wire (`allocscope.proto.v1`).

What comes off the wire is somebody else's claim: `WireError` says what in it cannot be, and nothing half-read is returned.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import fields
from itertools import chain
from operator import attrgetter
from typing import Any, TypeVar

from allocscope.model.bill import BillEntry, DeviceBill, Line
from allocscope.model.blocks import BlockGroup, BlockMap, Pool, PrivatePool, SizeClass
from allocscope.model.captures import Capture, CaptureNote, CaptureReason
from allocscope.model.events import Event, EventKind
from allocscope.model.identity import AllocatorRef, Device, Process
from allocscope.model.node import DeviceProcess, DeviceReading, Owner
from allocscope.model.orders import CaptureOrder, Intervals, Order
from allocscope.model.sample import COLUMNS, SampleChunk
from allocscope.proto.v1 import (
    block_map_pb2,
    capture_pb2,
    device_pb2,
    event_pb2,
    identity_pb2,
    orders_pb2,
    sample_pb2,
)

_Value = TypeVar("_Value")

LARGEST_STORED = 2**63 - 1
"""Databases hold signed 64-bit integers; a larger figure (a driver's N/A sentinel, a lie) is refused."""


class WireError(ValueError):
    """A message says what cannot be. `reason` is a fixed word for counters, the text is for people."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


# identity


def device_to_wire(device: Device) -> identity_pb2.Device:
    return identity_pb2.Device(**_known(device))


def device_from_wire(message: identity_pb2.Device) -> Device:
    if not message.uuid:
        raise WireError(
            "no_uuid",
            "a device has no UUID: devices are known by UUID (`nvidia-smi -L` lists them)",
        )
    return Device(**_present(message, Device))


def process_to_wire(process: Process) -> identity_pb2.Process:
    return identity_pb2.Process(**{**_known(process), "devices": [device_to_wire(d) for d in process.devices]})


def process_from_wire(message: identity_pb2.Process) -> Process:
    if not message.process_id or not message.job:
        raise WireError(
            "unnamed_process",
            f"a process without an id or a job's name (id {message.process_id!r}, job {message.job!r})",
        )
    if message.HasField("world_size") and message.HasField("rank") and message.rank >= message.world_size:
        raise WireError(
            "rank_out_of_range",
            f"job {message.job!r}: rank {message.rank} of a world of {message.world_size} (ranks count from 0)",
        )
    return Process(
        **{
            **_present(message, Process),
            "devices": tuple(device_from_wire(d) for d in message.devices),
        }
    )


def ref_to_wire(ref: AllocatorRef) -> identity_pb2.AllocatorRef:
    return identity_pb2.AllocatorRef(process_id=ref.process_id, device_uuid=ref.device_uuid)


def ref_from_wire(message: identity_pb2.AllocatorRef) -> AllocatorRef:
    if not message.process_id or not message.device_uuid:
        raise WireError(
            "unnamed_allocator",
            f"an allocator without a process or device (process {message.process_id!r}, device {message.device_uuid!r})",
        )
    return AllocatorRef(message.process_id, message.device_uuid)


# samples


def chunk_to_wire(chunk: SampleChunk) -> sample_pb2.SampleChunk:
    return sample_pb2.SampleChunk(
        allocator=ref_to_wire(chunk.allocator),
        sequence=chunk.sequence,
        time_us=chunk.time_us,
        **chunk.columns,
    )


_COLUMN_NAMES = ("time_us", *COLUMNS)
_columns_of = attrgetter(*_COLUMN_NAMES)


def chunk_from_wire(message: sample_pb2.SampleChunk) -> SampleChunk:
    ref = ref_from_wire(message.allocator)
    sequence = tuple(message.sequence[:])
    length = len(sequence)
    # A slice comes out of protobuf several times as fast as an iteration; a live daemon's chunks hold one sample each.
    found = [tuple(column[:]) for column in _columns_of(message)]
    columns = {name: column for name, column in zip(_COLUMN_NAMES, found) if column}  # noqa: B905 (one is made of the other)
    for name, column in columns.items():
        if len(column) != length:
            raise _column_length(name, len(column), length, ref)
    if length and "time_us" not in columns:
        raise _column_length("time_us", 0, length, ref)
    if columns and max(chain.from_iterable(columns.values())) > LARGEST_STORED:
        name, column = max(columns.items(), key=lambda item: max(item[1]))
        raise WireError(
            "out_of_range",
            f"column {name} holds {max(column)}, beyond 2^63-1, from process {ref.process_id}",
        )
    if sequence and (sequence[0] < 1 or sequence[-1] > LARGEST_STORED or not _rising(sequence)):
        raise WireError(
            "sequence",
            f"the samples of process {ref.process_id} are not numbered upwards from 1",
        )
    return SampleChunk(ref, sequence, columns.pop("time_us", ()), columns)


def _rising(numbers: tuple[int, ...]) -> bool:
    return len(numbers) == 1 or (len(set(numbers)) == len(numbers) and sorted(numbers) == list(numbers))


def _column_length(name: str, found: int, length: int, ref: AllocatorRef) -> WireError:
    return WireError(
        "column_length",
        f"column {name} has {found} entries for {length} samples of process {ref.process_id}",
    )


# block maps


def block_map_to_wire(ref: AllocatorRef, block_map: BlockMap) -> block_map_pb2.BlockMap:
    return block_map_pb2.BlockMap(
        allocator=ref_to_wire(ref),
        sequence=block_map.sequence,
        time_us=block_map.time_us,
        call_us=block_map.call_us,
        groups=[_group_to_wire(group) for group in block_map.groups],
    )


def block_map_from_wire(
    message: block_map_pb2.BlockMap,
) -> tuple[AllocatorRef, BlockMap]:
    ref = ref_from_wire(message.allocator)
    if not 1 <= message.sequence <= LARGEST_STORED:
        raise WireError(
            "sequence",
            f"a block map of process {ref.process_id} is numbered {message.sequence}",
        )
    groups = tuple(_group_from_wire(group) for group in message.groups)
    return ref, BlockMap(**{**_present(message, BlockMap), "groups": groups})


_POOL_TO_WIRE = {
    Pool.SMALL: block_map_pb2.POOL_SMALL,
    Pool.LARGE: block_map_pb2.POOL_LARGE,
}
_POOL_FROM_WIRE = {wire: pool for pool, wire in _POOL_TO_WIRE.items()}
_CLASSES = ("free_stranded", "free_releasable", "live")


def _group_to_wire(group: BlockGroup) -> block_map_pb2.BlockGroup:
    given = _known(group)
    given["pool"] = _POOL_TO_WIRE[group.pool]
    if group.private_pool is not None:
        given["private_pool"] = block_map_pb2.PrivatePool(
            first=group.private_pool.first, second=group.private_pool.second
        )
    for name in _CLASSES:
        given[name] = [block_map_pb2.SizeClass(**_known(c)) for c in given[name]]
    return block_map_pb2.BlockGroup(**given)


def _group_from_wire(message: block_map_pb2.BlockGroup) -> BlockGroup:
    given = _present(message, BlockGroup)
    if message.pool not in _POOL_FROM_WIRE:
        raise WireError(
            "unknown_pool",
            f"a block group of pool {message.pool}: neither small nor large",
        )
    given["pool"] = _POOL_FROM_WIRE[message.pool]
    private = message.private_pool if message.HasField("private_pool") else None
    given["private_pool"] = PrivatePool(private.first, private.second) if private is not None else None
    for name in _CLASSES:
        given[name] = tuple(
            SizeClass(c.at_least_bytes, c.count, c.bytes, c.largest_bytes) for c in getattr(message, name)
        )
    for name in ("requested_bytes", "rounding_bytes"):
        given.setdefault(name, None)
    group = BlockGroup(**given)
    parts = (
        group.allocated_bytes
        + group.awaiting_free_bytes
        + group.stranded_bytes
        + group.releasable_bytes
        + group.private_bytes
    )
    if parts != group.reserved_bytes or group.reserved_bytes > LARGEST_STORED:
        raise WireError(
            "does_not_add_up",
            f"a block group's lines come to {parts} bytes, its segments to {group.reserved_bytes}",
        )
    live = (group.requested_bytes or 0) + (group.rounding_bytes or 0)
    known = group.requested_bytes is not None and group.rounding_bytes is not None
    if live > group.allocated_bytes or (known and live < group.allocated_bytes):
        raise WireError(
            "does_not_add_up",
            f"a block group's live blocks have {group.allocated_bytes} bytes, as asked for and rounded {live}",
        )
    return group


# events


_EVENT_TO_WIRE = {
    EventKind.OOM: event_pb2.EVENT_KIND_OOM,
    EventKind.STOPPED: event_pb2.EVENT_KIND_STOPPED,
    EventKind.DROPPED: event_pb2.EVENT_KIND_DROPPED,
}
_EVENT_FROM_WIRE = {wire: kind for kind, wire in _EVENT_TO_WIRE.items()}


def event_to_wire(event: Event) -> event_pb2.Event:
    return event_pb2.Event(**{**_known(event), "kind": _EVENT_TO_WIRE[event.kind]})


def event_from_wire(message: event_pb2.Event) -> Event:
    if message.kind not in _EVENT_FROM_WIRE:
        raise WireError(
            "unknown_event",
            f"an event of kind {message.kind} from process {message.process_id}",
        )
    if not message.process_id or not 1 <= message.sequence <= LARGEST_STORED:
        raise WireError(
            "sequence",
            f"an event of process {message.process_id!r} is numbered {message.sequence}",
        )
    return Event(**{**_present(message, Event), "kind": _EVENT_FROM_WIRE[message.kind]})


# devices


_LINE_TO_WIRE: dict[Line, device_pb2.Line.ValueType] = {
    line: device_pb2.Line.Value(f"LINE_{line.name}") for line in Line
}
_LINE_FROM_WIRE = {wire: line for line, wire in _LINE_TO_WIRE.items()}


def reading_to_wire(reading: DeviceReading) -> device_pb2.DeviceReading:
    given = _known(reading)
    given["device"] = device_to_wire(reading.device)
    given["processes"] = [_device_process_to_wire(p) for p in reading.processes]
    entries = reading.bill.entries if reading.bill else ()
    given["bill"] = [
        device_pb2.BillLine(
            line=_LINE_TO_WIRE[e.line],
            process_id=e.process_id,
            bytes=e.bytes,
            exact=e.exact,
        )
        for e in entries
    ]
    return device_pb2.DeviceReading(**given)


def reading_from_wire(message: device_pb2.DeviceReading) -> DeviceReading:
    given = _present(message, DeviceReading)
    device = given["device"] = device_from_wire(message.device)
    given["processes"] = tuple(map(_device_process_from_wire, message.processes))
    given["bill"] = _bill_from_wire(device, message.bill) if message.bill else None
    return DeviceReading(**given)


def _device_process_to_wire(process: DeviceProcess) -> device_pb2.DeviceProcess:
    owner = None if process.owner is None else device_pb2.Owner(**_known(process.owner))
    return device_pb2.DeviceProcess(**{**_known(process), "owner": owner})


def _device_process_from_wire(message: device_pb2.DeviceProcess) -> DeviceProcess:
    owner = Owner(**_present(message.owner, Owner)) if message.HasField("owner") else None
    return DeviceProcess(**_present(message, DeviceProcess), owner=owner)


def _bill_from_wire(device: Device, lines: Iterable[device_pb2.BillLine]) -> DeviceBill:
    entries = []
    for line in lines:
        if line.line not in _LINE_FROM_WIRE:
            raise WireError("unknown_line", f"a bill of device {device.uuid} has a line {line.line}")
        entries.append(
            BillEntry(
                _LINE_FROM_WIRE[line.line],
                line.bytes,
                line.exact,
                line.process_id if line.HasField("process_id") else None,
            )
        )
    total = sum(e.bytes for e in entries)
    if total != device.total_bytes:
        raise WireError(
            "does_not_add_up",
            f"the bill of device {device.uuid} comes to {total} bytes, the device has {device.total_bytes}",
        )
    return DeviceBill(total, tuple(entries))


# captures


_REASON_TO_WIRE: dict[CaptureReason, capture_pb2.CaptureReason.ValueType] = {
    reason: capture_pb2.CaptureReason.Value(f"CAPTURE_REASON_{reason.name}") for reason in CaptureReason
}
_REASON_FROM_WIRE = {wire: reason for reason, wire in _REASON_TO_WIRE.items()}


def capture_to_wire(capture: Capture) -> capture_pb2.Capture:
    return capture_pb2.Capture(**{**_known(capture), "reason": _REASON_TO_WIRE[capture.reason]})


def capture_from_wire(message: capture_pb2.Capture) -> Capture:
    _check_capture_id(message.capture_id)
    if not message.process_id:
        raise WireError("unknown_process", f"capture {message.capture_id} names no process")
    if message.reason not in _REASON_FROM_WIRE:
        raise WireError("unknown_reason", f"capture {message.capture_id} was taken for reason {message.reason}")
    return Capture(**{**_present(message, Capture), "reason": _REASON_FROM_WIRE[message.reason]})


def note_to_wire(note: CaptureNote) -> capture_pb2.CaptureNote:
    message = capture_pb2.CaptureNote(capture=capture_to_wire(note.capture), process=process_to_wire(note.process))
    device_uuid = note.capture.device_uuid
    if note.samples is not None:
        message.samples.CopyFrom(chunk_to_wire(note.samples))
    if note.block_map is not None and device_uuid is not None:
        ref = AllocatorRef(note.process.process_id, device_uuid)
        message.block_map.CopyFrom(block_map_to_wire(ref, note.block_map))
    if note.event is not None:
        message.event.CopyFrom(event_to_wire(note.event))
    return message


def note_from_wire(message: capture_pb2.CaptureNote) -> CaptureNote:
    """A note of one process: what it says of another one is refused."""
    process, capture = process_from_wire(message.process), capture_from_wire(message.capture)
    samples = chunk_from_wire(message.samples) if message.HasField("samples") else None
    ref, block_map = block_map_from_wire(message.block_map) if message.HasField("block_map") else (None, None)
    event = event_from_wire(message.event) if message.HasField("event") else None
    sampled = samples.allocator if samples is not None else None
    named = {capture.process_id, *(each.process_id for each in (sampled, ref, event) if each is not None)}
    if named != {process.process_id}:
        raise WireError("foreign_process", f"a note of process {process.process_id} speaks of {sorted(named)}")
    return CaptureNote(capture, process, samples, block_map, event)


def _check_capture_id(capture_id: str) -> None:
    if re.fullmatch("[0-9a-f]{32}", capture_id) is None:
        raise WireError("capture_id", f"a capture is named {capture_id!r}: 32 hex digits are expected")


# orders


def order_to_wire(order: Order) -> orders_pb2.Order:
    if isinstance(order, Intervals):
        return orders_pb2.Order(intervals=orders_pb2.Intervals(**_known(order)))
    given = {**_known(order), "reason": _REASON_TO_WIRE[order.reason]}
    return orders_pb2.Order(capture=orders_pb2.CaptureOrder(**given))


def order_from_wire(message: orders_pb2.Order) -> Order | None:
    """None: an order that this version does not know."""
    which = message.WhichOneof("order")
    if which == "intervals":
        return Intervals(**_present(message.intervals, Intervals))
    if which == "capture":
        _check_capture_id(message.capture.capture_id)
        reason = _REASON_FROM_WIRE.get(message.capture.reason, CaptureReason.ASKED)
        return CaptureOrder(**{**_present(message.capture, CaptureOrder), "reason": reason})
    return None


# a message and a value share their fields' names


def _known(value: Any) -> dict[str, Any]:
    """A dataclass's fields that are known, by name."""
    return {f.name: v for f in fields(value) if (v := getattr(value, f.name)) is not None}


def _present(message: Any, into: type[_Value]) -> dict[str, Any]:
    """A message's plain fields by name, without those that are optional and absent."""
    found: dict[str, Any] = {}
    for field in fields(into):  # type: ignore[arg-type]
        value = getattr(message, field.name)
        if not isinstance(value, (int, str)):  # messages and repeated fields are the caller's
            continue
        if message.DESCRIPTOR.fields_by_name[field.name].has_presence and not message.HasField(field.name):
            continue
        if isinstance(value, int) and value > LARGEST_STORED:
            raise WireError(
                "out_of_range",
                f"{type(message).__name__}.{field.name} holds {value}, beyond 2^63-1",
            )
        found[field.name] = value
    return found
