"""One job's connection: HTTP/2 by h2, with gRPC calls on it (`allocscope.daemon.call`).

Why not grpcio's server: it does not tell whose a connection is (SO_PEERCRED), and a message costs it several times as much CPU.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from typing import cast

import h2.config
import h2.connection
import h2.errors
import h2.events
import h2.exceptions
import h2.settings
import structlog

from allocscope.daemon.allowance import Allowance
from allocscope.daemon.call import Call, CallRefused, Headers
from allocscope.daemon.door import Door
from allocscope.daemon.peers import Connected, Peer

log = structlog.get_logger()

CALLS_AT_ONCE = 4
"""On one connection. A probe needs one."""
MOST_CALLS = 256
"""Over a connection's life: who begins and resets calls without end is hung up on."""
IDLE_S = 10.0
"""A connection without a call gives its place to others."""
LARGEST_HEADERS_BYTES = 16 << 10
READ_BYTES = 16 << 10
"""At a time, so that one who sends much, or what costs much, does not hold up the others for long."""
MOST_UNTOLD_BYTES = 128 << 10
"""That mean nothing yet, as headers that do not end: h2 keeps a MiB of them."""
TIME_RATIO, MOST_TIME_S = 0.05, 1.0
"""Of the daemon's time, that a connection may take in the long run and at once. A job takes a thousandth."""
GOODBYE_S = 5.0
"""In which what was said last must be read."""

_CONFIG = h2.config.H2Configuration(client_side=False, header_encoding=None)

Serve = Callable[[str, Call], "asyncio.Task[None]"]
"""Begins to serve a call of this path; CallRefused: it is not served."""


