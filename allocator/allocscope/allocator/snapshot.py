"""PyTorch's memory snapshots, read without running anything that they may ask for.

A snapshot (ALLOCATOR.md 7) is a pickle of plain values, or JSON, often compressed. Here its bytes become a `Snapshot` of
frozen values. Its entries keep PyTorch's words. What is read: what torch.cuda.memory._snapshot(), memory_snapshot() and
_dump_snapshot() of PyTorch 1.13 to 2.14 give, and what later ones add is passed over.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from operator import itemgetter
from typing import Any, NamedTuple

from allocscope.allocator.errors import CutOffError, NotASnapshotError, SettingsError, TooLargeError
from allocscope.allocator.plain import PIECE_BYTES, PROTOCOL, load_plain, pieces
from allocscope.allocator.settings import SMALL_SEGMENT_BYTES, AllocatorSettings, settings_of_snapshot

GZIP_MAGIC = b"\x1f\x8b"
UNPACKED_LIMIT_BYTES = 1 << 30
DEFAULT_POOL = (0, 0)
LIVE, AWAITING, INACTIVE = "active_allocated", "active_pending_free", "inactive"
_NO_LARGER = 1 << 64
_JSON_LIMIT_BYTES = 1 << 31
"""How much the values of a JSON file may take, by a rough count: what is short in the file may be large in memory."""
_BOM = b"\xef\xbb\xbf"
_ZIP_MAGIC = b"PK\x03\x04"

Source = Callable[[], Iterable[bytes]]
"""A file's bytes in pieces, from the beginning, each time that it is called."""


class Frame(NamedTuple):
    """A line of a recorded allocation stack."""

    name: str
    filename: str
    line: int


class Stack:
    """A recorded stack, innermost frame first, as PyTorch wrote it."""

    __slots__ = ("_told",)

    def __init__(self, told: Sequence[Any]) -> None:
        self._told = told

    @property
    def lacks_frames(self) -> bool:
        """Whether frames in it are empty."""
        return {} in self._told

    @property
    def frames(self) -> tuple[Frame, ...]:
        """The frames; what is none is left out."""
        return tuple(
            frame for item in self._told if (frame := item if type(item) is Frame else _frame(item)) is not None
        )


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
    """0: not told (PyTorch before 2.2)."""
    pool_id: tuple[int, int]
    """Of a private pool; (0, 0) is the default, and what PyTorch before 2.12 leaves out."""
    device_free: int | None
    """oom: free on the device then, bytes."""
    told_frames: Sequence[Any] | None = None
    """The stack as PyTorch wrote it (see `stack`); None: not recorded."""

    @property
    def stack(self) -> Stack | None:
        """Where it was asked for, if that was recorded."""
        return Stack(self.told_frames) if self.told_frames else None


@dataclass(frozen=True, slots=True)
class SnapshotBlock:
    """A block of a segment."""

    address: int
    """Where PyTorch (1.13) does not tell, counted from the segment's."""
    size: int
    requested_size: int | None
    """None where PyTorch (before 2.0) does not tell; of an inactive block it means nothing."""
    state: str
    """active_allocated, active_pending_free, inactive."""
    stack: Stack | None = field(default=None, compare=False)
    """Where it was allocated, if that was recorded."""


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
    allocated_size: int | None = field(default=None, compare=False)
    """What PyTorch says of the blocks itself; None: it does not. So are the next two."""
    active_size: int | None = field(default=None, compare=False)
    requested_size: int | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What torch.cuda.memory._snapshot() gave."""

    segments: tuple[SnapshotSegment, ...]
    traces: tuple[tuple[TraceEntry, ...], ...]
    """By device ordinal; oldest first. Empty where there is no history (memory_snapshot())."""
    settings: AllocatorSettings
    conf: str
    """The last PYTORCH_CUDA_ALLOC_CONF string that the process read."""
    told_settings: Mapping[str, Any] | None = None
    """allocator_settings as PyTorch (from 2.1 on) wrote it; None: it did not."""
    settings_problem: str | None = None
    """Why `settings` are the defaults and not what was told."""
    host_segments: tuple[int, ...] = ()
    """Sizes of pinned host memory's segments (PyTorch from 2.14 on); no part of any device."""
    capture: Mapping[str, Any] | None = None
    """What a capture of Allocscope says beside PyTorch's own, as it says it: whose it is, who holds the tensors; None: it is none."""
    more: tuple[str, ...] = ()
    """Names of what else the snapshot holds."""


