"""A daemon's side of ProbeService: records what comes, acknowledges it, or does not. Also a process of its own, to be killed."""

import os
import sys
import threading
from collections.abc import Callable
from concurrent import futures
from pathlib import Path
from typing import Self

import grpc

from allocscope.model import wire
from allocscope.model.blocks import BlockMap
from allocscope.model.events import Event
from allocscope.model.identity import Process
from allocscope.model.orders import Order
from allocscope.model.sample import Sample
from allocscope.proto.v1.probe_service_pb2 import AttachRequest, AttachResponse
from allocscope.proto.v1.probe_service_pb2_grpc import ProbeServiceServicer, add_ProbeServiceServicer_to_server

LONG_S = 30
"""What never takes so long unless it is broken."""


class Receiver(ProbeServiceServicer):
    """Listens at `socket` between `start` and `stop`; `streams` has, for each stream in turn, what came on it."""

    def __init__(self, socket: Path, *, acknowledges: bool = True) -> None:
        self.socket, self.acknowledges = socket, acknowledges
        self.streams: list[list[AttachRequest]] = []
        self.to_send: list[AttachResponse] = []
        self.options: list[tuple[str, int]] = []
        """The server's."""
        self.ended = 0
        self._changed = threading.Condition()
        self._server: grpc.Server | None = None

    def start(self) -> Self:
        self._server = grpc.server(futures.ThreadPoolExecutor(16), options=self.options)
        add_ProbeServiceServicer_to_server(self, self._server)
        self._server.add_insecure_port(f"unix:{self.socket}")
        self._server.start()
        return self

    def stop(self) -> None:
        if self._server is not None:
            self._server.stop(0).wait(LONG_S)
            self._server = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def Attach(self, request_iterator, context):
        requests: list[AttachRequest] = []
        with self._changed:
            self.streams.append(requests)
        try:
            for request in request_iterator:
                with self._changed:
                    requests.append(request)
                    responses, self.to_send = self.to_send, []
                    self._changed.notify_all()
                yield from responses
                numbers = numbers_in(request)
                if numbers and self.acknowledges:
                    yield AttachResponse(acknowledged_sequence=numbers[-1])
        finally:
            with self._changed:
                self.ended += 1
                self._changed.notify_all()

    def say(self, *, orders: tuple[Order, ...] = (), refused: tuple[str, ...] = ()) -> None:
        """Sent with the answer to the next request."""
        with self._changed:
            self.to_send.append(AttachResponse(orders=[wire.order_to_wire(o) for o in orders], refused=refused))

    def wait_for(self, holds: Callable[[], object]) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: bool(holds()), LONG_S), f"never came; there is: {self.kinds()}"

    # what came, over all streams

    def requests(self) -> list[AttachRequest]:
        return [request for stream in self.streams for request in stream]

    def kinds(self) -> list[str]:
        return [str(request.WhichOneof("message")) for request in self.requests()]

    def numbers(self) -> list[int]:
        return [number for request in self.requests() for number in numbers_in(request)]

    def hellos(self) -> list[Process]:
        return [wire.process_from_wire(r.hello) for r in self.requests() if r.HasField("hello")]

    def samples(self) -> list[Sample]:
        chunks = (wire.chunk_from_wire(r.samples) for r in self.requests() if r.HasField("samples"))
        return [sample for chunk in chunks for sample in chunk.samples()]

    def block_maps(self) -> list[BlockMap]:
        return [wire.block_map_from_wire(r.block_map)[1] for r in self.requests() if r.HasField("block_map")]

    def events(self) -> list[Event]:
        return [wire.event_from_wire(r.event) for r in self.requests() if r.HasField("event")]


def numbers_in(request: AttachRequest) -> list[int]:
    """The sequence numbers that a request brings."""
    which = request.WhichOneof("message")
    if which == "samples":
        return list(request.samples.sequence)
    return [getattr(request, which).sequence] if which in ("block_map", "event") else []


class _Writing(Receiver):
    """Has each request on disk before it is acknowledged, as the daemon has."""

    def __init__(self, socket: Path, log: Path) -> None:
        super().__init__(socket)
        self._log = log.open("a")

    def Attach(self, request_iterator, context):
        for request in request_iterator:
            numbers = numbers_in(request)
            self._log.write("".join(f"{number}\n" for number in numbers) or "hello\n")
            self._log.flush()
            if numbers:
                yield AttachResponse(acknowledged_sequence=numbers[-1])


def main() -> None:
    """receiver.py SOCKET LOG: until killed."""
    socket, log = map(Path, sys.argv[1:])
    _Writing(socket, log).start()
    print("listening", flush=True)
    os.read(0, 1)


if __name__ == "__main__":
    main()
