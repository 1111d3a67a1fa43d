"""One streaming gRPC call over HTTP/2, as bytes in and bytes out: what a client of a daemon on this node needs, and no more.

Why not grpcio: its core runs threads of its own in the job, and its handlers of fork() now and then abort the child
(grpcio 1.85.3, "ev_epoll1_linux.cc: Check failed: next_worker->state == KICKED", and SIGSEGV: 6 of 2,640 children forked
while a stream was busy), which would kill a DataLoader's worker; switched off, a child that uses grpc itself hangs.
This has no thread and no lock, and the daemon's side is any gRPC server.

RFC 9113 (HTTP/2), and grpc's PROTOCOL-HTTP2.md.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 4, 6, 7, 8, 9
END_STREAM = ACK = 0x1
END_HEADERS, PADDED = 0x4, 0x8
ENABLE_PUSH, INITIAL_WINDOW_SIZE, MAX_FRAME_SIZE = 2, 4, 5
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
STREAM = 1
FRAME_HEADER = struct.Struct(">HBBBI")
"""Length (upper 16 bits, lower 8), type, flags, stream."""
MESSAGE_HEADER = struct.Struct(">BI")
"""Whether compressed; length."""
DEFAULT_WINDOW, DEFAULT_FRAME, LARGEST_FRAME = 65_535, 16_384, (1 << 24) - 1
LARGEST_ANSWER_BYTES = 4 << 20
LARGEST_BACKLOG_BYTES = 8 << 20
"""A caller hands on far less before it has left; more can only be replies to one who asks and asks, and reads nothing."""
SIZES = {SETTINGS: range(0, DEFAULT_FRAME + 1, 6), PING: (8,), RST_STREAM: (4,), WINDOW_UPDATE: (4,)}
"""Of frames' payloads, where the RFC says that another one is an error of the connection."""


class CallBroken(Exception):  # noqa: N818 (it names what happened)
    """The other side did what cannot be gone on with, or gave up."""


