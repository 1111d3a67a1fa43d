"""Snapshots that are kept, as they are read: piece by piece, packed as they came, or plain."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from itertools import count

from allocscope.collector.capture_refusals import SnapshotDropped
from allocscope.collector.capture_views import file_name
from allocscope.storage.captures import CaptureRecord

UNPACKED_AT_ONCE = 1 << 20


class Snapshot:
    """A snapshot that is kept, read piece by piece: it never lies in memory whole."""

    def __init__(self, record: CaptureRecord, first: bytes, piece: Callable[[int], bytes | None]) -> None:
        self._first, self._piece = first, piece
        self.file_name = file_name(record)
        self.snapshot_bytes, self.stored_bytes = record.snapshot_bytes or 0, record.stored_bytes or 0

    def packed(self) -> Iterator[bytes]:
        """The gzip stream as it came. SnapshotDropped: it was dropped meanwhile, and so this is not all of it."""
        left = self.stored_bytes
        for number in count():
            piece = self._first if number == 0 else self._piece(number)
            if piece is None:
                raise SnapshotDropped("it was dropped while it was read")
            yield piece
            left -= len(piece)
            if left <= 0:
                return

    def plain(self) -> Iterator[bytes]:
        """The pickle. SnapshotDropped: see `packed`."""
        member = zlib.decompressobj(wbits=31)
        for piece in self.packed():
            rest = piece
            while rest:
                if plain := member.decompress(rest, UNPACKED_AT_ONCE):
                    yield plain
                rest = member.unconsumed_tail
        if plain := member.flush():
            yield plain
