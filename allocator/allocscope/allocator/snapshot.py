"""PyTorch's memory snapshots, read without running anything that they may ask for.

A snapshot (ALLOCATOR.md 7) is a pickle of plain values, often compressed. Here its bytes become a `Snapshot` of frozen
values. Its entries keep PyTorch's words.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from allocscope.allocator.errors import CutOffError, NotASnapshotError, SettingsError, TooLargeError
from allocscope.allocator.plain import load_plain
from allocscope.allocator.settings import AllocatorSettings, settings_of_snapshot

GZIP_MAGIC = b"\x1f\x8b"
UNPACKED_LIMIT_BYTES = 1 << 30
DEFAULT_POOL = (0, 0)


class TraceEntry(NamedTuple):
    """One entry of the allocator's own history."""

    action: str
    """alloc, free_requested, free_completed, segment_alloc, segment_free, segment_map, segment_unmap, oom, snapshot, …"""
    address: int
    """0 where the action has none."""
    size: int
    """alloc, free_*: as asked for; segment_*: real; oom: rounded."""
    stream: int
    time_us: int
    pool_id: tuple[int, int]
    """Of a private pool; (0, 0) is the default, and what PyTorch before 2.12 leaves out."""
    device_free: int | None
    """oom: free on the device then, bytes."""


@dataclass(frozen=True, slots=True)
class SnapshotBlock:
    """A block of a segment."""

    address: int
    size: int
    requested_size: int | None
    """None where PyTorch (before 2.0) does not tell; of an inactive block it means nothing."""
    state: str
    """active_allocated, active_pending_free, inactive."""


@dataclass(frozen=True, slots=True)
class SnapshotSegment:
    """A segment, or a mapped range of an expandable one."""

    device: int
    address: int
    total_size: int
    stream: int
    segment_type: str
    """small or large."""
    pool_id: tuple[int, int]
    is_expandable: bool
    blocks: tuple[SnapshotBlock, ...]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What torch.cuda.memory._snapshot() gave."""

    segments: tuple[SnapshotSegment, ...]
    traces: tuple[tuple[TraceEntry, ...], ...]
    """By device ordinal; oldest first."""
    settings: AllocatorSettings
    conf: str
    """The last PYTORCH_CUDA_ALLOC_CONF string that the process read."""


def read_snapshot(data: bytes, name: str, *, limit_bytes: int = UNPACKED_LIMIT_BYTES) -> Snapshot:
    """A snapshot from a file's bytes, compressed or not; `name` is what errors call it."""
    value = load_plain(unpack(data, name, limit_bytes) if data.startswith(GZIP_MAGIC) else data, name)
    if not isinstance(value, Mapping):
        raise NotASnapshotError(
            name, f"holds a {type(value).__name__}, not the dict that torch.cuda.memory._snapshot() gives"
        )
    for key in ("segments", "device_traces"):
        if not isinstance(value.get(key), list):
            raise NotASnapshotError(name, f"has no list {key!r}; was it made by torch.cuda.memory._snapshot()?")
    told = value.get("allocator_settings") or {}
    try:
        settings, conf = settings_of_snapshot(told), told.get("PYTORCH_CUDA_ALLOC_CONF") or ""
    except (SettingsError, AttributeError, TypeError, ValueError) as error:
        raise NotASnapshotError(name, f"allocator_settings are not as PyTorch writes them ({error})") from error
    return Snapshot(
        segments=_converted(_segment, value["segments"], "segments", name),
        traces=tuple(
            _converted(_entry, trace, f"device_traces[{device}]", name)
            for device, trace in enumerate(value["device_traces"])
        ),
        settings=settings,
        conf=conf,
    )


def unpack(data: bytes, name: str, limit_bytes: int = UNPACKED_LIMIT_BYTES) -> bytes:
    """Decompress a gzip file of one or more members, up to a limit."""
    if not data.startswith(GZIP_MAGIC):
        raise NotASnapshotError(name, "is not gzip")
    parts: list[bytes] = []
    left = limit_bytes
    while data.startswith(GZIP_MAGIC):
        member = zlib.decompressobj(wbits=31)
        try:
            part = member.decompress(data, left + 1)
        except zlib.error as error:
            raise NotASnapshotError(name, f"is damaged gzip ({error})") from error
        left -= len(part)
        if left < 0:
            raise TooLargeError(name, limit_bytes)
        if not member.eof:
            raise CutOffError(name, "its gzip ends in the middle")
        parts.append(part)
        data = member.unused_data
    return b"".join(parts)


def _converted(convert: Callable[[Any], Any], items: Any, where: str, name: str) -> tuple[Any, ...]:
    if not isinstance(items, Sequence):
        raise NotASnapshotError(name, f"{where} is a {type(items).__name__}, not a list")
    index = 0
    converted = []
    try:
        for index, item in enumerate(items):  # noqa: B007  the error says where
            converted.append(convert(item))
    except KeyError as error:
        raise NotASnapshotError(name, f"{where}[{index}] has no {error}") from error
    except (TypeError, ValueError, AttributeError) as error:
        raise NotASnapshotError(name, f"{where}[{index}] is not as PyTorch writes it ({error})") from error
    return tuple(converted)


def _entry(told: Mapping[str, Any]) -> TraceEntry:
    get = told.get
    action, address, size, stream = told["action"], get("addr", 0), told["size"], told["stream"]
    time_us, pool_id, free = get("time_us", 0), get("pool_id", DEFAULT_POOL), get("device_free")
    if type(action) is not str:
        raise TypeError("its action is not a string")
    if not (
        type(address) is type(size) is type(stream) is type(time_us) is int and (free is None or type(free) is int)
    ):
        raise TypeError("a number is not an integer")
    if address < 0 or size < 0:
        raise ValueError("an address or a size is below 0")
    if pool_id != DEFAULT_POOL:
        pool_id = _pool_id(pool_id)
    return _new_entry(TraceEntry, (action, address, size, stream, time_us, pool_id, free))


_new_entry: Callable[..., TraceEntry] = tuple.__new__


def _segment(told: Mapping[str, Any]) -> SnapshotSegment:
    address = _int(told["address"])
    blocks = []
    at = address
    for block in told["blocks"]:
        at = _int(block.get("address", at))
        size = _int(block["size"])
        requested = block.get("requested_size")
        blocks.append(SnapshotBlock(at, size, None if requested is None else _int(requested), _str(block["state"])))
        at += size
    return SnapshotSegment(
        device=_int(told.get("device", 0)),
        address=address,
        total_size=_int(told["total_size"]),
        stream=_int(told["stream"]),
        segment_type=_str(told["segment_type"]),
        pool_id=_pool_id(told.get("segment_pool_id", DEFAULT_POOL)),
        is_expandable=bool(told.get("is_expandable", False)),
        blocks=tuple(blocks),
    )


def _int(value: Any) -> int:
    if type(value) is not int:
        raise TypeError(f"a {type(value).__name__} is where an integer should be")
    return value


def _str(value: Any) -> str:
    if type(value) is not str:
        raise TypeError(f"a {type(value).__name__} is where a string should be")
    return value


def _pool_id(value: Any) -> tuple[int, int]:
    first, second = value
    return _int(first), _int(second)
