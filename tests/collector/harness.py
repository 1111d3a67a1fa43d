"""A real collector process, and a daemon's side of its stream."""

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import httpx

from allocscope.model import (
    AllocatorRef,
    BillEntry,
    Device,
    DeviceBill,
    DeviceReading,
    Line,
    Process,
    Sample,
    chunks,
    wire,
)
from allocscope.proto.v1 import collector_service_pb2 as messages
from allocscope.proto.v1 import collector_service_pb2_grpc as services

WITHIN_S = 60
GIB = 1 << 30
START_US = 1_700_000_000_000_000
END = object()


class CollectorProcess:
    """`allocscope collector` as somebody would start it."""

    def __init__(self, folder: Path, *flags: str, **environ: str) -> None:
        self.addresses_file = folder / "addresses.json"
        self.addresses_file.unlink(missing_ok=True)
        self.database = folder / "collector.db"
        arguments = {
            "--database": f"sqlite:///{self.database}",
            "--grpc-listen": "127.0.0.1:0",
            "--http-listen": "127.0.0.1:0",
            "--addresses-file": str(self.addresses_file),
        }
        given = [part for flag, value in arguments.items() if flag not in flags for part in (flag, value)]
        clean = {name: value for name, value in os.environ.items() if not name.startswith("ALLOCSCOPE_")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "allocscope.cli", "collector", *given, *flags],
            stderr=subprocess.PIPE,
            text=True,
            env={**clean, **environ},
        )
        self.said: list[str] = []
        self._news = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr
        for line in self.process.stderr:
            with self._news:
                self.said.append(line.rstrip())
                self._news.notify_all()
        with self._news:
            self.said.append("(ended)")
            self._news.notify_all()

    def wait_until_said(self, text: str) -> str:
        with self._news:
            found = self._news.wait_for(lambda: any(text in line or line == "(ended)" for line in self.said), WITHIN_S)
            line = next((line for line in self.said if text in line), None)
        assert found, f"{text!r} was not said: {self.said}"
        assert line, f"{text!r} was not said: {self.said}"
        return line

    def ready(self) -> "CollectorProcess":
        self.wait_until_said("ready")
        addresses = json.loads(self.addresses_file.read_text())
        assert addresses["pid"] == self.process.pid
        self.grpc, self.http = addresses["grpc"], addresses["http"]
        return self

    def get(self, path: str, **params) -> httpx.Response:
        return httpx.get(f"http://{self.http}{path}", params=params, timeout=WITHIN_S)

    def kill(self) -> None:
        self.process.kill()
        self._gone()

    def stop(self, number: int = signal.SIGTERM) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self._gone()

    def _gone(self) -> int:
        try:
            status = self.process.wait(WITHIN_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(WITHIN_S)
            raise
        self._reader.join(WITHIN_S)
        if self.process.stderr:
            self.process.stderr.close()
        return status


@contextmanager
def collector(folder: Path, *flags: str, **environ: str) -> Iterator[CollectorProcess]:
    process = CollectorProcess(folder, *flags, **environ)
    try:
        yield process.ready()
        if process.process.poll() is None:
            assert process.stop() == 0, process.said
    finally:
        process.stop()


class Stream:
    """A daemon's stream, as a test drives it."""

    def __init__(
        self, address: str, node: str = "n1", daemon_id: str = "d1", *, hello: bool = True, late: bool = False, **more
    ) -> None:
        """`late`: one of batches that others have overtaken."""
        self.channel = grpc.insecure_channel(address)
        self._requests: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._responses: queue.SimpleQueue[object] = queue.SimpleQueue()
        stub = services.CollectorServiceStub(self.channel)
        self.call = (stub.Backfill if late else stub.Ingest)(self._outgoing(), timeout=120)
        threading.Thread(target=self._listen, daemon=True).start()
        if hello:
            greeting = messages.NodeHello(node=node, daemon_id=daemon_id, version="1.2", **more)
            self.send(messages.IngestRequest(sent_us=now_us(), hello=greeting))

    def _outgoing(self) -> Iterator[messages.IngestRequest]:
        while isinstance(request := self._requests.get(), messages.IngestRequest):
            yield request

    def _listen(self) -> None:
        try:
            for response in self.call:
                self._responses.put(response)
            self._responses.put(END)
        except grpc.RpcError as error:
            self._responses.put(error)

    def send(self, request: messages.IngestRequest) -> None:
        self._requests.put(request)

    def batch(self, batch: messages.Batch, *, sent_us: int | None = None) -> None:
        self.send(messages.IngestRequest(sent_us=now_us() if sent_us is None else sent_us, batch=batch))

    def response(self) -> messages.IngestResponse:
        answer = self._responses.get(timeout=WITHIN_S)
        assert isinstance(answer, messages.IngestResponse), answer
        return answer

    def next_response(self) -> messages.IngestResponse | None:
        """Whenever it comes; None: the stream ended, in order or not."""
        answer = self._responses.get(timeout=120)
        return answer if isinstance(answer, messages.IngestResponse) else None

    def error(self) -> grpc.RpcError:
        """The stream's end, that was not in order."""
        while isinstance(answer := self._responses.get(timeout=WITHIN_S), messages.IngestResponse):
            pass
        assert isinstance(answer, grpc.RpcError), "the stream ended in order"
        return answer

    def until(self, sequence: int) -> list[messages.IngestResponse]:
        """All responses up to the one that acknowledges this number."""
        got = [self.response()]
        while got[-1].acknowledged_sequence < sequence:
            got.append(self.response())
        return got

    def finish(self) -> None:
        """The daemon has nothing more to send, and waits for the rest."""
        self._requests.put(END)
        while isinstance(answer := self._responses.get(timeout=WITHIN_S), messages.IngestResponse):
            pass
        assert answer is END, answer
        self.channel.close()

    def close(self) -> None:
        """As a daemon that is killed."""
        self._requests.put(END)
        self.call.cancel()
        self.channel.close()


@contextmanager
def stream(address: str, node: str = "n1", daemon_id: str = "d1", **more) -> Iterator[Stream]:
    it = Stream(address, node, daemon_id, **more)
    try:
        yield it
    finally:
        it.close()


def now_us() -> int:
    return time.time_ns() // 1000


def process(number: int = 1, job: str = "train", **more) -> Process:
    given = {"rank": number - 1, "devices": (Device(f"GPU-{number}", number - 1, "H200", 100 * GIB),), **more}
    return Process(f"{number:032x}", job, 1000 + number, "host", START_US, **given)


def ref(number: int = 1) -> AllocatorRef:
    return AllocatorRef(f"{number:032x}", f"GPU-{number}")


def sample(sequence: int, **more) -> Sample:
    figures = {
        "allocated_bytes": 10 * GIB,
        "active_bytes": 10 * GIB,
        "requested_bytes": 10 * GIB,
        "reserved_bytes": 12 * GIB,
        "num_alloc_retries": 0,
        "num_ooms": 0,
        **more,
    }
    return Sample(sequence, START_US + sequence * 1_000_000, **figures)


def reading(number: int = 1, **more) -> DeviceReading:
    process_id = f"{number:032x}"
    entries = (
        BillEntry(Line.REQUESTED, 10 * GIB, True, process_id),
        BillEntry(Line.RELEASABLE, 2 * GIB, False, process_id),
        BillEntry(Line.OUTSIDE, 1 * GIB, True, process_id),
        BillEntry(Line.DRIVER, 1 * GIB),
        BillEntry(Line.FREE, 86 * GIB),
    )
    device = Device(f"GPU-{number}", number - 1, "H200", 100 * GIB)
    given = {"free_bytes": 86 * GIB, "driver_bytes": GIB, "bill": DeviceBill(100 * GIB, entries), **more}
    return DeviceReading(device, START_US, True, **given)


def batch(sequence: int, *samples: Sample, number: int = 1, job: str = "train", **more) -> messages.Batch:
    """A batch of one process."""
    given = {
        "processes": [wire.process_to_wire(process(number, job))],
        "samples": [wire.chunk_to_wire(chunk) for chunk in chunks(ref(number), samples)],
        **more,
    }
    return messages.Batch(sequence=sequence, closed_us=START_US, **given)
