"""Samples a second from a daemon's stream through a collector process into SQLite, beside a bare executemany of the same rows.

Two streams. `backlog`: batches of 2,000 samples of 16 allocators, as after an outage. `live`: what a node with 8 devices and 16 jobs
sends each second: 16 samples, 8 bills, now and then a block map. The bare insert is one transaction and one statement a table, its rows
are ready as tuples, its file has the same schema and settings. The streams' batches are encoded beforehand.
"""

from __future__ import annotations

import queue
import sqlite3
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, Self

import grpc

from allocscope.allocator.player import Player
from allocscope.allocator.recording import read_recording
from allocscope.collector.decode import decode
from allocscope.model import (
    AllocatorRef,
    BillEntry,
    BlockMap,
    Device,
    DeviceBill,
    DeviceProcess,
    DeviceReading,
    Line,
    Process,
    Sample,
    chunks,
    wire,
)
from allocscope.proto.v1.collector_service_pb2 import Batch, IngestRequest, IngestResponse, NodeHello
from allocscope.storage.sql import open_repository
from allocscope.storage.sqlite import CHECKPOINT_PAGES
from tests.bench.figures import Figure
from tests.e2e.processes import Machine, Service, recording

ROUNDS = 7
WINDOW = 16
"""Batches on their way, as a daemon has them."""
JOBS, DEVICES = 16, 8
BACKLOG_EACH, BACKLOG_BATCHES = 125, 24
LIVE_BATCHES = 600
MAP_EVERY = 10
TABLES = ("samples", "block_maps", "bills")
METHOD = "/allocscope.proto.v1.CollectorService/Ingest"


def figures() -> Iterator[Figure]:
    """Of both streams."""
    for name, each, batches, live in (
        ("backlog", BACKLOG_EACH, BACKLOG_BATCHES, False),
        ("live", 1, LIVE_BATCHES, True),
    ):
        node = Node(each, live=live)
        with tempfile.TemporaryDirectory(prefix="as-") as folder:
            through, bare = _measure(Path(folder), node, batches)
        aim = "at least 0.5"
        yield Figure(
            f"{name}: collector / bare executemany", [a / b for a, b in zip(through, bare, strict=True)], "", aim
        )
        yield Figure(f"{name}: collector", through, "samples/s")
        yield Figure(f"{name}: bare executemany", bare, "samples/s")


def _measure(folder: Path, node: Node, batch_count: int) -> tuple[list[float], list[float]]:
    """Samples a second, round by round: through a collector, and bare."""
    through, bare = [], []
    machine = Machine(folder)
    try:
        collector = machine.collector()
        with closing(_bare_database(folder / "bare.db")) as connection, Stream(collector) as stream:
            for turn in range(ROUNDS + 1):
                batches = [node.batch() for _ in range(batch_count)]
                count = sum(len(chunk.sequence) for batch in batches for chunk in batch.samples)
                rows = Rows(batches)
                requests = [IngestRequest(batch=batch).SerializeToString() for batch in batches]
                timed = [partial(rows.insert, connection), partial(stream.send, requests, batches[-1].sequence)]
                seconds = [0.0, 0.0]
                for which in (0, 1) if turn % 2 else (1, 0):
                    began = time.perf_counter()
                    timed[which]()
                    seconds[which] = time.perf_counter() - began
                if turn:  # the first is to warm up
                    bare.append(count / seconds[0])
                    through.append(count / seconds[1])
    finally:
        machine.close()
    return through, bare


class Node:
    """Makes the batches of a node, one after the other, from what recorded jobs did."""

    def __init__(self, samples_each: int, *, live: bool) -> None:
        self._each, self._live = samples_each, live
        self._number = 0
        uuids = [f"GPU-{n}" for n in range(DEVICES)]
        self.processes = [_process(n, uuids[n % DEVICES]) for n in range(JOBS)]
        self.refs = [AllocatorRef(p.process_id, p.devices[0].uuid) for p in self.processes]
        run = list(Player(read_recording(recording("varlen-1-2985"))))
        self._samples = [one for one in run if isinstance(one, Sample)]
        self._map = next(one for one in reversed(run) if isinstance(one, BlockMap))

    def batch(self) -> Batch:
        """The next one."""
        self._number += 1
        first = (self._number - 1) * (self._each + 1) + 1
        now_us = 1_800_000_000_000_000 + first * 1_000_000
        batch = Batch(sequence=self._number, closed_us=now_us, processes=map(wire.process_to_wire, self.processes))
        for ref in self.refs:
            of_ref = (self._sample(first + n) for n in range(self._each))
            batch.samples.extend(wire.chunk_to_wire(chunk) for chunk in chunks(ref, of_ref))
        if self._live:
            block_map = replace(self._map, sequence=first + self._each, time_us=now_us)
            due = (ref for n, ref in enumerate(self.refs) if (self._number + n) % MAP_EVERY == 0)
            batch.block_maps.extend(wire.block_map_to_wire(ref, block_map) for ref in due)
            batch.devices.extend(wire.reading_to_wire(self._reading(n, now_us)) for n in range(DEVICES))
        return batch

    def _sample(self, sequence: int) -> Sample:
        recorded = self._samples[sequence % len(self._samples)]
        return replace(recorded, sequence=sequence, time_us=1_800_000_000_000_000 + sequence * 1_000_000)

    def _reading(self, n: int, now_us: int) -> DeviceReading:
        tenants = [p for p in self.processes if p.devices[0].uuid == f"GPU-{n}"]
        own = (Line.REQUESTED, Line.ROUNDING, Line.AWAITING_FREE, Line.STRANDED, Line.RELEASABLE, Line.OUTSIDE)
        entries = [BillEntry(line, 1 << 20, process_id=p.process_id) for p in tenants for line in own]
        device = replace(tenants[0].devices[0], index=n)
        assert device.total_bytes is not None
        entries.append(BillEntry(Line.FREE, device.total_bytes - len(entries) * (1 << 20)))
        users = tuple(DeviceProcess(pid=p.pid, process_id=p.process_id, name=p.job) for p in tenants)
        bill = DeviceBill(device.total_bytes, tuple(entries))
        return DeviceReading(device, now_us, from_nvml=True, processes=users, bill=bill)


