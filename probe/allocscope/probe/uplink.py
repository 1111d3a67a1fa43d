"""From a process to its node's daemon: one stream over a unix socket, in a thread of its own.

What the daemon has not acknowledged is kept, bounded, and sent again after a break. Nothing here blocks a caller or raises
into it: without grpcio, without a daemon, with one that hangs or restarts, the job goes on as if this were not here.
"""

from __future__ import annotations

import logging
import os
import random
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from functools import cache
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from allocscope.model.blocks import BlockMap
from allocscope.model.events import Event, EventKind
from allocscope.model.identity import AllocatorRef, Process
from allocscope.model.orders import Order
from allocscope.model.sample import Sample, chunks
from allocscope.probe import fork
from allocscope.probe.ring import Item, Kind, Ring

if TYPE_CHECKING:
    import grpc

    from allocscope.proto.v1.probe_service_pb2 import AttachRequest, AttachResponse

log = logging.getLogger("allocscope.probe")

FIRST_BACKOFF_S, LONGEST_BACKOFF_S = 0.1, 5.0
LONGEST_CHUNK = 256
"""Samples in one message: far under gRPC's message limit of 4 MiB, and enough that messages cost nothing."""
HELD_MAP_BYTES = 8 << 20
"""Block maps kept while no daemon takes them; a map is a few KB, of a job with very many pools and streams some 100 KB."""
LARGEST_MAP_BYTES = 2 << 20
"""A larger message than gRPC takes would break every stream that it is sent on."""
KINDS_OF_REFUSAL_TOLD = 32
LONGEST_SOCKET_BYTES = 107
"""Of a unix socket's name (unix(7)); for a longer one grpc prints errors at every attempt."""
LONGEST_GOODBYE_S = 0.1
"""For a stream to end, once everything is acknowledged."""

CHANNEL_OPTIONS = (
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
    ("grpc.http2.bdp_probe", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 5000),
)
"""No proxy for a unix socket, nothing shared with the job's own channels, and no pings (keepalive is off unless asked for)."""


def wall_us() -> int:
    """Unix microseconds."""
    return time.time_ns() // 1000


