"""Captures as a process leaves them, and a collector that keeps them."""

from __future__ import annotations

import os
import threading
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc

from allocscope.daemon.observed import Observed
from allocscope.model import AllocatorRef, Capture, CaptureNote, CaptureReason, Event, EventKind, Process
from allocscope.model.captures import FOLDER, NOTE_SUFFIX, SNAPSHOT_SUFFIX, UNFINISHED_SUFFIX
from allocscope.model.sample import chunks
from allocscope.model.wire import note_to_wire
from allocscope.proto.v1.capture_service_pb2 import CaptureHello, KeepRequest, KeepResponse
from allocscope.proto.v1.capture_service_pb2_grpc import CaptureServiceServicer, add_CaptureServiceServicer_to_server
from tests.daemon.fakes import WAIT_S, DaemonProcess, process, sample

ID = "c" * 32
NOBODY = 999_999_999
"""A pid that no process has: the largest there can be is 4,194,304."""


def dead_process(letter: str = "a", **changes) -> Process:
    """One that this machine's /proc does not know."""
    return process(letter, host=os.uname().nodename, pid=NOBODY, **changes)


def note(whose: Process, capture_id: str = ID, *, first: int = 7, figures: bool = True, **changes) -> CaptureNote:
    """Of an OutOfMemoryError: counters are number `first`, the event the next."""
    known = {"capture_id": capture_id, "process_id": whose.process_id, "time_us": 5, "reason": CaptureReason.OOM}
    capture = Capture(**{**known, "device_uuid": "GPU-1", **changes})
    if not figures:
        return CaptureNote(capture, whose)
    (counters,) = chunks(AllocatorRef(whose.process_id, "GPU-1"), [sample(first)])
    event = Event(whose.process_id, first + 1, 5, EventKind.OOM, "GPU-1", message="CUDA out of memory")
    return CaptureNote(capture, whose, samples=counters, event=event)


def folder_of(daemon: DaemonProcess) -> Path:
    return daemon.socket.parent / FOLDER


def leave(folder: Path, name: str, content: bytes) -> Path:
    """As a process does: whole, or not under that name."""
    part = folder / f".{name}{UNFINISHED_SUFFIX}"
    part.write_bytes(content)
    return part.rename(folder / name)


def leave_note(folder: Path, left: CaptureNote) -> Path:
    return leave(folder, left.capture.capture_id + NOTE_SUFFIX, note_to_wire(left).SerializeToString())


def leave_snapshot(folder: Path, content: bytes, capture_id: str = ID) -> Path:
    return leave(folder, capture_id + SNAPSHOT_SUFFIX, content)


def leave_whole(folder: Path, left: CaptureNote, snapshot: bytes) -> None:
    """Of a process that is dead by now: were its note found alone, no snapshot would be waited for."""
    leave_snapshot(folder, snapshot, left.capture.capture_id)
    leave_note(folder, left)


def unpacked(packed: bytes) -> bytes:
    """What is in one whole gzip stream; there must be nothing else."""
    stream = zlib.decompressobj(31)
    plain = stream.decompress(packed)
    assert stream.eof
    assert not stream.unused_data
    return plain


class Kept:
    """A capture as the collector has it."""

    def __init__(self, hello: CaptureHello, packed: bytes) -> None:
        self.hello, self.packed = hello, packed

    @property
    def snapshot(self) -> bytes:
        """What its process wrote."""
        return unpacked(self.packed)


def _is_whole(packed: bytes, hello: CaptureHello) -> bool:
    if not hello.capture.HasField("snapshot_bytes"):
        return packed == b""
    stream = zlib.decompressobj(31)
    return len(stream.decompress(packed)) == hello.capture.snapshot_bytes and stream.eof


class FakeCaptures(CaptureServiceServicer):
    """Keeps what it gets, once, unless it is told not to."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.kept: dict[str, Kept] = {}
        self.hellos: list[CaptureHello] = []
        """Of every call."""
        self.pieces: list[int] = []
        """Bytes of each."""
        self.refuse: Callable[[CaptureHello], tuple[grpc.StatusCode, str] | None] = lambda _: None
        self.go_on = threading.Event()
        """Pieces are read while it is set."""
        self.go_on.set()

    def add_to(self, server: grpc.Server) -> None:
        add_CaptureServiceServicer_to_server(self, server)

    def Keep(self, request_iterator: Iterator[KeepRequest], context: Any) -> KeepResponse:
        hello = next(request_iterator).hello
        capture_id = hello.capture.capture_id
        with self.changed:
            self.hellos.append(hello)
            self.changed.notify_all()
            if capture_id in self.kept:
                return KeepResponse(capture_id=capture_id)
        if refusal := self.refuse(hello):
            context.abort(*refusal)
        packed = b"".join(self._pieces(request_iterator))
        if not _is_whole(packed, hello):  # a connection that breaks ends the requests, too
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the snapshot is not whole")
        with self.changed:
            self.kept.setdefault(capture_id, Kept(hello, packed))
            self.changed.notify_all()
        return KeepResponse(capture_id=capture_id)

    def wait_for(self, holds: Callable[[FakeCaptures], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: holds(self), WAIT_S), (list(self.kept), self.hellos)

    def wait_kept(self, capture_id: str = ID) -> Kept:
        self.wait_for(lambda captures: capture_id in captures.kept)
        return self.kept[capture_id]

    def _pieces(self, requests: Iterator[KeepRequest]) -> Iterator[bytes]:
        for request in requests:
            with self.changed:
                self.pieces.append(len(request.piece))
                self.changed.notify_all()
            assert self.go_on.wait(WAIT_S)
            yield request.piece


def dropped(observed: Observed) -> dict[str, float]:
    """How many captures were counted as dropped, by reason."""
    return {
        sample.labels["reason"]: sample.value
        for family in observed.registry.collect()
        for sample in family.samples
        if sample.name == "allocscope_dropped_total" and sample.labels["what"] == "captures"
    }