class Connection(asyncio.BufferedProtocol):
    """Lives as long as its transport."""

    def __init__(self, door: Door, peer_of: Callable[[Connected], Peer], serve: Serve) -> None:
        self._door, self._peer_of, self._serve = door, peer_of, serve
        self._h2 = h2.connection.H2Connection(config=_CONFIG)
        self._calls: dict[int, tuple[Call, asyncio.Task[None]]] = {}
        self._calls_begun = 0
        self._room = asyncio.Event()
        """Set when anything changes that a sender may wait for."""
        self._is_writable, self._is_inside = True, False
        self._buffer = bytearray(READ_BYTES)
        self._untold_bytes = 0
        self._allowance = Allowance(TIME_RATIO, MOST_TIME_S)
        self._idle: asyncio.TimerHandle | None = None
        self._goodbye: asyncio.TimerHandle | None = None
        self._pause: asyncio.TimerHandle | None = None
        self.peer = Peer(0, 0)

    # asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Somebody connected."""
        self._transport = cast("asyncio.Transport", transport)
        try:
            self.peer = self._peer_of(transport.get_extra_info("socket"))
        except OSError:  # gone already
            self._transport.abort()
            return
        self._is_inside = self._door.enter(self.peer, self)
        if not self._is_inside:
            self._transport.abort()
            return
        codes = h2.settings.SettingCodes
        self._h2.local_settings = h2.settings.Settings(
            client=False,
            initial_values={
                codes.MAX_CONCURRENT_STREAMS: CALLS_AT_ONCE,
                codes.MAX_HEADER_LIST_SIZE: LARGEST_HEADERS_BYTES,
            },
        )
        self._h2.initiate_connection()
        self._flush()
        self._rest()

    def get_buffer(self, sizehint: int) -> bytearray:
        """Where bytes are to be read to."""
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Bytes of HTTP/2."""
        began_s = time.thread_time()
        self._receive_bytes(bytes(self._buffer[:nbytes]))
        self.spend(time.thread_time() - began_s)

    def pause_writing(self) -> None:
        """The other side does not read: then nothing more is read of it, which would have to be answered."""
        self._is_writable = False
        self._read_or_not()

    def resume_writing(self) -> None:
        """It does again."""
        self._is_writable = True
        self._room.set()
        self._read_or_not()

    def connection_lost(self, exc: Exception | None) -> None:
        """It is over."""
        for timer in (self._idle, self._goodbye, self._pause):
            if timer:
                timer.cancel()
        for call, task in self._calls.values():
            call.drop()
            task.cancel()
        if self._is_inside:
            self._door.leave(self.peer, self)

    def _receive_bytes(self, data: bytes) -> None:
        try:
            events = self._h2.receive_data(data)
        except h2.exceptions.ProtocolError:  # h2 has its GOAWAY ready
            self._flush()
            self._hang_up()
            return
        self._untold_bytes = 0 if events else self._untold_bytes + len(data)
        if self._untold_bytes > MOST_UNTOLD_BYTES:
            log.warning("hung up: headers without end", pid=self.peer.pid, uid=self.peer.uid)
            self._transport.abort()
        for event in events:
            if self._transport.is_closing():
                return
            self._take(event)
        self._flush()

    def _read_or_not(self) -> None:
        if self._is_writable and not self._pause:
            self._transport.resume_reading()
        else:
            self._transport.pause_reading()

    def _go_on(self) -> None:
        self._pause = None
        self._read_or_not()

    def _hang_up(self) -> None:
        """Once what was said has left; who does not read it is not waited for."""
        self._transport.close()
        if not self._goodbye:
            self._goodbye = asyncio.get_running_loop().call_later(GOODBYE_S, self._transport.abort)

    # HTTP/2's side

    def _take(self, event: h2.events.Event) -> None:
        match event:
            case h2.events.RequestReceived():
                self._begin(event.stream_id, event.headers)
            case h2.events.DataReceived():
                self._receive(event.stream_id, event.data, event.flow_controlled_length)
            case h2.events.StreamEnded():
                if found := self._calls.get(event.stream_id):
                    found[0].end()
            case h2.events.StreamReset():
                if found := self._calls.get(event.stream_id):
                    found[1].cancel()
            case h2.events.WindowUpdated() | h2.events.RemoteSettingsChanged():
                self._room.set()
            case h2.events.ConnectionTerminated():
                self._hang_up()

    def _receive(self, stream: int, data: bytes, flow_bytes: int) -> None:
        if found := self._calls.get(stream):
            found[0].receive(data, flow_bytes)
        else:
            self.take_on(stream, flow_bytes)

    def _begin(self, stream: int, headers: Headers) -> None:
        self._calls_begun += 1
        if self._calls_begun > MOST_CALLS:
            log.warning("hung up: too many calls on one connection", pid=self.peer.pid, uid=self.peer.uid)
            self._transport.abort()
            return
        call = Call(self, stream)
        path = dict(headers).get(b":path", b"").decode(errors="replace")
        try:
            self._door.check_room_for_call(self.peer)
            task = self._serve(path, call)
        except CallRefused as refused:
            call.finish(refused.code, refused.text)
            return
        self._door.begin_call(self.peer)
        self._calls[stream] = (call, task)
        task.add_done_callback(lambda _: self._end(stream))
        if self._idle:
            self._idle.cancel()

    def _end(self, stream: int) -> None:
        call, _ = self._calls.pop(stream)
        call.drop()
        self._door.end_call(self.peer)
        self._flush()
        if not self._calls and not self._transport.is_closing():
            self._rest()

    def _rest(self) -> None:
        self._idle = asyncio.get_running_loop().call_later(IDLE_S, self._hang_up)

    def close(self) -> None:
        """Say goodbye."""
        for _, task in self._calls.values():
            task.cancel()
        with suppress(h2.exceptions.ProtocolError):
            self._h2.close_connection()
        self._flush()
        self._hang_up()

    @property
    def is_busy(self) -> bool:
        """Whether a call is on it."""
        return bool(self._calls)

    @property
    def is_paused(self) -> bool:
        """Whether nothing is read of it for a while, as it took too much time."""
        return self._pause is not None

    # a call's side

    def spend(self, seconds: float) -> None:
        """What came took so much of the daemon's time: who takes too much is read from later, and the others are served meanwhile."""
        pause_s = max(self._allowance.spend(seconds), self._door.spend(self.peer, seconds))
        if pause_s and not self._pause and not self._transport.is_closing():
            self._pause = asyncio.get_running_loop().call_later(pause_s, self._go_on)
            self._read_or_not()

    def hold(self, more_bytes: int) -> None:
        """So much more (less) is kept in memory for this user; CallRefused: that is too much."""
        self._door.hold(self.peer, more_bytes)

    def take_on(self, stream: int, size: int) -> None:
        """The other side may send so much more."""
        with suppress(h2.exceptions.ProtocolError):  # the connection has ended
            self._h2.acknowledge_received_data(size, stream)

    def headers(self, stream: int, headers: Headers, *, last: bool = False) -> None:
        """Send headers, or trailers; after the last there is no more to read either."""
        with suppress(h2.exceptions.ProtocolError):  # the stream, or the connection, has ended
            self._h2.send_headers(stream, headers, end_stream=last)
            if last:
                with suppress(h2.exceptions.StreamClosedError):
                    self._h2.reset_stream(stream, h2.errors.ErrorCodes.NO_ERROR)
        self._flush()

    async def data(self, stream: int, data: bytes) -> None:
        """Send it, once the other side has room; CancelledError: it never will."""
        while data:
            try:
                size = min(self._h2.local_flow_control_window(stream), self._h2.max_outbound_frame_size)
                if size > 0 and self._is_writable:
                    self._h2.send_data(stream, data[:size])
                    data = data[size:]
                    self._flush()
                    continue
            except h2.exceptions.ProtocolError as error:
                raise asyncio.CancelledError from error
            self._room.clear()
            await self._room.wait()

    def _flush(self) -> None:
        if (data := self._h2.data_to_send()) and not self._transport.is_closing():
            self._transport.write(data)
