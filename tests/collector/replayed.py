"""Snapshots of jobs whose histories are worth a replay, and what tests of advice have in common."""

from __future__ import annotations

import gzip
import pickle
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from allocscope.allocator.errors import OutOfMemoryError
from allocscope.allocator.settings import parse_settings
from allocscope.allocator.simulator import Device, Simulator
from allocscope.collector.advice_task import Limits
from allocscope.model import Capture, CaptureReason, Process, Sample, chunks
from allocscope.model import Device as KnownDevice
from allocscope.storage.captures import CaptureArrival
from allocscope.storage.records import NodeBatch
from allocscope.storage.repository import Repository
from tests.allocator.made import as_pytorch_writes
from tests.collector.harness import START_US, ref

MIB = 1 << 20
TOTAL_BYTES = 2048 * MIB
OTHER_BYTES = 48 * MIB
LIMITS = Limits(time_s=60.0, memory_bytes=1 << 30)


def holey(conf: str = "", *, dies: bool = True, steps: int = 0) -> dict[str, Any]:
    """A snapshot of a job that fills freed 200 MiB segments with 110 MiB each, and then wants 200 MiB again: with holes that cannot be
    given back there is no room for it on its device of 2 GiB, and in expandable segments there is.
    """
    simulator = Simulator(parse_settings(conf), Device(TOTAL_BYTES - OTHER_BYTES), version="2.14.1", trace=True)
    for address in [simulator.malloc(200 * MIB) for _ in range(9)]:
        simulator.free(address)
    for _ in range(9):
        simulator.malloc(110 * MIB)
    for step in range(steps):
        simulator.free(simulator.malloc(3 * MIB + 512 * (step % 7)))
    with suppress(OutOfMemoryError):
        for _ in range(2 if dies else 0):
            simulator.malloc(200 * MIB)
    trace = [entry._replace(time_us=START_US + 1000 * at) for at, entry in enumerate(simulator.trace)]
    return {
        "segments": simulator.segments(),
        "device_traces": [as_pytorch_writes(trace)],
        "allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": conf},
    }


def pickled(snapshot: object) -> bytes:
    return pickle.dumps(snapshot, protocol=4)


def packed(snapshot: object) -> bytes:
    """As it is kept."""
    return gzip.compress(pickled(snapshot))


def job_process(number: int = 1, job: str = "train") -> Process:
    device = KnownDevice(f"GPU-{number}", 0, "H200", TOTAL_BYTES)
    return Process(
        f"{number:032x}",
        job,
        1000 + number,
        "host",
        START_US,
        rank=number - 1,
        torch_version="2.14.1",
        devices=(device,),
    )


def samples(number: int = 1, *, free_bytes: int = 100 * MIB, count: int = 3) -> NodeBatch:
    """Of a job's device, of which others have 48 MiB."""
    told = [
        Sample(
            sequence,
            START_US + sequence * 1_000_000,
            reserved_bytes=TOTAL_BYTES - OTHER_BYTES - free_bytes,
            device_free_bytes=free_bytes,
            device_total_bytes=TOTAL_BYTES,
        )
        for sequence in range(1, count + 1)
    ]
    return NodeBatch(
        "n1",
        "d1",
        number,
        closed_us=START_US,
        received_us=START_US,
        processes=(job_process(number),),
        chunks=tuple(chunks(ref(number), told)),
    )


def keep(
    repository: Repository,
    capture_id: str,
    content: bytes,
    *,
    received_us: int,
    number: int = 1,
    job: str = "train",
    reason: CaptureReason = CaptureReason.FORECAST,
    history_entries: int = 9,
) -> None:
    """A capture, as it lies in the database once it has come."""
    upload = repository.captures.begin(capture_id, received_us=received_us)
    repository.captures.add(upload, 0, content, received_us=received_us)
    who = job_process(number, job)
    came = Capture(
        capture_id, who.process_id, START_US + 2_000_000, reason, f"GPU-{number}", len(content), history_entries
    )
    arrival = CaptureArrival(came, who, "n1", received_us, upload, 1, len(content))
    repository.captures.keep(arrival, limit_bytes=1 << 40)


def python(code: str) -> Sequence[str]:
    """A worker that does this instead."""
    return sys.executable, "-c", code
