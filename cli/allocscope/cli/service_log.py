"""Standard error of a service. A line that cannot be written there, or would not be taken, is lost; it never ends the service, nor stalls it."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import select
import sys
import threading
from collections.abc import Iterator
from typing import TextIO

LONGEST_WAIT_S = 0.1
"""For a reader that takes nothing; once it has not, each further line is lost at once until it takes one again."""
PIECE_BYTES = select.PIPE_BUF
"""Of a pipe that has room, a write of so much does not wait (Linux pipe(7))."""


class ServiceLog(io.TextIOBase):
    """Writes whole lines to a file descriptor, as standard error does; never raises, never waits long."""

    def __init__(self, descriptor: int, encoding: str = "utf-8") -> None:
        self._descriptor, self._encoding = descriptor, encoding
        self._writing = threading.Lock()
        self._begun = ""
        """A line that is not over."""
        self._lost_lines = 0
        self._why_lost = ""

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        """All of it is taken; what is lost is told of with the next line that can be written."""
        with self._writing:
            lines, end, self._begun = (self._begun + text).rpartition("\n")
            if end:
                self._put(lines + end)
        return len(text)

    def flush(self) -> None:
        """Also a line that is not over."""
        with self._writing:
            begun, self._begun = self._begun, ""
            if begun:
                self._put(begun)

    def _put(self, text: str) -> None:
        told = ""
        if self._lost_lines:
            told = f"\n{self._lost_lines} lines of this log could not be written ({self._why_lost})\n"
        try:
            self._write_all((told + text).encode(self._encoding, "backslashreplace"))
        except (OSError, ValueError) as error:
            self._lost_lines += text.count("\n")
            self._why_lost = getattr(error, "strerror", None) or str(error)
        else:
            self._lost_lines = 0

    def _write_all(self, packed: bytes) -> None:
        while packed:
            self._wait_for_room()
            packed = packed[os.write(self._descriptor, packed[:PIECE_BYTES]) :]

    def _wait_for_room(self) -> None:
        poll = select.poll()
        poll.register(self._descriptor, select.POLLOUT)
        if not poll.poll(0 if self._lost_lines else LONGEST_WAIT_S * 1000):
            raise BlockingIOError(errno.EAGAIN, "nobody reads it")


@contextlib.contextmanager
def lasting_log() -> Iterator[None]:
    """Everything that is written to `sys.stderr` goes through a ServiceLog, for as long as this lasts."""
    for descriptor in (0, 1, 2):
        _fill(descriptor)
    stderr = sys.stderr
    with contextlib.redirect_stderr(_log_for(stderr)):
        try:
            yield
        finally:
            sys.stderr.flush()


def _log_for(stderr: TextIO | None) -> TextIO:
    """One that has no file of the system's stays; Python has none at all where its was closed when it began."""
    try:
        return ServiceLog(2, "utf-8") if stderr is None else ServiceLog(stderr.fileno(), stderr.encoding)  # type: ignore[return-value]
    except (OSError, ValueError):
        assert stderr is not None
        return stderr


def _fill(descriptor: int) -> None:
    """A standard stream that is closed would be the next file that is opened, and libraries write to it by its number."""
    try:
        os.fstat(descriptor)
    except OSError:
        if (opened := os.open(os.devnull, os.O_RDWR)) != descriptor:
            os.dup2(opened, descriptor)
            os.close(opened)
