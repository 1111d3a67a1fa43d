"""Batches as they lie in the spool's files: frame after frame, each a header and a payload. Pure.

The header is the length and the CRC-32 of the rest, the batch's number, and how much is in the payload.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from io import BytesIO
from typing import BinaryIO

LARGEST_BATCH_BYTES = 64 << 20
"""A frame that claims more is no frame."""
SOUGHT_BYTES = 64 << 20
"""So much is read, of all frames that might be, to find the next whole one after damaged bytes."""

_FRAME = struct.Struct("<II")
_HEAD = struct.Struct("<QIII")
_BEGINNING = struct.Struct("<IIQ")
"""Of a frame: length, CRC-32, number."""
OVERHEAD_BYTES = _FRAME.size + _HEAD.size


@dataclass(frozen=True, slots=True)
class Counts:
    """What a batch holds."""

    samples: int = 0
    block_maps: int = 0
    events: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(self.samples + other.samples, self.block_maps + other.block_maps, self.events + other.events)


@dataclass(frozen=True, slots=True)
class Frame:
    """A whole frame."""

    sequence: int
    payload: bytes
    counts: Counts = Counts()


def pack(frame: Frame) -> bytes:
    """As it is written."""
    counts = frame.counts
    body = _HEAD.pack(frame.sequence, counts.samples, counts.block_maps, counts.events) + frame.payload
    return _FRAME.pack(len(body), zlib.crc32(body)) + body


def frames(file: BinaryIO) -> Iterator[tuple[Frame, int]]:
    """The whole frames from where the file stands, each with where it ends."""
    while len(start := file.read(_FRAME.size)) == _FRAME.size:
        length, checksum = _FRAME.unpack(start)
        if not _HEAD.size <= length <= LARGEST_BATCH_BYTES:
            return
        body = file.read(length)
        if len(body) < length or zlib.crc32(body) != checksum:
            return
        sequence, *counts = _HEAD.unpack_from(body)
        yield Frame(sequence, body[_HEAD.size :], Counts(*counts)), file.tell()


def is_unfinished(tail: bytes) -> bool:
    """Whether it is the beginning of a frame that would be longer, and not a whole one whose length is damaged."""
    if len(tail) < _FRAME.size:
        return True
    length: int
    length, checksum = _FRAME.unpack_from(tail)
    return len(tail) - _FRAME.size < length <= LARGEST_BATCH_BYTES and zlib.crc32(tail[_FRAME.size :]) != checksum


def next_frame(tail: bytes, least: int, most: int) -> tuple[int, int] | None:
    """The number and place of the first whole frame of one of these batches; None: none is found."""
    left_bytes = SOUGHT_BYTES
    for start in range(len(tail) - OVERHEAD_BYTES + 1):
        length, _, sequence = _BEGINNING.unpack_from(tail, start)
        if not (least <= sequence <= most and _HEAD.size <= length <= len(tail) - start - _FRAME.size):
            continue
        left_bytes -= length
        if left_bytes < 0:
            return None
        if next(frames(BytesIO(tail[start : start + _FRAME.size + length])), None):
            return sequence, start
    return None