def read_snapshot(
    data: bytes | Source, name: str, *, limit_bytes: int = UNPACKED_LIMIT_BYTES, tolerant: bool = False
) -> Snapshot:
    """A snapshot from a file's bytes, whatever its form; `name` is what errors call it.

    PyTorch 1.13 to 2.14: pickles of protocol 2 to 5, JSON, either compressed by gzip or not, holding the dict of _snapshot() or the bare list of
    memory_snapshot(). A file given as a `Source` is read in pieces and never lies in memory whole (JSON does). `limit_bytes`
    bounds what it unpacks to. With `tolerant`, settings that cannot be read are told in `settings_problem`.

    Raises CutOffError, HostilePickleError, TooLargeError, NotASnapshotError.
    """
    source = partial(pieces, data) if isinstance(data, bytes) else data

    def unpacked() -> Iterator[bytes]:
        return _unpacked(source(), name, limit_bytes)

    start = next((piece for piece in unpacked() if piece), b"")
    if not start.startswith(PROTOCOL) and start.removeprefix(_BOM).lstrip()[:1] in (b"{", b"["):
        return _snapshot(_load_json(b"".join(unpacked()), name), name, tolerant=tolerant)
    if start.startswith(_ZIP_MAGIC):
        raise NotASnapshotError(name, "is a zip file, as torch.save() makes; dump the snapshot by pickle instead")
    return _read_pickle(unpacked, name, tolerant=tolerant)


def _read_pickle(unpacked: Source, name: str, *, tolerant: bool) -> Snapshot:
    """The same of a pickle: the way that takes little memory first, the one that works with every pickle last."""
    compaction = _Compaction(name)
    try:
        read = _snapshot(load_plain(unpacked(), name, on_list=compaction.on_list), name, tolerant=tolerant)
        if not (compaction.emptied_frames and _lack_frames(read.segments)):
            return read
    except NotASnapshotError:
        pass  # damaged; or a dict occurs twice that was emptied when it first did
    careful = _Compaction(name, empties=False)
    return _snapshot(load_plain(unpacked(), name, on_list=careful.on_list), name, tolerant=tolerant)


def _lack_frames(segments: Iterable[SnapshotSegment]) -> bool:
    return any(block.stack.lacks_frames for segment in segments for block in segment.blocks if block.stack)


def _snapshot(value: Any, name: str, *, tolerant: bool) -> Snapshot:
    if isinstance(value, list):
        value = {"segments": value}
    if not isinstance(value, Mapping):
        raise NotASnapshotError(
            name, f"holds a {type(value).__name__}, not the dict that torch.cuda.memory._dump_snapshot() writes"
        )
    segments, traces = value.get("segments"), value.get("device_traces", [])
    for key, told in (("segments", segments), ("device_traces", traces)):
        if not isinstance(told, list):
            raise NotASnapshotError(name, f"has no list {key!r}; was it made by torch.cuda.memory._dump_snapshot()?")
    told_settings = value.get("allocator_settings")
    settings, conf, problem = _settings(told_settings)
    if problem and not tolerant:
        raise NotASnapshotError(name, f"allocator_settings are not as PyTorch writes them ({problem})")
    return Snapshot(
        segments=_converted(_segment, segments, "segments", name),
        traces=tuple(
            _converted(_entry, trace, f"device_traces[{device}]", name) for device, trace in enumerate(traces)
        ),
        settings=settings,
        conf=conf,
        told_settings=told_settings if isinstance(told_settings, Mapping) else None,
        settings_problem=problem,
        host_segments=_host_segments(value.get("host_segments")),
        capture=capture if isinstance(capture := value.get(_OURS), Mapping) else None,
        more=tuple(str(key) for key in value if key not in _KNOWN_KEYS),
    )


_OURS = "allocscope"
"""The one key that a capture adds to PyTorch's own."""
_KNOWN_KEYS = frozenset(
    ("segments", "device_traces", "allocator_settings", "external_annotations", "host_segments", "host_traces", _OURS)
)


# from a file's bytes to plain values


def _load_json(data: bytes, name: str) -> Any:
    containers, items = data.count(b"[") + data.count(b"{"), data.count(b",")
    text_bytes = len(data) if data.isascii() else 4 * len(data)
    if text_bytes + 64 * containers + 40 * items > _JSON_LIMIT_BYTES:
        raise TooLargeError(name, _JSON_LIMIT_BYTES)
    try:
        return json.loads(data, object_hook=_Compaction(name).one)
    except (ValueError, RecursionError) as error:
        raise NotASnapshotError(name, f"is neither a pickle nor JSON ({error})") from error


