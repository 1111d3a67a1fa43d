"""A daemon's two neighbours, played by a test: a probe with a raw stream, and a collector; and the daemon as a real process."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

import grpc

from allocscope.daemon.intake import ClosedBatch
from allocscope.daemon.procfs import Procfs
from allocscope.model import AllocatorRef, Device, Event, Process, Sample
from allocscope.model.sample import chunks
from allocscope.model.wire import chunk_to_wire, event_to_wire, process_to_wire
from allocscope.proto.v1.collector_service_pb2 import Batch, IngestRequest, IngestResponse, NodeHello, ProcessOrder
from allocscope.proto.v1.collector_service_pb2_grpc import (
    CollectorServiceServicer,
    add_CollectorServiceServicer_to_server,
)
from allocscope.proto.v1.probe_service_pb2 import AttachRequest, AttachResponse
from allocscope.proto.v1.probe_service_pb2_grpc import ProbeServiceStub

LIMITED = """
import os, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, ({0}, {0}))
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""
WAIT_S = 20
GIB = 1 << 30


def process(letter: str = "a", **changes) -> Process:
    """A process on GPU-1."""
    known = {
        "process_id": letter * 32,
        "job": "train",
        "pid": os.getpid(),
        "host": "elsewhere",
        "started_us": 1_700_000_000_000_000,
        "rank": 0,
        "world_size": 2,
        "allocator_conf": "",
        "devices": (Device("GPU-1", 0, "NVIDIA H200", 80 * GIB),),
    }
    return Process(**{**known, **changes})


def sample(sequence: int, **changes) -> Sample:
    """Counters of an allocator that is well."""
    known = {
        "allocated_bytes": 15 * GIB,
        "active_bytes": 15 * GIB,
        "requested_bytes": 15 * GIB,
        "reserved_bytes": 20 * GIB,
        "inactive_split_bytes": 2 * GIB,
        "num_alloc_retries": 3,
        "num_ooms": 1,
        "private_pools_reserved_bytes": 0,
        "device_total_bytes": 80 * GIB,
        "device_free_bytes": 50 * GIB,
        "process_used_bytes": 21 * GIB,
    }
    return Sample(sequence, 1_700_000_000_000_000 + sequence, **{**known, **changes})


def acknowledge(closed: ClosedBatch) -> None:
    """As is done once it is on disk."""
    for owed, sequence in closed.owed.items():
        owed.acknowledge(sequence)


class Clock:
    """Stands still."""

    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class Reads(Procfs):
    """Counts what is read."""

    def __init__(self, root: Path) -> None:
        self.count = Counter[str]()
        super().__init__(root)

    def read(self, pid: int | str, name: str) -> str | None:
        self.count[name] += 1
        return super().read(pid, name)


