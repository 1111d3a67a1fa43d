"""From a process to its node's daemon: one stream over a unix socket, in a thread of its own.

What the daemon has not acknowledged is kept, bounded, and sent again after a break. Nothing here blocks a caller or raises
into it: without protobuf, without a daemon, with one that hangs or restarts, the job goes on as if this were not here.
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
from typing import TYPE_CHECKING, Any

from allocscope.model.blocks import BlockMap
from allocscope.model.events import Event, EventKind
from allocscope.model.identity import AllocatorRef, Process
from allocscope.model.orders import Order
from allocscope.model.sample import Sample
from allocscope.probe import fork, messages
from allocscope.probe.call import Call, CallBroken
from allocscope.probe.line import Line, who_may
from allocscope.probe.log import log
from allocscope.probe.ring import Item, Kind, Ring

if TYPE_CHECKING:
    from allocscope.proto.v1.probe_service_pb2 import AttachResponse


FIRST_BACKOFF_S, LONGEST_BACKOFF_S = 0.1, 5.0
CAPACITY = 4096
"""Samples, block maps and events kept while no daemon takes them: about an hour of a device."""
LONGEST_CHUNK = 256
"""Samples in one message: far under gRPC's message limit of 4 MiB, and enough that messages cost nothing."""
LONGEST_BACKLOG_BYTES = 256 << 10
"""Packed for a stream and not yet taken by the other side; the rest waits in the ring, where it can be given up."""
HELD_MAP_BYTES = 8 << 20
"""Block maps kept while no daemon takes them; a map is a few KB, of a job with very many pools and streams some 100 KB."""
LARGEST_MAP_BYTES = 2 << 20
"""A larger message than gRPC takes would break every stream that it is sent on."""
KINDS_OF_REFUSAL_TOLD = 32
LONGEST_SOCKET_BYTES = 107
"""Of a unix socket's name (unix(7))."""
LONGEST_GOODBYE_S = 0.1
"""For a stream to end, once everything is acknowledged."""


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
        capacity: int = CAPACITY,
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
        self._line: Line | None = None
        self._told: set[str] = set()
        self.is_reached = False
        """Whether anything ever listened there."""
        _all.add(self)

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
                self._tell_thread()

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
            self._tell_thread()
            self._changed.wait_for(lambda: self._ended or not len(self._ring), timeout_s)
            left = len(self._ring)
        if left == 0:
            self._join()  # a daemon ends the stream that we have ended
        with self._changed:
            self._ended = True
            self._tell_thread()
        self._join()
        return left

    def _join(self) -> None:
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(LONGEST_GOODBYE_S)

    # keeping

    def _is_ours(self) -> bool:
        """False in a forked child, where no thread sends and every lock may be held for ever."""
        return self._pid == os.getpid()

    def abandon(self) -> None:
        """In a forked child: let go of the parent's connection, or the daemon would not see the parent's end."""
        if self._line is not None:
            self._line.close()

    def _keep(self, item: Item) -> None:
        if not self._is_ours() or self._inert:
            return
        with self._changed:
            self._ring.add(item)
            if not self._ring.is_full and self._ring.acknowledged_sequence >= self._loss_told:
                self._tell_lost()
            self._tell_thread()

    def _tell_thread(self) -> None:
        """Wake the thread, wherever it waits."""
        self._changed.notify_all()
        if self._line is not None:
            self._line.wake()

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
        wire = None if self._inert or not self._is_ours() else self._wire()
        if wire is None:
            return None
        try:
            packed: bytes = wire.request(**build(wire.words)).SerializeToString()
        except Exception as error:  # noqa: BLE001 (never into the job)
            self._lose(what, error)
            return None
        if len(packed) > LARGEST_MAP_BYTES:
            self._lose(what, f"it has {len(packed)} bytes")
            return None
        return packed

    def _wire(self) -> messages.Wire | None:
        try:
            return messages.import_wire()
        except Exception as error:  # noqa: BLE001 (a generated module refuses an old protobuf by errors of many types)
            self._give_in(f"cannot use protobuf ({error}); it needs protobuf 5.29 or later in the job's Python")
            return None

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
            self._tell_thread()

    def _tell_once(self, text: str, level: int) -> None:
        kind = re.sub(r"'[^']*'|\"[^\"]*\"|\b[0-9a-f]{8,}\b|\d+", "…", text)
        if kind not in self._told and len(self._told) < KINDS_OF_REFUSAL_TOLD:
            self._told.add(kind)
            log.log(level, "allocscope: %s (the next ones of this kind are not logged)", text)

    # the thread

    def _run(self) -> None:
        backoff_s = FIRST_BACKOFF_S
        while not self._is_over():
            answered = self._attach()
            backoff_s = FIRST_BACKOFF_S if answered else min(backoff_s * 2, LONGEST_BACKOFF_S)
            with self._changed:
                if self._closing and not len(self._ring):
                    return
                if self._closing:
                    self._changed.wait_for(self._is_over, FIRST_BACKOFF_S)
                else:
                    self._changed.wait_for(self._is_closing, backoff_s * random.uniform(0.5, 1.0))

    def _is_over(self) -> bool:
        return self._ended

    def _is_closing(self) -> bool:
        return self._closing or self._ended

    def _attach(self) -> bool:
        """One stream, until it breaks; whether the daemon answered on it."""
        line = self._connect()
        if line is None:
            return False
        wire, answered = self._wire(), False
        try:
            if wire is None:
                return False
            with self._changed:
                self.is_reached = self._hello_due = True
                self._ring.rewind()
            for answer in self._converse(line, Call(wire.method)):
                answered = True
                self._receive(wire.response.FromString(answer))
        except (OSError, CallBroken) as error:
            log.debug("allocscope: the stream to %s broke: %s", self._socket, error)
        except Exception as error:  # noqa: BLE001 (protobuf's refusals are of many types)
            self._tell_once(f"no stream to {self._socket}: {error!r}", logging.INFO)
        finally:
            with self._changed:
                self._line = None
            line.close()
        return answered

    def _connect(self) -> Line | None:
        if len(os.fsencode(self._socket)) > LONGEST_SOCKET_BYTES:
            self._tell_once(f"no daemon can listen at {self._socket}: the name is too long", logging.INFO)
            return None
        try:
            with fork.held_off():
                self._line = Line(self._socket)
                return self._line
        except PermissionError as error:
            self._tell_once(f"{self._socket} is closed to this process: {who_may(self._socket, error)}", logging.INFO)
            return None
        except (OSError, ValueError):  # nobody listens there, or it cannot be a name
            return None

    def _converse(self, line: Line, call: Call) -> Iterator[bytes]:
        """Send what there is, as the daemon has room; its answers. Ends with the call, or when all is over."""
        while not (call.is_over or self._is_over()):
            line.write(call.outgoing)
            while call.backlog_bytes < LONGEST_BACKLOG_BYTES and self._send_next(call):
                line.write(call.outgoing)  # what the socket takes at once makes room for the next
            yield from call.receive(line.wait(for_room=bool(call.outgoing)))

    def _send_next(self, call: Call) -> bool:
        """Send the next thing; False where nothing waits. When we close and nothing waits, the call is ended from this side."""
        with self._changed:
            hello, self._hello_due = self._hello_due, False
            process = self._process
            items = [] if hello else self._ring.take(LONGEST_CHUNK)
            is_last = self._closing and not hello and not items
        for message in [messages.greeting(process, wall_us())] if hello else self._messages_of(items):
            call.send(message)
        if is_last:
            call.end()
        return hello or bool(items)

    def _messages_of(self, items: list[Item]) -> list[bytes]:
        if not items:
            return []
        if items[0].kind is not Kind.SAMPLE:
            return [messages.stamped(items[0].payload, wall_us())]
        try:
            return messages.of_samples(items, wall_us())
        except Exception as error:  # noqa: BLE001 (a negative or huge figure in one of them)
            if len(items) > 1:
                return [message for item in items for message in self._messages_of([item])]
            self._tell_once(f"a sample cannot be sent: {error}", logging.INFO)
            with self._changed:
                self._ring.withdraw(items[0].sequence)
                self._changed.notify_all()
            return []

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
            order = messages.import_wire().words.order_from_wire(message)
            if order is not None and self._on_order is not None:
                self._on_order(order)
        except Exception as error:  # noqa: BLE001 (an order must not end the stream)
            self._tell_once(f"an order failed: {error!r}", logging.INFO)


_all: weakref.WeakSet[Uplink] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for uplink in list(_all):
        uplink.abandon()


os.register_at_fork(after_in_child=_after_fork_in_child)
