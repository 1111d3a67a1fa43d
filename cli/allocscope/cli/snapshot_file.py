"""A snapshot's file as its reader wants it: one that can be read again is read in pieces, as often as needed; of a pipe all is kept."""

from __future__ import annotations

import stat
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from allocscope.allocator.errors import SnapshotError
from allocscope.allocator.snapshot import UNPACKED_LIMIT_BYTES

PIECE_BYTES = 1 << 20


def snapshot_data(path: Path) -> bytes | Callable[[], Iterator[bytes]]:
    """For `read_snapshot`. SnapshotError, here or while it is read: the file cannot be read."""
    if not is_pipe(path):
        return partial(_pieces, path)
    taken = bytearray()
    for piece in _pieces(path):
        taken += piece
        if len(taken) > UNPACKED_LIMIT_BYTES:
            break  # the reader refuses so much
    return bytes(taken)


def is_pipe(path: Path) -> bool:
    """Whether it can be read only once, as what the shell's <(…) gives; nothing is opened."""
    try:
        return not (stat.S_ISREG(mode := path.stat().st_mode) or stat.S_ISDIR(mode))
    except OSError:
        return False  # reading it says why


def _pieces(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            while piece := file.read(PIECE_BYTES):
                yield piece
    except OSError as error:
        raise SnapshotError(str(path), f"cannot be read ({error.strerror or error})") from error