def unpack(data: bytes, name: str, limit_bytes: int = UNPACKED_LIMIT_BYTES) -> bytes:
    """Decompress a gzip file of one or more members, up to a limit in bytes.

    Raises CutOffError, TooLargeError, NotASnapshotError.
    """
    if not data.startswith(GZIP_MAGIC):
        raise NotASnapshotError(name, "is not gzip")
    return b"".join(_unpacked(pieces(data), name, limit_bytes))


def _unpacked(packed: Iterable[bytes], name: str, limit_bytes: int) -> Iterator[bytes]:
    """The file in pieces, decompressed where the first says that they are gzip."""
    left = limit_bytes
    for piece in _gunzipped(iter(packed), name):
        left -= len(piece)
        if left < 0:
            raise TooLargeError(name, limit_bytes)
        yield piece


def _sliced(data: bytes, packed: Iterator[bytes]) -> Iterator[bytes]:
    """The same in slices: what follows a member is copied at its end, and there may be many members."""
    for piece in chain((data,), packed):
        yield from (piece[at : at + _SLICE_BYTES] for at in range(0, len(piece), _SLICE_BYTES))


_SLICE_BYTES = 1 << 14


def _gunzipped(packed: Iterator[bytes], name: str) -> Iterator[bytes]:
    data = next(packed, b"")
    while 0 < len(data) < len(GZIP_MAGIC) and (more := next(packed, b"")):
        data += more
    if not data.startswith(GZIP_MAGIC):
        yield data
        yield from packed
        return
    packed = _sliced(data, packed)
    data = next(packed)
    while data.startswith(GZIP_MAGIC):
        member = zlib.decompressobj(wbits=31)
        while True:
            try:
                piece = member.decompress(data, PIECE_BYTES)
            except zlib.error as error:
                raise NotASnapshotError(name, f"is damaged gzip ({error})") from error
            yield piece
            if member.eof:
                break
            data = member.unconsumed_tail
            if not data and not piece and not (data := next(packed, b"")):
                raise CutOffError(name, "its gzip ends in the middle")
        data = member.unused_data
        while len(data) < len(GZIP_MAGIC) and (more := next(packed, b"")):
            data += more


# what would take most of the memory is made small while the rest is still being read


