"""One call that brings a capture to the collector, by gRPC's threads.

Not by grpc.aio: where the collector answers before it has everything, as it does for what it has already or never takes, that
gives up with INTERNAL ("Internal error from Core", 1.66 to 1.85) as often as with the answer.
"""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import suppress

import grpc

from allocscope.daemon.capture_spool import StoredCapture
from allocscope.proto.v1.capture_service_pb2 import KeepRequest
from allocscope.proto.v1.capture_service_pb2_grpc import CaptureServiceStub

PATIENCE_S = 300.0
"""For an answer, beside the time that sending takes at an eighth of the rate: other nodes may be in line there. Keepalive finds a dead one."""


class CaptureRefused(Exception):  # noqa: N818 (by the collector, or the way to it)
    """A capture was not taken."""

    def __init__(self, code: grpc.StatusCode, why: str) -> None:
        super().__init__(f"{code.name}: {why}")
        self.code, self.why = code, why


async def send(channel: grpc.Channel, node: str, stored: StoredCapture, bytes_per_s: int) -> str:
    """The id of the capture that the collector has kept; CaptureRefused: none. Closes `stored`."""
    requests = _Requests(node, stored, bytes_per_s)
    answered, loop = asyncio.Event(), asyncio.get_running_loop()

    def on_answer(_: object) -> None:
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(answered.set)

    timeout_s = PATIENCE_S + 8 * stored.gzip_bytes / bytes_per_s
    call = CaptureServiceStub(channel).Keep.future(requests, timeout=timeout_s)
    call.add_done_callback(on_answer)
    try:
        await answered.wait()
        return call.result().capture_id
    except grpc.RpcError as error:
        raise CaptureRefused(call.code(), call.details() or "") from error
    finally:
        call.cancel()
        requests.end()


class _Requests:
    """The hello and the pieces, no faster than told. gRPC asks for them in a thread of its own, until it is over."""

    def __init__(self, node: str, stored: StoredCapture, bytes_per_s: int) -> None:
        self._stored, self._bytes_per_s = stored, bytes_per_s
        self._hello: KeepRequest | None = KeepRequest(hello=stored.hello)
        self._hello.hello.node = node
        self._began_s, self._sent_bytes = time.monotonic(), 0
        self._lock, self._is_over = threading.Lock(), threading.Event()

    def __iter__(self) -> _Requests:
        return self

    def __next__(self) -> KeepRequest:
        self._is_over.wait(max(self._began_s + self._sent_bytes / self._bytes_per_s - time.monotonic(), 0))
        with self._lock:
            request = None if self._is_over.is_set() else self._next()
        if request is None:
            raise StopIteration
        return request

    def end(self) -> None:
        """Nothing more is sent."""
        self._is_over.set()
        with self._lock:
            self._stored.close()

    def _next(self) -> KeepRequest | None:
        if self._hello is not None:
            hello, self._hello = self._hello, None
            return hello
        piece = self._stored.piece()
        self._sent_bytes += len(piece)
        return KeepRequest(piece=piece) if piece else None