def _process(n: int, uuid: str) -> Process:
    device = Device(uuid, n % DEVICES, model="NVIDIA H100 80GB HBM3", total_bytes=80 << 30)
    return Process(
        process_id=f"{n:032x}",
        job=f"job-{n}",
        pid=1000 + n,
        host="node",
        started_us=1_800_000_000_000_000,
        rank=0,
        world_size=1,
        allocator_conf="",
        devices=(device,),
    )


class Rows:
    """The very rows that a collector stores of batches, in the order in which they come; got from a database of their own."""

    def __init__(self, batches: Sequence[Batch]) -> None:
        read = [decode(b, node="n", daemon_id="d", received_us=b.closed_us)[0] for b in batches]
        with tempfile.TemporaryDirectory(prefix="as-") as folder:
            path = Path(folder) / "rows.db"
            repository = open_repository(f"sqlite:///{path}")
            repository.store(read)
            repository.close()
            with closing(sqlite3.connect(path)) as connection:
                selected = ((table, _arrived(connection, table)) for table in TABLES)
                self._rows = {table: rows for table, rows in selected if rows}

    def insert(self, connection: sqlite3.Connection) -> None:
        """All of them in one transaction."""
        connection.execute("BEGIN IMMEDIATE")
        for table, rows in self._rows.items():
            connection.executemany(f"INSERT INTO {table} VALUES ({', '.join('?' * len(rows[0]))})", rows)
        connection.execute("COMMIT")


def _arrived(connection: sqlite3.Connection, table: str) -> list[tuple[Any, ...]]:
    return connection.execute(f"SELECT * FROM {table} ORDER BY received_us, allocator_id, time_us").fetchall()


def _bare_database(path: Path) -> sqlite3.Connection:
    open_repository(f"sqlite:///{path}").close()
    connection = sqlite3.connect(path, isolation_level=None)
    for pragma in ("journal_mode = wal", "synchronous = normal", f"wal_autocheckpoint = {CHECKPOINT_PAGES}"):
        connection.execute(f"PRAGMA {pragma}").close()
    return connection


class Stream:
    """A daemon's stream; batches go out encoded."""

    def __init__(self, collector: Service) -> None:
        self._channel = grpc.insecure_channel(collector.addresses["grpc"])
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._sent = self._acknowledged = 0
        method: Any = self._channel.stream_stream(METHOD, None, IngestResponse.FromString)
        hello = IngestRequest(hello=NodeHello(node="n", daemon_id="d" * 32, version="0"))
        self._responses = method(chain([hello.SerializeToString()], iter(self._outbox.get, None)))
        self._thread = threading.Thread(target=self._read)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._outbox.put(None)
        self._responses.cancel()
        self._thread.join()
        self._channel.close()

    def send(self, requests: Sequence[bytes], last: int) -> None:
        """Returns when all are acknowledged; `last` is the last one's number."""
        waiting = iter(requests)
        with self._changed:
            while self._acknowledged < last:
                room = WINDOW - (self._sent - self._acknowledged)
                for request in islice(waiting, room):
                    self._sent += 1
                    self._outbox.put(request)
                assert self._changed.wait(60), "the collector acknowledges nothing"

    def _read(self) -> None:
        try:
            for response in self._responses:
                assert not response.rejections, response.rejections[0].message
                with self._changed:
                    self._acknowledged = response.acknowledged_sequence
                    self._changed.notify()
        except grpc.RpcError:
            if self._responses.code() is not grpc.StatusCode.CANCELLED:
                raise