class Uplink:
    """Hands on samples, block maps and events; they are kept until the daemon has them on disk.

    Number and hand on in one go (`next_sequence`, then `sample`), one thread after the other: an acknowledgement is of
    everything up to a number.
    """

    def __init__(
        self,
        socket: str,
        process: Process,
        *,
        on_order: Callable[[Order], None] | None = None,
        capacity: int = 4096,
    ) -> None:
        self._socket, self._process, self._on_order = socket, process, on_order
        self._pid = os.getpid()
        self._changed = threading.Condition()
        self._ring = Ring(capacity, HELD_MAP_BYTES)
        self._sequence = 0
        self._loss_told = 0
        """The number of the last DROPPED event; the next one waits until that is acknowledged."""
        self._hello_due = True
        self._closing = self._ended = self._inert = False
        self._thread: threading.Thread | None = None
        self._call: Callable[[], Any] = lambda: None
        self._told: set[str] = set()

    # what callers do

    def start(self) -> None:
        """Begin to connect, and go on for ever."""
        if self._thread is not None or not self._is_ours():
            return
        self._thread = threading.Thread(target=self._run, name="allocscope-uplink", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:  # no more threads, or the interpreter is ending
            self._give_in(f"cannot start a thread ({error})")

    def introduce(self, process: Process) -> None:
        """Say hello anew: a device was first used."""
        if self._is_ours():
            with self._changed:
                self._process, self._hello_due = process, True
                self._changed.notify_all()

    def next_sequence(self) -> int:
        """1, 2, … over samples, block maps and events together."""
        if not self._is_ours():
            return 0
        with self._changed:
            self._sequence += 1
            return self._sequence

    def sample(self, ref: AllocatorRef, sample: Sample) -> None:
        """Hand on counters."""
        self._keep(Item(sample.sequence, Kind.SAMPLE, (ref, sample)))

    def block_map(self, ref: AllocatorRef, block_map: BlockMap) -> None:
        """Hand on a block map. It is packed at once, since as values it is some ten times as large."""
        packed = self._pack("block map", lambda wire: {"block_map": wire.block_map_to_wire(ref, block_map)})
        if packed is not None:
            self._keep(Item(block_map.sequence, Kind.BLOCK_MAP, packed, len(packed)))

    def event(self, event: Event) -> None:
        """Hand on an event."""
        packed = self._pack("event", lambda wire: {"event": wire.event_to_wire(event)})
        if packed is not None:
            self._keep(Item(event.sequence, Kind.EVENT, packed))

    def close(self, timeout_s: float) -> int:
        """Wait until everything is acknowledged, at most `timeout_s`, and end; how much was not."""
        if not self._is_ours():
            return 0
        with self._changed:
            self._closing = True
            self._tell_lost()
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._ended or not len(self._ring), timeout_s)
            self._ended = True
            self._changed.notify_all()
            left = len(self._ring)
        if left == 0:
            self._join()
        call = self._call()
        if call is not None:  # a daemon that does not answer, or does not end the stream
            call.cancel()
        self._join()
        return left

    def _join(self) -> None:
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(LONGEST_GOODBYE_S)

    # keeping

    def _is_ours(self) -> bool:
        """False in a forked child, where no thread sends and every lock may be held for ever."""
        return self._pid == os.getpid()

    def _keep(self, item: Item) -> None:
        if not self._is_ours() or self._inert:
            return
        with self._changed:
            self._ring.add(item)
            if not self._ring.is_full and self._ring.acknowledged_sequence >= self._loss_told:
                self._tell_lost()
            self._changed.notify_all()

    def _tell_lost(self) -> None:
        """Add a DROPPED event for what was given up; it comes after what was numbered before it."""
        lost = self._ring.take_lost_count()
        if not lost or self._inert:
            return
        self._sequence += 1
        self._loss_told = self._sequence
        event = Event(
            self._process.process_id,
            self._sequence,
            wall_us(),
            EventKind.DROPPED,
            dropped_count=lost,
            message=f"the daemon at {self._socket} did not take them in time",
        )
        packed = self._pack("event", lambda wire: {"event": wire.event_to_wire(event)})
        if packed is not None:
            self._ring.add(Item(event.sequence, Kind.EVENT, packed, stands_for=lost))

    def _pack(self, what: str, build: Callable[[Any], dict[str, Any]]) -> bytes | None:
        """An AttachRequest in bytes; None where it cannot be, which is counted and told once."""
        if not self._is_ours() or self._inert:
            return None
        try:
            wire, request = _import_wire()
        except Exception as error:  # noqa: BLE001 (a generated module refuses an old protobuf by errors of many types)
            self._give_in(f"cannot use protobuf ({error})")
            return None
        try:
            packed: bytes = request(**build(wire)).SerializeToString()
        except Exception as error:  # noqa: BLE001 (never into the job)
            self._lose(what, error)
            return None
        if len(packed) > LARGEST_MAP_BYTES:
            self._lose(what, f"it has {len(packed)} bytes")
            return None
        return packed

    def _lose(self, what: str, why: object) -> None:
        with self._changed:
            self._ring.lost_count += 1
        self._tell_once(f"a {what} cannot be sent: {why}", logging.INFO)

    def _give_in(self, why: str) -> None:
        """Nothing can ever be sent: say so once, keep nothing."""
        with self._changed:
            if not self._inert:
                log.info("allocscope: sends nothing: %s", why)
            self._inert = self._ended = True
            self._ring = Ring(1, 0)
            self._changed.notify_all()

    def _tell_once(self, text: str, level: int) -> None:
        kind = re.sub(r"'[^']*'|\"[^\"]*\"|\b[0-9a-f]{8,}\b|\d+", "…", text)
        if kind not in self._told and len(self._told) < KINDS_OF_REFUSAL_TOLD:
            self._told.add(kind)
            log.log(level, "allocscope: %s (the next ones of this kind are not logged)", text)

    # the thread

    def _run(self) -> None:
        backoff_s = FIRST_BACKOFF_S
        while not self._is_over():
            answered = self._attach() if self._is_listening() else False
            backoff_s = FIRST_BACKOFF_S if answered else min(backoff_s * 2, LONGEST_BACKOFF_S)
            with self._changed:
                if self._closing:
                    self._changed.wait_for(self._is_over, FIRST_BACKOFF_S)
                else:
                    self._changed.wait_for(self._is_closing, backoff_s * random.uniform(0.5, 1.0))

    def _is_over(self) -> bool:
        return self._ended

    def _is_closing(self) -> bool:
        return self._closing or self._ended

    def _is_listening(self) -> bool:
        """Whether there is a socket at all; while there is none, grpc is not even imported."""
        if len(os.fsencode(self._socket)) > LONGEST_SOCKET_BYTES:
            self._tell_once(
                f"no daemon can listen at {self._socket}: longer than {LONGEST_SOCKET_BYTES} bytes", logging.INFO
            )
            return False
        try:
            return os.path.exists(self._socket)  # noqa: PTH110 (pathlib raises on a path that cannot be)
        except ValueError:
            return False

    def _attach(self) -> bool:
        """One stream, until it breaks; whether the daemon answered on it."""
        try:
            with fork.held_off():
                import grpc

                from allocscope.proto.v1.probe_service_pb2_grpc import ProbeServiceStub
        except Exception as error:  # noqa: BLE001 (a generated module refuses an old grpcio by a RuntimeError)
            self._give_in(f"cannot use grpcio ({error})")
            return False
        stream = _Stream()
        # The channel and the call are held by this thread's frames only: in a forked child they are then never destroyed,
        # which would wait for locks of threads that are not there.
        channel = grpc.insecure_channel(f"unix:{quote(self._socket)}", options=CHANNEL_OPTIONS)
        call = None
        try:
            with self._changed:
                self._ring.rewind()
                self._hello_due = True
            call = ProbeServiceStub(channel).Attach(self._requests(stream))
            self._call = weakref.ref(call)
            for response in call:
                stream.answered = True
                self._receive(response)
        except grpc.RpcError as error:
            log.debug("allocscope: the stream to %s broke: %s", self._socket, _code(error))
        except Exception as error:  # noqa: BLE001 (an interpreter that ends lets no thread start)
            log.debug("allocscope: no stream to %s: %r", self._socket, error)
        finally:
            with self._changed:
                stream.is_broken = True
                self._changed.notify_all()
            if call is not None:
                call.cancel()
            channel.close()
        return stream.answered

    def _requests(self, stream: _Stream) -> Iterator[AttachRequest]:
        """What goes out on one stream, run by a thread of grpc's.

        It ends when the stream broke, or when we close and everything is sent: the daemon then knows that no more will come.
        """
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: stream.is_broken or self._closing or self._hello_due or self._ring.has_waiting
                )
                if stream.is_broken or self._ended or not (self._hello_due or self._ring.has_waiting):
                    return
                hello, self._hello_due = self._hello_due, False
                process = self._process
                items = [] if hello else self._ring.take(LONGEST_CHUNK)
            yield from self._greet(process) if hello else self._unpack(items)

    def _greet(self, process: Process) -> Iterator[AttachRequest]:
        try:
            wire, new_request = _import_wire()
            request = new_request(sent_us=wall_us(), hello=wire.process_to_wire(process))
        except Exception as error:  # noqa: BLE001 (never into grpc, which would print it)
            self._give_in(f"cannot say who it is ({error})")
            return
        yield request

    def _unpack(self, items: list[Item]) -> Iterator[AttachRequest]:
        if items[0].kind is not Kind.SAMPLE:
            request = _import_wire()[1].FromString(items[0].payload)
            request.sent_us = wall_us()
            yield request
            return
        try:
            requests = _chunk_requests(items)
        except Exception as error:  # noqa: BLE001 (a negative or huge figure)
            if len(items) > 1:
                for item in items:
                    yield from self._unpack([item])
                return
            self._lose("sample", error)
            with self._changed:
                self._ring.withdraw(items[0].sequence)
                self._ring.lost_count -= 1  # counted by _lose already
                self._changed.notify_all()
            return
        yield from requests

    def _receive(self, response: AttachResponse) -> None:
        with self._changed:
            self._ring.acknowledge(response.acknowledged_sequence)
            self._changed.notify_all()
        for text in response.refused:
            self._tell_once(f"the daemon refused: {text}", logging.WARNING)
        for message in response.orders:
            self._obey(message)

    def _obey(self, message: Any) -> None:
        try:
            order = _import_wire()[0].order_from_wire(message)
            if order is not None and self._on_order is not None:
                self._on_order(order)
        except Exception as error:  # noqa: BLE001 (an order must not end the stream)
            self._tell_once(f"an order failed: {error!r}", logging.INFO)


@cache
def _import_wire() -> tuple[Any, type[AttachRequest]]:
    """`allocscope.model.wire` and the request, which need protobuf."""
    with fork.held_off():
        from allocscope.model import wire
        from allocscope.proto.v1.probe_service_pb2 import AttachRequest
    return wire, AttachRequest


class _Stream:
    """What is known of one stream."""

    __slots__ = ("answered", "is_broken")

    def __init__(self) -> None:
        self.answered = self.is_broken = False


def _chunk_requests(items: list[Item]) -> list[AttachRequest]:
    wire, new_request = _import_wire()
    ref = items[0].payload[0]
    return [
        new_request(sent_us=wall_us(), samples=wire.chunk_to_wire(chunk))
        for chunk in chunks(ref, (item.payload[1] for item in items))
    ]


def _code(error: grpc.RpcError) -> object:
    code = getattr(error, "code", None)
    return code() if callable(code) else error
