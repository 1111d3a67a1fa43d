"""One gRPC call of a job, over an HTTP/2 connection (`allocscope.daemon.connection`): whole messages in, whole messages out.

grpc's PROTOCOL-HTTP2.md. Messages wait until they are asked for, and the sender's window stays closed over what waits.
"""

from __future__ import annotations

import asyncio
import struct
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Protocol, TypeVar
from urllib.parse import quote

import grpc

from allocscope.daemon.peers import Peer

MESSAGE_HEADER = struct.Struct(">BI")
"""Whether compressed; length."""
LARGEST_MESSAGE_BYTES = (2 << 20) + 4096
"""A probe's largest message is 2 MiB. What is larger ends its call, and is not read into memory."""
MOST_WAITING = 4
"""Messages that were not asked for yet, before the sender must wait."""
MOST_TIME_S = 0.05
"""Of one message, that is put down to its sender: whoever takes messages may have to wait for others in between."""
UNQUOTED = "".join(map(chr, range(0x20, 0x7F))).replace("%", "")
"""Of grpc-message: what is not percent-encoded."""

Headers = list[tuple[bytes, bytes]]
_Message = TypeVar("_Message")


class CallRefused(Exception):  # noqa: N818 (it names what happened)
    """The call ends with this status."""

    def __init__(self, code: grpc.StatusCode, text: str) -> None:
        super().__init__(text)
        self.code, self.text = code, text


class Wire(Protocol):
    """What a call needs of its connection."""

    @property
    def peer(self) -> Peer:
        """Whose it is."""
        ...

    def spend(self, seconds: float) -> None:
        """What came took so much of the daemon's time."""
        ...

    def hold(self, more_bytes: int) -> None:
        """So much more (less) of what came is kept in memory; CallRefused: that is too much."""
        ...

    def take_on(self, stream: int, size: int) -> None:
        """The other side may send so much more."""
        ...

    def headers(self, stream: int, headers: Headers, *, last: bool = False) -> None:
        """Send headers, or trailers."""
        ...

    async def data(self, stream: int, data: bytes) -> None:
        """Send it, once the other side has room."""
        ...


class Call:
    """Its messages as an iterator, and its answers."""

    def __init__(self, wire: Wire, stream: int) -> None:
        self._wire, self._stream = wire, stream
        self._unread = bytearray()
        self._messages: deque[bytes] = deque()
        self._news = asyncio.Event()
        self._is_ended = self._is_answered = False
        self._problem: CallRefused | None = None
        self._held_bytes = self._closed_window = 0

    @property
    def peer(self) -> Peer:
        """Whose it is."""
        return self._wire.peer

    # in

    def receive(self, data: bytes, flow_bytes: int) -> None:
        """Some more of it came, which took so much of the window."""
        self._closed_window += flow_bytes
        if self._problem is None:
            try:
                self._hold(len(data))
                self._unread += data
                self._split()
            except CallRefused as refused:
                self._problem = refused
                self._forget()
        self._open_window()
        self._news.set()

    def end(self) -> None:
        """Nothing more comes."""
        self._is_ended = True
        self._news.set()

    async def messages(self, read: Callable[[bytes], _Message]) -> AsyncIterator[_Message]:
        """Each message as `read` makes it, until the other side has ended; CallRefused: it sent what cannot be gone on with.

        Nothing is kept of what was yielded: until the next one comes it may be long, and of a MiB protobuf makes dozens.
        """
        while True:
            while self._messages:
                began_s = time.thread_time()
                yield self._next(read)
                self._wire.spend(min(time.thread_time() - began_s, MOST_TIME_S))
            if self._problem:
                raise self._problem
            if self._is_ended:
                return
            self._news.clear()
            await self._news.wait()

    def _next(self, read: Callable[[bytes], _Message]) -> _Message:
        message = self._messages.popleft()
        self._hold(-len(message) - MESSAGE_HEADER.size)
        self._open_window()
        return read(message)

    def _split(self) -> None:
        while len(self._unread) >= MESSAGE_HEADER.size:
            compressed, size = MESSAGE_HEADER.unpack_from(self._unread)
            if compressed:
                raise CallRefused(grpc.StatusCode.UNIMPLEMENTED, "a compressed message, which is not read here")
            if size > LARGEST_MESSAGE_BYTES:
                text = f"a message of {size} bytes (at most {LARGEST_MESSAGE_BYTES})"
                raise CallRefused(grpc.StatusCode.RESOURCE_EXHAUSTED, text)
            end = MESSAGE_HEADER.size + size
            if len(self._unread) < end:
                return
            self._messages.append(bytes(self._unread[MESSAGE_HEADER.size : end]))
            del self._unread[:end]

    def _open_window(self) -> None:
        if self._closed_window and len(self._messages) < MOST_WAITING:
            size, self._closed_window = self._closed_window, 0
            self._wire.take_on(self._stream, size)

    def _hold(self, more_bytes: int) -> None:
        self._wire.hold(more_bytes)
        self._held_bytes += more_bytes

    def _forget(self) -> None:
        """What came and was not asked for."""
        self._messages.clear()
        self._unread.clear()
        self._hold(-self._held_bytes)

    # out

    async def answer(self, message: bytes) -> None:
        """Send one message, once the other side has room."""
        if not self._is_answered:
            self._is_answered = True
            self._wire.headers(self._stream, _ANSWER)
        await self._wire.data(self._stream, MESSAGE_HEADER.pack(0, len(message)) + message)

    def finish(self, code: grpc.StatusCode, text: str = "") -> None:
        """The call is over, and this is how it went."""
        trailers = [(b"grpc-status", b"%d" % code.value[0])]
        if text:
            trailers.append((b"grpc-message", quote(text, safe=UNQUOTED).encode()))
        self.drop()
        self._wire.headers(self._stream, trailers if self._is_answered else _ANSWER + trailers, last=True)

    def drop(self) -> None:
        """Nothing more is asked for."""
        self._is_ended = True
        self._forget()
        self._open_window()


_ANSWER: Headers = [(b":status", b"200"), (b"content-type", b"application/grpc")]