class FakeProbe:
    """One stream to a daemon, sending what a test says."""

    def __init__(self, socket: Path, hello: Process | None = None) -> None:
        self._channel = grpc.insecure_channel(f"unix:{socket}", options=[("grpc.use_local_subchannel_pool", 1)])
        self._requests: queue.SimpleQueue[AttachRequest | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self.acknowledged = 0
        self.refused: list[str] = []
        self.orders: list[object] = []
        self.over = False
        self._call = ProbeServiceStub(self._channel).Attach(iter(self._requests.get, None))
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()
        self.hello = hello
        if hello:
            self.send(hello=process_to_wire(hello))

    def send(self, **message) -> None:
        self._requests.put(AttachRequest(sent_us=1, **message))

    def samples(self, *samples: Sample, device: str = "GPU-1", process_id: str | None = None) -> None:
        whose = process_id or (self.hello.process_id if self.hello else "")
        ref = AllocatorRef(whose, device)
        for chunk in chunks(ref, samples):
            self.send(samples=chunk_to_wire(chunk))

    def event(self, event: Event) -> None:
        self.send(event=event_to_wire(event))

    def wait_for(self, holds: Callable[[FakeProbe], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: holds(self), WAIT_S), (self.acknowledged, self.refused, self.over)

    def wait_acknowledged(self, sequence: int) -> None:
        self.wait_for(lambda probe: probe.acknowledged >= sequence)

    def end(self) -> None:
        """End in order: what was sent is still to be acknowledged."""
        self._requests.put(None)
        self._thread.join(WAIT_S)
        self._channel.close()

    def break_off(self) -> None:
        """Go away in the middle."""
        self._call.cancel()
        self._requests.put(None)
        self._thread.join(WAIT_S)
        self._channel.close()

    def _read(self) -> None:
        try:
            for response in self._call:
                self._take(response)
        except grpc.RpcError:
            pass
        with self._changed:
            self.over = True
            self._changed.notify_all()

    def _take(self, response: AttachResponse) -> None:
        with self._changed:
            self.acknowledged = max(self.acknowledged, response.acknowledged_sequence)
            self.refused += response.refused
            self.orders += response.orders
            self._changed.notify_all()


class FakeCollector(CollectorServiceServicer):
    """Keeps what it gets, and acknowledges it, unless it is told not to."""

    def __init__(
        self,
        address: str = "127.0.0.1:0",
        *,
        largest_message_bytes: int = 16 << 20,
        also: Sequence[Callable[[grpc.Server], None]] = (),
    ) -> None:
        """`also` adds further services to its server."""
        self.changed = threading.Condition()
        self.hellos: list[NodeHello] = []
        self.batches: list[Batch] = []
        self.acknowledges = True
        self.stored = 0
        """Its first answer on a stream."""
        self.refusal: tuple[grpc.StatusCode, str] | None = None
        self.takes_late = True
        self.late: list[Batch] = []
        """What came by Backfill."""
        self.late_over = False
        """Its daemon ended such a stream, in order."""
        self.to_say: queue.SimpleQueue[IngestResponse] = queue.SimpleQueue()
        options = [("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", largest_message_bytes)]
        self._server = grpc.server(ThreadPoolExecutor(32), options=options)
        add_CollectorServiceServicer_to_server(self, self._server)
        for add in also:
            add(self._server)
        self.port = self._server.add_insecure_port(address)
        self.address = f"127.0.0.1:{self.port}"
        self._server.start()

    def Ingest(self, request_iterator: Iterator[IngestRequest], context) -> Iterator[IngestResponse]:
        for request in request_iterator:
            with self.changed:
                if request.WhichOneof("message") == "hello":
                    self.hellos.append(request.hello)
                else:
                    self.batches.append(request.batch)
                    if self.acknowledges:
                        self.stored = max(self.stored, request.batch.sequence)
                self.changed.notify_all()
            if self.refusal:
                context.abort(*self.refusal)
            while not self.to_say.empty():
                yield self.to_say.get()
            yield IngestResponse(acknowledged_sequence=self.stored)

    def Backfill(self, request_iterator: Iterator[IngestRequest], context) -> Iterator[IngestResponse]:
        if not self.takes_late:
            context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
        for request in request_iterator:
            if request.WhichOneof("message") == "hello":
                yield IngestResponse()
                continue
            with self.changed:
                self.late.append(request.batch)
                self.changed.notify_all()
            yield IngestResponse(acknowledged_sequence=request.batch.sequence)
        with self.changed:
            self.late_over = context.is_active()
            self.changed.notify_all()

    def order(self, order: ProcessOrder) -> None:
        self.to_say.put(IngestResponse(orders=[order]))

    def wait_for(self, holds: Callable[[FakeCollector], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: holds(self), WAIT_S), self.batches[-3:]

    def sequences(self, process_id: str = "a" * 32) -> list[int]:
        """Of the samples of a process, as they came, batches that came twice once."""
        once = {batch.sequence: batch for batch in self.batches}
        return [
            sequence
            for _, batch in sorted(once.items())
            for chunk in batch.samples
            if chunk.allocator.process_id == process_id
            for sequence in chunk.sequence
        ]

    def stop(self) -> None:
        self._server.stop(0).wait()


class DaemonProcess:
    """`allocscope daemon` as a process of its own, in a folder of its own."""

    def __init__(self, folder: Path, collector: str = "127.0.0.1:1", **settings: object) -> None:
        """With `settings` it is told; `most_descriptors` is the system's limit."""
        self.folder = folder
        most_descriptors = settings.pop("most_descriptors", None)
        limited = () if most_descriptors is None else ("-c", LIMITED.format(most_descriptors))
        given = {
            "node": "node-1",
            "socket": folder / "daemon.sock",
            "spool": folder / "spool",
            "collector": collector,
            "metrics_listen": "127.0.0.1:0",
            "addresses_file": folder / "addresses.json",
            "interval_s": 0.05,
            "log_format": "json",
            "nvml": "false",
            **settings,
        }
        flags = [part for name, value in given.items() for part in (f"--{name.replace('_', '-')}", str(value))]
        environ = {name: value for name, value in os.environ.items() if not name.startswith("ALLOCSCOPE_")}
        self.process = subprocess.Popen(
            [sys.executable, *limited, "-m", "allocscope.cli", "daemon", *flags],
            stderr=subprocess.PIPE,
            text=True,
            env=environ,
        )
        self.pid = self.process.pid
        self.log: list[dict[str, Any]] = []
        self._changed = threading.Condition()
        self._ended = False
        self._thread = threading.Thread(target=self._read_log, daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        try:
            self.wait_log("ready")
        except BaseException:
            self.kill()
            raise
        addresses = json.loads((self.folder / "addresses.json").read_text())
        self.socket, self.metrics = Path(addresses["socket"]), addresses["metrics"]
        assert addresses["pid"] == self.pid
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.kill()

    def wait_log(self, event: str, why: str = "") -> dict[str, Any]:
        """The first line with this event, and with a `why` that begins so."""

        def found() -> dict[str, Any] | None:
            events = (line for line in self.log if line.get("event") == event)
            return next((line for line in events if line.get("why", "").startswith(why)), None)

        with self._changed:
            assert self._changed.wait_for(lambda: found() or self._ended, WAIT_S), self.log
            line = found()
        assert line is not None, self.log
        return line

    def stop(self) -> int:
        """SIGTERM; its exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.wait()

    def kill(self) -> None:
        """kill -9."""
        self.process.kill()
        self.wait()

    def wait(self) -> int:
        status = self.process.wait(WAIT_S)
        self._thread.join(WAIT_S)
        assert self.process.stderr is not None
        self.process.stderr.close()
        return status

    def scrape(self) -> str:
        with urllib.request.urlopen(f"http://{self.metrics}/metrics", timeout=WAIT_S) as response:
            text: bytes = response.read()
        return text.decode()

    def figures(self, prefix: str) -> dict[str, float]:
        """The series that begin so."""
        lines = [line for line in self.scrape().splitlines() if line.startswith(prefix)]
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}

    def _read_log(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._changed:
                self.log.append(json.loads(line) if line.startswith("{") else {"event": line.rstrip("\n")})
                self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()
