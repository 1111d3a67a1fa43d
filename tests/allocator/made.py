"""Recordings made here, and those that lie at hand."""

import gzip
import json
import os
import pickle
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from allocscope.allocator.snapshot import TraceEntry

MIB = 1 << 20
START_US = 1_700_000_000_000_000
SHIPPED = Path(__file__).resolve().parents[2] / "cli" / "allocscope" / "cli" / "recordings"
_MORE = os.environ.get("ALLOCSCOPE_TEST_RECORDINGS")
FOLDERS = [SHIPPED, *([Path(_MORE)] if _MORE else [])]
"""What ships with the command, and a folder of more where ALLOCSCOPE_TEST_RECORDINGS names one."""


def recordings() -> list[Path]:
    """RUN.run.json of each."""
    return [path for folder in FOLDERS for path in sorted(folder.glob("*.run.json"))]


def label_of(path: Path) -> dict[str, Any]:
    """What happened in that run."""
    labels: dict[str, dict[str, Any]] = json.loads((path.parent / "labels.json").read_text())
    return labels[path.name.removesuffix(".run.json")]


def entry(
    action: str,
    address: int,
    size: int,
    *,
    stream: int = 0,
    time_us: int = START_US,
    pool_id: Any = (0, 0),
    free: int | None = None,
) -> TraceEntry:
    return TraceEntry(action, address, size, stream, time_us, pool_id, free)


def got(address: int, size: int, **more: Any) -> TraceEntry:
    return entry("segment_alloc", address, size, **more)


def gave_back(address: int, size: int, **more: Any) -> TraceEntry:
    return entry("segment_free", address, size, **more)


def mapped(address: int, size: int, **more: Any) -> TraceEntry:
    return entry("segment_map", address, size, **more)


def unmapped(address: int, size: int, **more: Any) -> TraceEntry:
    return entry("segment_unmap", address, size, **more)


def alloc(address: int, size: int, **more: Any) -> TraceEntry:
    return entry("alloc", address, size, **more)


def asked_free(address: int, **more: Any) -> TraceEntry:
    return entry("free_requested", address, 0, **more)


def completed_free(address: int, **more: Any) -> TraceEntry:
    return entry("free_completed", address, 0, **more)


def freed(address: int, **more: Any) -> list[TraceEntry]:
    """A free with nothing to wait for."""
    return [asked_free(address, **more), completed_free(address, **more)]


def oom(size: int, free: int, **more: Any) -> TraceEntry:
    return entry("oom", 0, size, free=free, **more)


def as_pytorch_writes(entries: Iterable[TraceEntry]) -> list[dict]:
    told = []
    for e in entries:
        where = {"device_free": e.device_free} if e.action == "oom" else {"addr": e.address}
        rest = {"size": e.size, "stream": e.stream, "time_us": e.time_us, "pool_id": e.pool_id}
        told.append({"action": e.action, **where, **rest})
    return told


def write_recording(
    folder: Path, entries: Iterable[TraceEntry], *, name: str = "made", conf: str = "", **described
) -> Path:
    """A recording of these entries; `described` overrides what RUN.run.json says (None: leaves it out)."""
    snapshot = {
        "segments": [],
        "device_traces": [as_pytorch_writes(entries)],
        "allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": conf},
    }
    with gzip.open(folder / f"{name}.pickle.gz", "wb") as file:
        pickle.dump(snapshot, file)
    told = {
        "snapshot": f"{name}.pickle.gz",
        "device_total": 1024 * MIB,
        "other_used": [[START_US, 100 * MIB]],
        "start_us": START_US,
        **described,
    }
    path = folder / f"{name}.run.json"
    path.write_text(json.dumps({key: value for key, value in told.items() if value is not None}))
    return path