class _Compaction:
    """Turns dicts that are many into values that are small, and equal ones into one."""

    def __init__(self, name: str, *, empties: bool = True) -> None:
        """With `empties` it empties the dicts that it took what they said from."""
        self._name, self._empties = name, empties
        self._frames: dict[tuple[Any, ...], Frame] = {}
        self._frames_are_many: bool | None = None if empties else False
        """Whether each frame is written out wherever it occurs (PyTorch's own pickles have each once); None: not known yet."""
        self.emptied_frames = False
        self._pools: dict[tuple[Any, ...], tuple[int, int]] = {DEFAULT_POOL: DEFAULT_POOL}
        self._seen: dict[int, int] = {}

    def on_list(self, items: list[Any]) -> int:
        """The entries or frames that were added last to a list, in place: how many dicts became small.

        What is none, or not as PyTorch writes it, is left as it is.
        """
        last = items[-1]
        if type(last) is not dict:
            return 0
        convert: Callable[[list[dict[str, Any]]], Sequence[TraceEntry | Frame] | None]
        if "action" in last:
            convert = self._entries
        elif self._frames_are_many and "filename" in last:
            convert = self._frames_of
            self.emptied_frames = True
        else:
            return 0
        start = self._seen_of(items)
        told = items[start:]
        small = convert(told)
        if small is None:
            return 0
        items[start:] = small
        if self._empties:
            for each in told:
                each.clear()
        return len(told)

    def one(self, told: dict[str, Any]) -> Any:
        """One dict of any kind, for a reader that tells of dicts only."""
        if "action" in told:
            small: Sequence[Any] | None = self._entries([told])
        elif "filename" in told:
            small = self._frames_of([told])
        else:
            small = None
        return small[0] if small else told

    def _seen_of(self, items: list[Any]) -> int:
        """How many of a list's items were there when it was last seen; of a short list none, which costs little.

        What is seen once more, or (another list in its place) not at all, is no harm: only time, or memory.
        """
        count = len(items)
        if count < _SHORT:
            return 0
        if len(self._seen) > _MANY_LISTS:
            self._seen.clear()
        seen = self._seen.get(id(items), 0)
        self._seen[id(items)] = count
        return seen if seen < count else 0

    def _frames_of(self, told: list[dict[str, Any]]) -> list[Frame] | None:
        if {} in told:
            raise NotASnapshotError(self._name, "has a frame in several places")
        try:
            keys = list(map(_FRAME_KEYS, told))
            for key in set(keys) - self._frames.keys():
                if tuple(map(type, key)) != (str, str, int) or not -_NO_LARGER < key[2] < _NO_LARGER:
                    return None
                self._frames[key] = Frame(*key)
            return list(map(self._frames.__getitem__, keys))
        except (KeyError, TypeError, IndexError):
            return None

    def _entries(self, told: list[dict[str, Any]]) -> list[TraceEntry] | None:
        """The entries, column by column; None where any of them is out of the ordinary."""
        try:
            actions, addresses, sizes, streams = zip(*map(_ORDINARY, told), strict=True)
            pools = self._pools_of([entry.get("pool_id", DEFAULT_POOL) for entry in told])
        except (KeyError, TypeError, ValueError):
            return None  # also what is no dict, as entries that were seen before
        if self._frames_are_many is None and (stacks := [entry["frames"] for entry in told if entry.get("frames")]):
            self._frames_are_many = _are_written_anew(stacks)
        times = [entry.get("time_us", 0) for entry in told]
        numbers = (addresses, sizes, streams, times)
        if set(map(type, actions)) != {str} or any(set(map(type, column)) != {int} for column in numbers):
            return None
        if min(addresses) < 0 or min(sizes) < 0 or any("device_free" in entry for entry in told):
            return None
        frees = (None,) * len(told)
        frames = [entry.get("frames") for entry in told]
        if not set(map(type, frames)) <= {list, type(None)}:
            return None
        if self.emptied_frames and any(stack and type(stack[-1]) is dict and {} in stack for stack in frames):
            raise NotASnapshotError(self._name, "has a frame in several places")
        columns = zip(actions, addresses, sizes, streams, times, pools, frees, frames, strict=True)
        return list(map(_new_entry, columns))

    def _pools_of(self, told: list[Any]) -> list[tuple[int, int]]:
        keys = told if set(map(type, told)) == {tuple} else list(map(tuple, told))
        for key in set(keys) - self._pools.keys():
            self._pools[key] = _pool_id(key)
        return list(map(self._pools.__getitem__, keys))


def _are_written_anew(stacks: list[Any]) -> bool:
    """Whether these stacks have several dicts for the same frame."""
    dicts = {id(item): item for stack in stacks[:_LOOKED_AT] if type(stack) is list for item in stack}
    return len(dicts) > 4 * len(set(map(_frame, dicts.values()))) + _LOOKED_AT


_LOOKED_AT = 100
_SHORT, _MANY_LISTS = 64, 10_000
_FRAME_KEYS = itemgetter("name", "filename", "line")
_ORDINARY = itemgetter("action", "addr", "size", "stream")


def _frame(told: Any) -> Frame | None:
    try:
        name, filename, line = told["name"], told["filename"], told["line"]
    except (KeyError, TypeError, IndexError):
        return None
    if type(name) is not str or type(filename) is not str or type(line) is not int:
        return None
    if not -_NO_LARGER < line < _NO_LARGER:  # many such may all have one hash
        return None
    return Frame(name, filename, line)


# from plain values to ours


def _settings(told: Any) -> tuple[AllocatorSettings, str, str | None]:
    """Settings, the string they come from, and what is wrong with them."""
    if not told:
        return AllocatorSettings(), "", None
    try:
        return settings_of_snapshot(told), told.get("PYTORCH_CUDA_ALLOC_CONF") or "", None
    except (SettingsError, AttributeError, TypeError, ValueError) as error:
        conf = told.get("PYTORCH_CUDA_ALLOC_CONF") if isinstance(told, Mapping) else None
        return AllocatorSettings(), conf if type(conf) is str else "", str(error)


def _host_segments(told: Any) -> tuple[int, ...]:
    if not isinstance(told, list):
        return ()
    sizes = (item.get("total_size", item.get("size")) for item in told if isinstance(item, Mapping))
    return tuple(size for size in sizes if type(size) is int and size >= 0)


