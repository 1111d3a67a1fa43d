"""Captures that the collector does not have yet, on disk: one file each, `<capture_id>.capture`, whole once it has that name.

    the snapshot   one gzip stream; nothing where there is none
    the hello      an allocscope.proto.v1.CaptureHello, without the node's name
    the end        the hello's length and CRC-32, and a mark

One thread does everything here; another may ask how much there is.
"""

from __future__ import annotations

import os
import re
import struct
import time
import zlib
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from google.protobuf.message import DecodeError

from allocscope.daemon.capture_losses import CaptureLosses
from allocscope.daemon.durable import sync_folder
from allocscope.daemon.errors import SpoolError
from allocscope.model.captures import UNFINISHED_SUFFIX
from allocscope.model.figures import duration
from allocscope.proto.v1 import capture_pb2
from allocscope.proto.v1.capture_service_pb2 import CaptureHello

SUFFIX = ".capture"
MOST_CAPTURES = 2048
"""The oldest are dropped beyond; those without a snapshot are some hundred bytes each."""
OLDEST_S = 7 * 86400.0
"""A capture that the collector has not taken for so long is dropped."""
PIECE_BYTES = 1 << 20
"""At most, of one piece that a collector is sent."""
LARGEST_HELLO_BYTES = 64 << 10
DAMAGED = "its file in the spool is damaged; look at the disk"

_END = struct.Struct("<II8s")
_MARK = b"capture1"


@dataclass(frozen=True, slots=True)
class SpooledCapture:
    """A capture as it is kept."""

    capture_id: str
    bytes: int
    """On disk."""
    kept_s: float
    """Since when, unix time."""
    has_snapshot: bool
    is_asked_for: bool
    """Somebody waits for it."""


class CaptureSpool:
    """A folder of captures. The caller holds the lock of the spool that it lies in."""

    def __init__(
        self, folder: Path, limit_bytes: int, losses: CaptureLosses, clock: Callable[[], float] = time.time
    ) -> None:
        """`clock` in seconds, unix time. SpoolError: the folder cannot be used."""
        self._folder, self._limit_bytes = folder, limit_bytes
        self._losses, self._clock = losses, clock
        self._held: dict[str, SpooledCapture] = {}
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._scan()
        except OSError as error:
            raise SpoolError(folder, error.strerror or str(error)) from error

    # what is there

    @property
    def folder(self) -> Path:
        return self._folder

    @property
    def limit_bytes(self) -> int:
        return self._limit_bytes

    @property
    def bytes(self) -> int:
        """On disk."""
        return sum(capture.bytes for capture in list(self._held.values()))

    def __len__(self) -> int:
        return len(self._held)

    def get(self, capture_id: str) -> SpooledCapture | None:
        """None: it is not here, or no more."""
        return self._held.get(capture_id)

    def captures(self) -> list[SpooledCapture]:
        """The oldest first."""
        return list(self._held.values())

    def open(self, capture: SpooledCapture) -> StoredCapture | None:
        """None: it is not there any more, or damaged, and dropped."""
        try:
            return StoredCapture(self.path(capture.capture_id))
        except FileNotFoundError:
            self._held.pop(capture.capture_id, None)
        except ValueError:
            self._lose(capture, "damaged", DAMAGED)
        return None

    # what is done

    def path(self, capture_id: str) -> Path:
        return self._folder / f"{capture_id}{SUFFIX}"

    def unfinished_path(self, capture_id: str) -> Path:
        return self._folder / f"{capture_id}{SUFFIX}{UNFINISHED_SUFFIX}"

    def make_room(self, bytes_: int) -> bool:
        """Drop the oldest until there is room for one more of so many bytes; False: there never is."""
        if bytes_ > self._limit_bytes:
            return False
        while self._held and (self.bytes + bytes_ > self._limit_bytes or len(self) >= MOST_CAPTURES):
            why = "the collector did not take it in time; is it reachable? (captures_limit_bytes says how much is kept)"
            self._lose(next(iter(self._held.values())), "spool_full", why)
        return True

    def add(self, hello: CaptureHello, bytes_: int) -> None:
        """Its file is there, whole."""
        self._hold(hello, bytes_, self._clock())

    def _hold(self, hello: CaptureHello, bytes_: int, kept_s: float) -> None:
        capture = hello.capture
        asked_for = capture.reason == capture_pb2.CAPTURE_REASON_ASKED
        self._held.pop(capture.capture_id, None)
        self._held[capture.capture_id] = SpooledCapture(
            capture.capture_id, bytes_, kept_s, capture.HasField("snapshot_bytes"), asked_for
        )

    def remove(self, capture: SpooledCapture) -> None:
        """The collector has it, or it is given up; OSError: it stays."""
        self.path(capture.capture_id).unlink(missing_ok=True)
        self._held.pop(capture.capture_id, None)

    def drop_old(self) -> None:
        """Give up what is too old."""
        for capture in self.captures():
            if self._clock() - capture.kept_s > OLDEST_S:
                why = f"the collector has not taken it in {duration(OLDEST_S)}; is it reachable, and new enough?"
                self._lose(capture, "too_old", why)

    def _lose(self, capture: SpooledCapture, reason: str, why: str) -> None:
        self._losses.add(reason, capture.capture_id, why)
        with suppress(OSError):
            self.remove(capture)
        self._held.pop(capture.capture_id, None)

    # starting

    def _scan(self) -> None:
        for path in self._folder.glob(f"*{UNFINISHED_SUFFIX}"):
            path.unlink(missing_ok=True)
        for path in _oldest_first(self._folder.glob(f"*{SUFFIX}")):
            if re.fullmatch("[0-9a-f]{32}", path.stem):  # others' stay
                self._find(path)

    def _find(self, path: Path) -> None:
        try:
            stored = StoredCapture(path)
        except ValueError:
            self._losses.add("damaged", path.stem, DAMAGED)
            path.unlink(missing_ok=True)
            return
        stored.close()
        found = path.stat()
        self._hold(stored.hello, found.st_size, min(found.st_mtime, self._clock()))


