"""A daemon's side of CaptureService, and the database as captures leave it."""

from __future__ import annotations

import gzip
import pickle
import secrets
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path

import grpc

from allocscope.model import Capture, CaptureReason, Process, wire
from allocscope.proto.v1 import capture_service_pb2 as messages
from allocscope.proto.v1 import capture_service_pb2_grpc as services
from tests.collector.harness import START_US, process

PIECE_BYTES = 1 << 20
SNAPSHOT = pickle.dumps({"segments": [], "device_traces": [], "padding": [secrets.token_bytes(1000)] * 30}, protocol=4)


def new_id() -> str:
    return secrets.token_hex(16)


def capture(capture_id: str, number: int = 1, **more) -> Capture:
    given = {"device_uuid": f"GPU-{number}", "snapshot_bytes": len(SNAPSHOT), "history_entries": 5, **more}
    reason = given.pop("reason", CaptureReason.OOM)
    return Capture(capture_id, f"{number:032x}", START_US + 7_000_000, reason, **given)


def hello(capture: Capture, process: Process, node: str = "n1") -> messages.KeepRequest:
    introduced = messages.CaptureHello(
        node=node, capture=wire.capture_to_wire(capture), process=wire.process_to_wire(process)
    )
    return messages.KeepRequest(hello=introduced)


def pieces(packed: bytes, each: int = PIECE_BYTES) -> Iterator[messages.KeepRequest]:
    return (messages.KeepRequest(piece=packed[at : at + each]) for at in range(0, len(packed), each))


def send(address: str, requests: Iterable[messages.KeepRequest], timeout_s: float = 60) -> messages.KeepResponse:
    with grpc.insecure_channel(address) as channel:
        return services.CaptureServiceStub(channel).Keep(iter(list(requests)), timeout=timeout_s)


def refusal(address: str, requests: Iterable[messages.KeepRequest]) -> tuple[grpc.StatusCode, str]:
    """How a call ends that brings nothing."""
    try:
        send(address, requests)
    except grpc.RpcError as error:
        return error.code(), error.details() or ""
    raise AssertionError("it was kept")


def bring(address: str, capture_id: str, number: int = 1, *, job: str = "train", snapshot: bytes = SNAPSHOT, **more):
    """A whole capture, as a daemon brings it."""
    it = capture(capture_id, number, **{"snapshot_bytes": len(snapshot), **more})
    answer = send(address, [hello(it, process(number, job)), *pieces(gzip.compress(snapshot))])
    assert answer.capture_id == capture_id


def rows(database: Path, query: str, *values: object) -> list[tuple]:
    with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True, timeout=30)) as connection:
        return connection.execute(query, values).fetchall()


def kept(database: Path, capture_id: str) -> bytes | None:
    """The gzip stream that is there for readers; None: there is none."""
    query = """SELECT content FROM capture_pieces JOIN captures USING (upload_number)
               WHERE capture_id = ? ORDER BY piece_number"""
    found = [piece for (piece,) in rows(database, query, capture_id)]
    return b"".join(found) if found else None


def state(database: Path, capture_id: str) -> tuple[str, str | None] | None:
    found = rows(database, "SELECT state, problem FROM captures WHERE capture_id = ?", capture_id)
    return found[0] if found else None


def memory_bytes(running) -> int:
    """The most that a collector's process had in memory so far."""
    status = Path(f"/proc/{running.process.pid}/status").read_text()
    [line] = [line for line in status.splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) << 10