def _converted(convert: Callable[[Any], Any], items: Any, where: str, name: str) -> tuple[Any, ...]:
    if not isinstance(items, Sequence) or isinstance(items, (str, bytes)):
        raise NotASnapshotError(name, f"{where} is a {type(items).__name__}, not a list")
    index = 0
    converted = []
    try:
        for index, item in enumerate(items):  # noqa: B007  the error says where
            converted.append(item if type(item) is TraceEntry else convert(item))
    except KeyError as error:
        raise NotASnapshotError(name, f"{where}[{index}] has no {error}") from error
    except (TypeError, ValueError, AttributeError) as error:
        raise NotASnapshotError(name, f"{where}[{index}] is not as PyTorch writes it ({error})") from error
    return tuple(converted)


def _entry(told: Mapping[str, Any]) -> TraceEntry:
    action, get = _str(told["action"]), told.get
    known = action in _KNOWN_ACTIONS
    frames = get("frames")
    return TraceEntry(
        action=action,
        address=_size(get("addr") or 0),
        size=_size(told["size"] if known else get("size") or 0),
        stream=_int(told["stream"] if known else get("stream") or 0),
        time_us=_int(get("time_us", 0)),
        pool_id=_pool_id(get("pool_id", DEFAULT_POOL)),
        device_free=None if (free := get("device_free")) is None else _int(free),
        told_frames=frames if type(frames) is list else None,
    )


_KNOWN_ACTIONS = frozenset(
    (
        "alloc",
        "free_requested",
        "free_completed",
        "segment_alloc",
        "segment_free",
        "segment_map",
        "segment_unmap",
        "oom",
    )
)
_new_entry: Callable[[Iterable[Any]], TraceEntry] = partial(tuple.__new__, TraceEntry)


def _segment(told: Mapping[str, Any]) -> SnapshotSegment:
    total_size, get = _size(told["total_size"]), told.get
    address = _size(get("address") or 0)
    blocks = []
    at = address
    for block in told["blocks"]:
        at = _size(block.get("address", at))
        size = _size(block["size"])
        blocks.append(SnapshotBlock(at, size, _requested(block), _str(block["state"]), _stack_of(block)))
        at += size
    return SnapshotSegment(
        device=_size(get("device") or 0),
        address=address,
        total_size=total_size,
        stream=_int(get("stream") or 0),
        segment_type=_str(get("segment_type") or ("small" if total_size == SMALL_SEGMENT_BYTES else "large")),
        pool_id=_pool_id(get("segment_pool_id") or DEFAULT_POOL),
        is_expandable=bool(get("is_expandable", False)),
        blocks=tuple(blocks),
        allocated_size=_told_sum(get("allocated_size")),
        active_size=_told_sum(get("active_size")),
        requested_size=_told_sum(get("requested_size")),
    )


def _requested(block: Mapping[str, Any]) -> int | None:
    """As the block says, or (PyTorch 1.13) as the newest allocation in its history does."""
    told = block.get("requested_size")
    if told is None and (newest := _newest(block)) is not None:
        told = newest.get("real_size")
    return None if told is None else _size(told)


def _stack_of(block: Mapping[str, Any]) -> Stack | None:
    told = block.get("frames")
    if not told and (newest := _newest(block)) is not None:
        told = newest.get("frames")
    return Stack(told) if told and type(told) is list else None


def _newest(block: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Of the allocations that PyTorch 1.13 and 2.0 told for each block, the one that counts: the first."""
    history = block.get("history")
    newest = history[0] if history and type(history) is list else None
    return newest if isinstance(newest, Mapping) else None


def _told_sum(value: Any) -> int | None:
    return value if type(value) is int else None


def _int(value: Any) -> int:
    if type(value) is float and value.is_integer():  # as some writers of JSON have it
        value = int(value)
    if type(value) is not int:
        raise TypeError(f"a {type(value).__name__} is where an integer should be")
    if not -_NO_LARGER < value < _NO_LARGER:
        raise ValueError("a number is out of all bounds")
    return value


def _size(value: Any) -> int:
    if (size := _int(value)) < 0:
        raise ValueError("an address or a size is below 0")
    return size


def _str(value: Any) -> str:
    if type(value) is not str:
        raise TypeError(f"a {type(value).__name__} is where a string should be")
    return value


def _pool_id(value: Any) -> tuple[int, int]:
    first, second = value
    return _int(first), _int(second)
