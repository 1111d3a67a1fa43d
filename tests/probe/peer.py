"""A daemon's side by hand: plain sockets and HTTP/2 frames, so that a test decides which byte comes when."""

import socket
import struct
from pathlib import Path
from typing import Self

from allocscope.probe.call import (
    ACK,
    DATA,
    END_HEADERS,
    HEADERS,
    PING,
    PREFACE,
    SETTINGS,
    WINDOW_UPDATE,
)
from allocscope.proto.v1.probe_service_pb2 import AttachRequest, AttachResponse
from tests.probe.receiver import LONG_S


def frame(kind: int, flags: int = 0, stream: int = 0, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def message(payload: bytes) -> bytes:
    return b"\0" + struct.pack(">I", len(payload)) + payload


def room(stream: int, size: int) -> bytes:
    return frame(WINDOW_UPDATE, 0, stream, struct.pack(">I", size))


def headers() -> bytes:
    """The answer's; no client of ours decodes them."""
    return frame(HEADERS, END_HEADERS, 1, b"\x88")


def acknowledgement(sequence: int) -> bytes:
    return frame(DATA, 0, 1, message(AttachResponse(acknowledged_sequence=sequence).SerializeToString()))


class Peer:
    """Listens at `path`; one connection at a time. Whatever never comes fails the test after LONG_S."""

    def __init__(self, path: Path) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self._listener.settimeout(LONG_S)
        self._connection: socket.socket | None = None
        self.data = bytearray()
        """The payloads of all DATA frames of this connection."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.hang_up()
        self._listener.close()

    def accept(self, *, greets: bool = True) -> Self:
        self._connection, _ = self._listener.accept()
        self._connection.settimeout(LONG_S)
        self.data.clear()
        assert self._read(len(PREFACE)) == PREFACE
        if greets:
            self.send(frame(SETTINGS))
        return self

    def hang_up(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def send(self, *frames: bytes) -> None:
        assert self._connection is not None
        self._connection.sendall(b"".join(frames))

    def grant(self, size: int) -> None:
        self.send(room(0, size), room(1, size))

    def take_data(self, size: int) -> None:
        """Read until so many bytes of messages have come in all."""
        while len(self.data) < size:
            self._take()

    def settle(self) -> int:
        """How many bytes of messages have come, once the other side has seen all that was sent to it, and sent all it can."""
        for _ in range(2):  # what it sends for having seen the rest may come after the first answer
            self.send(frame(PING, payload=b"settled?"))
            while self._take() != (PING, ACK):
                pass
        return len(self.data)

    def requests(self) -> list[AttachRequest]:
        """The messages that are whole."""
        found, rest = [], bytes(self.data)
        while len(rest) >= 5 and len(rest) >= 5 + int.from_bytes(rest[1:5], "big"):
            size = int.from_bytes(rest[1:5], "big")
            found.append(AttachRequest.FromString(rest[5 : 5 + size]))
            rest = rest[5 + size :]
        return found

    def take_request(self) -> AttachRequest:
        """Read until one more is whole; it."""
        known = len(self.requests())
        while len(self.requests()) == known:
            self._take()
        return self.requests()[known]

    def _take(self) -> tuple[int, int]:
        header = self._read(9)
        payload = self._read(int.from_bytes(header[:3], "big"))
        if header[3] == DATA:
            self.data += payload
        return header[3], header[4]

    def _read(self, size: int) -> bytes:
        assert self._connection is not None
        read = b""
        while len(read) < size:
            piece = self._connection.recv(size - len(read))
            assert piece, "the other side hung up"
            read += piece
        return read