class StoredCapture:
    """A capture's file, open to be sent; ValueError: it is damaged."""

    def __init__(self, path: Path) -> None:
        self._file: BinaryIO = path.open("rb")
        try:
            self.hello, self.gzip_bytes = self._read_end()
        except BaseException:
            self.close()
            raise
        self._left_bytes = self.gzip_bytes
        self._file.seek(0)

    def piece(self) -> bytes:
        """The next of the snapshot's gzip stream; b"": that was all."""
        piece = self._file.read(min(PIECE_BYTES, self._left_bytes))
        self._left_bytes -= len(piece)
        return piece

    def close(self) -> None:
        self._file.close()

    def _read_end(self) -> tuple[CaptureHello, int]:
        size = os.fstat(self._file.fileno()).st_size
        if size < _END.size:
            raise ValueError(f"a capture of {size} bytes")
        self._file.seek(size - _END.size)
        length, checksum, mark = _END.unpack(self._file.read(_END.size))
        gzip_bytes = size - _END.size - length
        if mark != _MARK or length > LARGEST_HELLO_BYTES or gzip_bytes < 0:
            raise ValueError("a capture without its end")
        self._file.seek(gzip_bytes)
        hello = self._file.read(length)
        if zlib.crc32(hello) != checksum:
            raise ValueError("a capture whose hello is damaged")
        try:
            return CaptureHello.FromString(hello), gzip_bytes
        except DecodeError as error:
            raise ValueError("a capture whose hello cannot be read") from error


def end_of(hello: CaptureHello) -> bytes:
    """What comes behind the snapshot."""
    packed = hello.SerializeToString()
    return packed + _END.pack(len(packed), zlib.crc32(packed), _MARK)


def keep(file: BinaryIO, unfinished: Path, whole: Path) -> None:
    """Give a file that is written its name, and return when it is on disk."""
    file.flush()
    os.fsync(file.fileno())
    file.close()
    unfinished.replace(whole)
    sync_folder(whole.parent)


def _oldest_first(paths: Iterable[Path]) -> list[Path]:
    return sorted(paths, key=lambda path: path.stat().st_mtime_ns)
