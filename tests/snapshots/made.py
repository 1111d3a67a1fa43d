"""Snapshots made here, in the forms of the PyTorch versions, and those that lie at hand."""

import copy
import os
import pickle
from pathlib import Path
from typing import Any

MIB = 1 << 20
A = 0x7F0000000000
"""Where the first segment begins."""
TIME_US = 1_700_000_000_000_000
DATA = Path(__file__).parent / "data"
_MORE = os.environ.get("ALLOCSCOPE_TEST_SNAPSHOTS")
MORE = Path(_MORE) if _MORE else None
"""A folder of further snapshots with an index.json of their bills, where ALLOCSCOPE_TEST_SNAPSHOTS names one."""

FRAMES: list[dict[str, Any]] = [
    {"name": "torch::unwind::unwind()", "filename": "??", "line": 0},
    {"name": "_call_impl", "filename": "/usr/lib/torch/nn/modules/module.py", "line": 1501},
    {"name": "forward", "filename": "/home/me/model.py", "line": 12},
    {"name": "step", "filename": "/home/me/train.py", "line": 40},
    {"name": "<module>", "filename": "/home/me/train.py", "line": 99},
]


def block(size: int, state: str = "inactive", requested: int | None = None, **more: Any) -> dict[str, Any]:
    return {"size": size, "requested_size": size if requested is None else requested, "state": state, **more}


def live(size: int, requested: int | None = None, **more: Any) -> dict[str, Any]:
    return block(size, "active_allocated", requested, **more)


def waiting(size: int, requested: int | None = None) -> dict[str, Any]:
    return block(size, "active_pending_free", requested)


def segment(address: int, blocks: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """A segment of these blocks, as PyTorch 2.14 writes it."""
    at = address
    placed = []
    for told in blocks:
        placed.append({"address": at, **copy.deepcopy(told)})
        at += told["size"]
    used = [b for b in blocks if b["state"] != "inactive"]
    return {
        "device": 0,
        "address": address,
        "total_size": at - address,
        "allocated_size": sum(b["size"] for b in used if b["state"] == "active_allocated"),
        "active_size": sum(b["size"] for b in used),
        "requested_size": sum(b["requested_size"] for b in used),
        "stream": 0,
        "segment_type": "small" if at - address == 2 * MIB else "large",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "blocks": placed,
        **more,
    }


def entry(action: str, address: int, size: int, **more: Any) -> dict[str, Any]:
    return {"action": action, "addr": address, "size": size, "stream": 0, "time_us": TIME_US, **more}


SEGMENTS = [
    segment(A, [live(512, 100), block(2 * MIB - 512)]),
    segment(A + 32 * MIB, [live(3 * MIB, frames=FRAMES), block(14 * MIB), live(2 * MIB, 2 * MIB - 5), waiting(MIB)]),
    segment(A + 64 * MIB, [block(20 * MIB)]),
    segment(A + 96 * MIB, [live(30 * MIB, 30 * MIB - 400)], stream=7),
    segment(A + 128 * MIB, [live(6 * MIB), block(14 * MIB)], segment_pool_id=(0, 1)),
]
BILL = {
    "requested": 100 + 5 * MIB - 5 + 30 * MIB - 400 + 6 * MIB,
    "rounding": 412 + 5 + 400,
    "awaiting_free": MIB,
    "stranded": 2 * MIB - 512 + 14 * MIB,
    "releasable": 20 * MIB,
    "private": 14 * MIB,
    "reserved": 92 * MIB,
}
"""Of SEGMENTS."""
TRACE = [
    entry("segment_alloc", A + 64 * MIB, 20 * MIB, pool_id=(0, 0)),
    entry("alloc", A + 64 * MIB, 5 * MIB, pool_id=(0, 0), frames=FRAMES),
    entry("free_requested", A + 64 * MIB, 5 * MIB, pool_id=(0, 0)),
    entry("free_completed", A + 64 * MIB, 5 * MIB, pool_id=(0, 0)),
]
SETTINGS = {
    "PYTORCH_CUDA_ALLOC_CONF": "garbage_collection_threshold:0.8",
    "max_split_size": -1,
    "garbage_collection_threshold": 0.8,
    "expandable_segments": False,
    "roundup_power2_divisions": {"1": 0, "2": 0},
}


def snapshot(**changed: Any) -> dict[str, Any]:
    """The dict of _snapshot(), as PyTorch 2.14 gives it."""
    whole = {
        "segments": SEGMENTS,
        "device_traces": [TRACE],
        "allocator_settings": SETTINGS,
        "external_annotations": [],
        "host_segments": [],
        "host_traces": [],
    }
    return copy.deepcopy(whole | changed)


def pickled(value: Any, protocol: int = 4) -> bytes:
    return pickle.dumps(value, protocol)


def without(value: Any, *keys: str) -> Any:
    """The same without these keys, at any depth."""
    if isinstance(value, dict):
        return {key: without(item, *keys) for key, item in value.items() if key not in keys}
    return [without(item, *keys) for item in value] if isinstance(value, list) else value
