"""torch.cuda, as far as the probe calls it."""

import os
from types import SimpleNamespace

from .. import _C
from . import memory

__all__ = ["memory"]

_initialized_in = None


class OutOfMemoryError(RuntimeError):
    pass


def init():
    """A test's knob: CUDA is initialized from now on, in this process."""
    global _initialized_in
    _initialized_in = os.getpid()


def allocate(size, device=0):
    """A test's knob."""
    _C.ALLOCATED[device] += size


def run_out(size, device=0):
    """A test's knob: what torch does when a request cannot be served."""
    for observer in _C.OBSERVERS:
        observer(device, size, 80 << 30, 1 << 20)
    raise OutOfMemoryError(f"tried to allocate {size}")


def is_initialized():
    return _initialized_in == os.getpid()


def device_count():
    return len(_C.ALLOCATED)


def get_device_properties(device):
    return SimpleNamespace(uuid=f"0000000{device}-0000-0000-0000-000000000000", name="Fake", total_memory=80 << 30)


def memory_snapshot(include_traces=True):
    blocks = [
        {"size": 1 << 20, "requested_size": 1000, "state": "active_allocated"},
        {"size": 1 << 20, "requested_size": 0, "state": "inactive"},
    ]
    segment = {"address": 0, "total_size": 2 << 20, "stream": 0, "segment_type": "small", "segment_pool_id": (0, 0)}
    return [{**segment, "device": index, "blocks": blocks} for index, held in enumerate(_C.ALLOCATED) if held]
