"""What a process noted before it could be killed, and how that comes into the batches as if its stream had brought it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import structlog
from google.protobuf.message import DecodeError

from allocscope.daemon import claims
from allocscope.daemon.capture_folder import CaptureFolder
from allocscope.daemon.intake import Intake
from allocscope.daemon.node import Node
from allocscope.daemon.observed import Observed
from allocscope.model import wire
from allocscope.model.captures import CaptureNote
from allocscope.model.wire import WireError
from allocscope.proto.v1 import capture_pb2, identity_pb2

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class ReadNote:
    """A note that says nothing that cannot be, but for its figures, which `Figures` judges."""

    message: capture_pb2.CaptureNote
    note: CaptureNote
    uid: int
    """Its file's owner."""
    refused: tuple[WireError, ...] = ()
    """Of what it said too much, which is left out."""

    @property
    def last_sequence(self) -> int:
        """The highest number in it; 0: it has no figures."""
        note = self.note
        numbered = (each.sequence for each in (note.block_map, note.event) if each)
        return max(*numbered, *(note.samples.sequence if note.samples else ()), 0, 0)


def read_note(folder: CaptureFolder, capture_id: str) -> ReadNote:
    """ValueError, of which WireError is one: it cannot be taken; FileNotFoundError: it is gone."""
    packed, uid = folder.read_note(capture_id)
    try:
        message = capture_pb2.CaptureNote.FromString(packed)
    except DecodeError as error:
        raise ValueError("it is no note, or damaged") from error
    claims.check_size(message.process)
    refused = tuple(_too_much(message))
    note = wire.note_from_wire(message)
    claims.check_process(note.process)
    claims.check_capture(note.capture)
    if note.capture.capture_id != capture_id:
        raise WireError("capture_id", f"the note {capture_id} is of capture {note.capture.capture_id}")
    return ReadNote(message, note, uid, refused)


def _too_much(message: capture_pb2.CaptureNote) -> Iterator[WireError]:
    """What has too much in it to be looked at is taken out, and the rest of the note stays."""
    for name in ("samples", "block_map"):
        try:
            claims.check_size(getattr(message, name))
        except WireError as error:
            message.ClearField(name)
            yield error


class OnDisk(asyncio.Event):
    """Set once what a note told is on disk, or was refused."""

    def acknowledge(self, sequence: int) -> None:
        """As a stream is told."""
        self.set()


class Figures:
    """Brings what notes tell into the open batch."""

    def __init__(
        self, node: Node, intake: Intake, observed: Observed, total_bytes: Callable[[str], int | None]
    ) -> None:
        """`total_bytes` says what a device has, by its UUID, where the node knows."""
        self._node, self._intake, self._observed = node, intake, observed
        self._total_bytes = total_bytes

    async def bring(self, read: ReadNote) -> OnDisk:
        """What the process's stream did not bring. Numbered as it is, it is stored once should the stream bring it yet."""
        await self._intake.wait_for_room()
        process = self._introduction(read)
        self._intake.add_process(process)
        for error in read.refused:
            self._refuse(read, error)
        for add in (self._add_samples, self._add_block_map, self._add_event):
            try:
                add(read, process)
            except WireError as error:
                self._refuse(read, error)
        on_disk = OnDisk()
        self._intake.owe(on_disk, 1)
        self._intake.hasten()
        return on_disk

    def _refuse(self, read: ReadNote, error: WireError) -> None:
        self._observed.rejected.add(1, error.reason)
        log.warning("refused of a note", capture=read.note.capture.capture_id, why=str(error))

    def _introduction(self, read: ReadNote) -> identity_pb2.Process:
        """Its hello, which may be newer, unless the note knows of one more device."""
        attached = self._node.get(read.note.process.process_id)
        devices = {device.uuid for device in read.note.process.devices}
        if attached is not None and devices <= set(attached.allocators):
            return attached.message
        return read.message.process

    def _seen(self, read: ReadNote) -> int:
        attached = self._node.get(read.note.process.process_id)
        return attached.seen if attached else 0

    def _add_samples(self, read: ReadNote, process: identity_pb2.Process) -> None:
        chunk = read.note.samples
        if chunk is None or not len(chunk) or chunk.sequence[-1] <= self._seen(read):
            return
        claims.check_allocator(chunk.allocator, read.note.process)
        claims.check_chunk(chunk, self._total_bytes(chunk.allocator.device_uuid))
        self._intake.add_chunk(process, read.message.samples)
        self._observed.ingested.inc(len(chunk))

    def _add_block_map(self, read: ReadNote, process: identity_pb2.Process) -> None:
        block_map = read.note.block_map
        if block_map is None or block_map.sequence <= self._seen(read):
            return
        ref = wire.ref_from_wire(read.message.block_map.allocator)
        claims.check_allocator(ref, read.note.process)
        claims.check_block_map(block_map, self._total_bytes(ref.device_uuid))
        self._intake.add_block_map(process, read.message.block_map)

    def _add_event(self, read: ReadNote, process: identity_pb2.Process) -> None:
        event = read.note.event
        if event is None or event.sequence <= self._seen(read):
            return
        claims.check_event(event, read.note.process)
        self._intake.add_event(process, read.message.event)