class Call:
    """A call of one method: `outgoing` is what to write to the socket, `receive` takes what was read from it."""

    def __init__(self, method: str) -> None:
        self.outgoing = bytearray(PREFACE)
        self.is_over = False
        """Whether the other side ended the call."""
        self._unframed = bytearray()
        self._read = bytearray()
        self._answers = bytearray()
        self._connection_window = self._stream_window = self._initial_window = DEFAULT_WINDOW
        self._frame_bytes = DEFAULT_FRAME
        self._is_ending = self._is_ended = self._is_greeted = False
        self._frame(SETTINGS, 0, 0, struct.pack(">HI", ENABLE_PUSH, 0))
        self._frame(HEADERS, END_HEADERS, STREAM, b"".join(_headers(method)))

    # out

    @property
    def backlog_bytes(self) -> int:
        """What was sent and has not left yet, for want of room on the other side."""
        return len(self._unframed) + len(self.outgoing)

    def send(self, message: bytes) -> None:
        """Send one message, as the other side has room."""
        self._unframed += MESSAGE_HEADER.pack(0, len(message)) + message
        self._frame_what_fits()

    def end(self) -> None:
        """Nothing more will be sent."""
        self._is_ending = True
        self._frame_what_fits()

    def _frame_what_fits(self) -> None:
        while self._unframed:
            size = min(len(self._unframed), self._frame_bytes, self._connection_window, self._stream_window)
            if size <= 0:
                return
            self._frame(DATA, 0, STREAM, self._unframed[:size])
            del self._unframed[:size]
            self._connection_window -= size
            self._stream_window -= size
        if self._is_ending and not self._is_ended:
            self._is_ended = True
            self._frame(DATA, END_STREAM, STREAM)

    def _frame(self, kind: int, flags: int, stream: int, payload: bytes | bytearray = b"") -> None:
        self.outgoing += FRAME_HEADER.pack(len(payload) >> 8, len(payload) & 0xFF, kind, flags, stream) + payload

    # in

    def receive(self, data: bytes) -> Iterator[bytes]:
        """The answers that are whole by now. CallBroken: there will be no more."""
        self._read += data
        while len(self._read) >= FRAME_HEADER.size:
            upper, lower, kind, flags, stream = FRAME_HEADER.unpack_from(self._read)
            size = upper << 8 | lower
            if size > DEFAULT_FRAME or not (self._is_greeted or kind == SETTINGS):
                raise CallBroken("it does not speak HTTP/2")
            if len(self.outgoing) > LARGEST_BACKLOG_BYTES:
                raise CallBroken("it sends and does not read")
            if len(self._read) < FRAME_HEADER.size + size:
                return
            payload = bytes(self._read[FRAME_HEADER.size : FRAME_HEADER.size + size])
            del self._read[: FRAME_HEADER.size + size]
            self._is_greeted = True
            yield from self._receive_frame(kind, flags, stream & 0x7FFFFFFF, payload)

    def _receive_frame(self, kind: int, flags: int, stream: int, payload: bytes) -> Iterator[bytes]:
        if len(payload) not in SIZES.get(kind, (len(payload),)):
            raise CallBroken(f"a frame of type {kind} has {len(payload)} bytes")
        if kind == SETTINGS and not flags & ACK:
            self._receive_settings(payload)
        elif kind == WINDOW_UPDATE:
            self._receive_room(stream, payload)
        elif kind == PING and not flags & ACK:
            self._frame(PING, ACK, 0, payload)
        elif kind == DATA and stream == STREAM:
            yield from self._receive_data(flags, payload)
        elif kind == RST_STREAM and stream == STREAM:
            raise CallBroken(f"it reset the stream (HTTP/2 error {int.from_bytes(payload, 'big')})")
        elif kind == GOAWAY and int.from_bytes(payload[:4], "big") & 0x7FFFFFFF < STREAM:
            raise CallBroken("it went away before it took the call")
        # Header blocks are not decoded: that the call ended is all there is to know of them.
        if kind in (DATA, HEADERS) and stream == STREAM and flags & END_STREAM:
            self.is_over = True

    def _receive_settings(self, payload: bytes) -> None:
        for offset in range(0, len(payload), 6):
            name, value = struct.unpack_from(">HI", payload, offset)
            if name == INITIAL_WINDOW_SIZE:
                self._stream_window += value - self._initial_window
                self._initial_window = value
            elif name == MAX_FRAME_SIZE:
                self._frame_bytes = min(max(value, DEFAULT_FRAME), LARGEST_FRAME)
        self._frame(SETTINGS, ACK, 0)
        self._frame_what_fits()

    def _receive_room(self, stream: int, payload: bytes) -> None:
        room = int.from_bytes(payload, "big") & 0x7FFFFFFF
        if stream == 0:
            self._connection_window += room
        elif stream == STREAM:
            self._stream_window += room
        self._frame_what_fits()

    def _receive_data(self, flags: int, payload: bytes) -> Iterator[bytes]:
        if payload:
            for stream in (0, STREAM):
                self._frame(WINDOW_UPDATE, 0, stream, struct.pack(">I", len(payload)))
        if flags & PADDED:
            payload = _without_padding(payload)
        self._answers += payload
        while len(self._answers) >= MESSAGE_HEADER.size:
            compressed, size = MESSAGE_HEADER.unpack_from(self._answers)
            if compressed or size > LARGEST_ANSWER_BYTES:
                raise CallBroken("its answer cannot be read")
            if len(self._answers) < MESSAGE_HEADER.size + size:
                return
            yield bytes(self._answers[MESSAGE_HEADER.size : MESSAGE_HEADER.size + size])
            del self._answers[: MESSAGE_HEADER.size + size]


def _without_padding(payload: bytes) -> bytes:
    """RFC 9113, 6.1: the padding's length comes first, the padding last."""
    if not payload or payload[0] >= len(payload):
        raise CallBroken("a frame is shorter than its padding")
    return payload[1 : len(payload) - payload[0]]


def _headers(method: str) -> Iterator[bytes]:
    """The request's headers, each as a literal that nobody need remember (RFC 7541, 6.2.2)."""
    for name, value in (
        (":method", "POST"),
        (":scheme", "http"),
        (":path", method),
        (":authority", "localhost"),
        ("te", "trailers"),
        ("content-type", "application/grpc"),
        ("user-agent", "allocscope-probe"),
    ):
        yield b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
