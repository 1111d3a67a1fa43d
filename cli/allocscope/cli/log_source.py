"""What `allocscope log` is given: a snapshot's history, a recording's, or a log's text."""

from __future__ import annotations

import errno
import gzip
import re
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from io import BufferedReader, BytesIO, RawIOBase
from pathlib import Path
from typing import Any, BinaryIO

from allocscope.allocator.chronicle.history import DeviceHistory
from allocscope.allocator.errors import AllocatorError, NotASnapshotError
from allocscope.allocator.plain import PROTOCOL
from allocscope.allocator.recording import SUFFIX, Recording, read_recording
from allocscope.allocator.snapshot import GZIP_MAGIC, UNPACKED_LIMIT_BYTES, TraceEntry, read_snapshot
from allocscope.cli.oom import NotALogError, text_of
from allocscope.cli.snapshot_file import PIECE_BYTES, is_pipe, snapshot_data

_HEAD_BYTES = 256
_JSON = re.compile(rb"(?:\xef\xbb\xbf)?\s*(?:\{|\[\s*[\{\]])")
"""How a snapshot in JSON begins; a log may begin with [INFO]."""
NOT_RECORDED = (
    "has no history; call torch.cuda.memory._record_memory_history() early, and _dump_snapshot() when the run is over"
)
WANTED = (
    "allocscope log wants a snapshot with its history (torch.cuda.memory._dump_snapshot(); see allocscope log --help), RUN.run.json, or a "
    "log with lines such as: Allocator: block 0x7f8c4a000000 (size 1024 MB) allocated to stream 0"
)


class LogError(AllocatorError):
    """FILE tells no history, or it cannot be read."""

    def __init__(self, file: str, problem: str) -> None:
        super().__init__(f"{file}: {problem}")
        self.file = file


@dataclass(frozen=True, slots=True)
class Recorded:
    """A recorded history of one or more devices."""

    devices: tuple[int, ...]
    traces: tuple[tuple[TraceEntry, ...], ...]
    open: Callable[[int], DeviceHistory]
    """Begin one of them, by its place among `devices`."""
    settings_problem: str | None = None
    """Why the settings are taken to be the defaults."""


@dataclass(frozen=True, slots=True)
class Text:
    """A log's text, which can be read once."""

    chunks: Iterator[str]
    no_snapshot: NotASnapshotError | None = None
    """Why it is not the snapshot that it looked like."""


@contextmanager
def opened(file: str) -> Iterator[Recorded | Text]:
    """What FILE holds; - is the standard input. LogError and other AllocatorErrors: it cannot be read, or tells no history."""
    with ExitStack() as held:
        with _reading(file):
            found = _found(file, held)
        yield found


def _found(file: str, held: ExitStack) -> Recorded | Text:
    if file.endswith(SUFFIX):
        return _recording(read_recording(file))
    if file == "-":
        if sys.stdin is None:  # the shell's `<&-`
            raise OSError(errno.EBADF, "the standard input is closed")
        return _of_pipe(file, sys.stdin.buffer)
    of = _of_pipe if is_pipe(Path(file)) else _of_file
    return of(file, held.enter_context(Path(file).open("rb")))


@contextmanager
def _reading(file: str) -> Iterator[None]:
    """Only what is read is within: that an answer cannot be written is not the file's fault."""
    try:
        yield
    except (OSError, EOFError, zlib.error) as error:
        cut_off = "its gzip ends in the middle; copy it again" if isinstance(error, EOFError) else None
        raise LogError(file, f"cannot be read ({cut_off or getattr(error, 'strerror', None) or error})") from error


def _of_file(file: str, stream: BinaryIO) -> Recorded | Text:
    head, unpacked = _unpacked(stream)
    if not _is_snapshot(head):
        return Text(_text(file, unpacked))
    try:
        return _snapshot(file, snapshot_data(Path(file)))
    except NotASnapshotError as error:
        if not _JSON.match(head):
            raise
        return Text(_text(file, unpacked), error)  # lines of JSON, perhaps


def _of_pipe(file: str, stream: BinaryIO) -> Recorded | Text:
    """The same of what cannot be read twice: a snapshot lies in memory whole."""
    head, unpacked = _unpacked(stream)
    if not _is_snapshot(head):
        return Text(_text(file, unpacked))
    data = unpacked.read(UNPACKED_LIMIT_BYTES + 1)
    try:
        return _snapshot(file, data)
    except NotASnapshotError as error:
        if not _JSON.match(head):
            raise
        return Text(_text(file, BufferedReader(BytesIO(data))), error)


def _is_snapshot(head: bytes) -> bool:
    """Whether it begins as one, or as what torch.save() makes, which the reader of snapshots explains."""
    return head.startswith((PROTOCOL, b"PK\x03\x04")) or _JSON.match(head) is not None


def _unpacked(stream: BinaryIO) -> tuple[bytes, BufferedReader]:
    """The first bytes, and a stream from the beginning, unpacked where it is gzip."""
    head, whole = _peeked(stream)
    if not head.startswith(GZIP_MAGIC):
        return head, whole
    return _peeked(gzip.GzipFile(fileobj=whole))


def _peeked(stream: BinaryIO | gzip.GzipFile) -> tuple[bytes, BufferedReader]:
    head = stream.read(_HEAD_BYTES)
    return head, BufferedReader(_Rejoined(head, stream), PIECE_BYTES)


class _Rejoined(RawIOBase):
    """A stream again, of which the first bytes were taken."""

    def __init__(self, first: bytes, rest: BinaryIO | gzip.GzipFile) -> None:
        self._first, self._rest = first, rest

    def readable(self) -> bool:
        """It is."""
        return True

    def readinto(self, buffer: Any) -> int:
        """As of any stream."""
        piece = self._first[: len(buffer)] or self._rest.read1(len(buffer))  # type: ignore[union-attr]
        self._first = self._first[len(piece) :]
        buffer[: len(piece)] = piece
        return len(piece)


def _text(file: str, stream: BufferedReader) -> Iterator[str]:
    chunks = iter(text_of(stream))
    while (chunk := _next(file, chunks)) is not None:
        yield chunk


def _next(file: str, chunks: Iterator[str]) -> str | None:
    try:
        with _reading(file):
            return next(chunks, None)
    except NotALogError as error:
        raise LogError(file, f"is {error.what}; {WANTED}") from error


def _snapshot(file: str, data: bytes | Callable[[], Iterator[bytes]]) -> Recorded:
    snapshot = read_snapshot(data, file, tolerant=True)
    devices = tuple(device for device, trace in enumerate(snapshot.traces) if trace)
    if not devices:
        raise LogError(file, NOT_RECORDED)

    def begin(at: int) -> DeviceHistory:
        own = tuple(segment for segment in snapshot.segments if segment.device == devices[at])
        return DeviceHistory(devices[at], snapshot.traces[devices[at]], own, snapshot.settings)

    return Recorded(devices, tuple(snapshot.traces[device] for device in devices), begin, snapshot.settings_problem)


def _recording(run: Recording) -> Recorded:
    def room(time_us: int) -> int:
        left = run.device_total_bytes - run.other_used_at(time_us)
        return left if run.allowed_bytes is None else min(left, run.allowed_bytes)

    def begin(_: int) -> DeviceHistory:
        return DeviceHistory(run.device_index, run.trace, run.segments, run.settings, room=room)

    return Recorded((run.device_index,), (run.trace,), begin)
