"""A capture on its way into the spool: its snapshot is compressed a piece at a time, and nothing is kept of it in memory."""

from __future__ import annotations

import errno
import os
import zlib
from typing import BinaryIO

from allocscope.daemon.capture_spool import CaptureSpool, SpooledCapture, end_of, keep
from allocscope.model.figures import size
from allocscope.proto.v1.capture_service_pb2 import CaptureHello

READ_BYTES = 1 << 20
GZIP_LEVEL = 1
"""For speed: snapshots are text for the most part, and shrink to a tenth at any level."""
GZIP_WINDOW_BITS = 31
"""Of zlib: with gzip's header and trailer."""
LONGEST_PROBLEM = 500
"""Letters of a capture's problem; a collector takes no more."""
LEFT_FREE_RATIO, MOST_LEFT_FREE_BYTES = 0.05, 1 << 30
"""Of the disk, which the batches need more."""


class SnapshotUnusable(Exception):  # noqa: N818 (it is nobody's fault here)
    """The snapshot cannot be kept, but what else is known of the capture can."""

    def __init__(self, reason: str, why: str) -> None:
        super().__init__(why)
        self.reason, self.why = reason, why


class Packing:
    """One capture. `step` until it says False, then `finish`; `abandon` where anything was raised."""

    def __init__(
        self, spool: CaptureSpool, hello: CaptureHello, snapshot: BinaryIO | None, *, largest_bytes: int = 0
    ) -> None:
        """Closes `snapshot` at the end; OSError: the disk does not take it."""
        self._spool, self._hello, self._snapshot = spool, hello, snapshot
        self._largest_bytes = largest_bytes
        self._capture_id = hello.capture.capture_id
        self._unfinished = spool.unfinished_path(self._capture_id)
        self._gzip = zlib.compressobj(GZIP_LEVEL, zlib.DEFLATED, GZIP_WINDOW_BITS)
        self._read_bytes = self._written_bytes = 0
        try:
            self._file: BinaryIO = self._unfinished.open("wb")
        except OSError:
            if snapshot:
                snapshot.close()
            raise

    def step(self) -> bool:
        """One piece; whether there is more. SnapshotUnusable, OSError: it does not go on."""
        piece = self._read() if self._snapshot else b""
        if not piece:
            return False
        self._read_bytes += len(piece)
        if self._read_bytes > self._largest_bytes:
            raise SnapshotUnusable("too_large", too_large(self._read_bytes, self._largest_bytes))
        self._write(self._gzip.compress(piece))
        return True

    def finish(self) -> None:
        """Return when it is on disk, whole."""
        self._hello.capture.ClearField("snapshot_bytes")
        if self._snapshot:
            self._write(self._gzip.flush())
            self._hello.capture.snapshot_bytes = self._read_bytes
        if self._hello.capture.HasField("problem"):
            self._hello.capture.problem = self._hello.capture.problem[:LONGEST_PROBLEM]
        self._write(end_of(self._hello))
        keep(self._file, self._unfinished, self._spool.path(self._capture_id))
        self._spool.add(self._hello, self._written_bytes)
        if self._snapshot:
            self._snapshot.close()

    def abandon(self) -> None:
        """Leave nothing behind."""
        for file in (self._file, self._snapshot):
            if file:
                file.close()
        self._unfinished.unlink(missing_ok=True)

    def _read(self) -> bytes:
        assert self._snapshot is not None
        try:
            return self._snapshot.read(READ_BYTES)
        except OSError as error:
            raise SnapshotUnusable("unreadable", f"the snapshot cannot be read: {error.strerror}") from error

    def _write(self, content: bytes) -> None:
        self._written_bytes += len(content)
        if not self._spool.make_room(self._written_bytes):
            limit = self._spool.limit_bytes
            raise SnapshotUnusable("too_large", f"the snapshot fills more than captures_limit_bytes, {limit} bytes")
        self._leave_some_free()
        self._file.write(content)

    def _leave_some_free(self) -> None:
        disk = os.statvfs(self._spool.folder)
        left_free = min(disk.f_blocks * disk.f_frsize * LEFT_FREE_RATIO, MOST_LEFT_FREE_BYTES)
        if disk.f_bavail * disk.f_frsize < left_free:
            raise OSError(errno.ENOSPC, f"less than {size(left_free)} are left free")


def strip(spool: CaptureSpool, capture: SpooledCapture, problem: str) -> None:
    """Give up a capture's snapshot, and say why; OSError: it stays as it was."""
    stored = spool.open(capture)
    if stored is None:
        return
    stored.close()
    stored.hello.capture.problem = problem
    packing = Packing(spool, stored.hello, None)
    try:
        packing.finish()
    except BaseException:
        packing.abandon()
        raise


def too_large(bytes_: int, largest_bytes: int) -> str:
    """A text for people."""
    return f"the snapshot has {bytes_} bytes or more, the limit is {largest_bytes} (capture_largest_bytes)"
