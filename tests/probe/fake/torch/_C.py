"""The raw calls."""
# ruff: noqa: N999 (torch's name)

ALLOCATED = [0, 0]
OBSERVERS: list = []
FAMILIES = (
    "allocated_bytes", "active_bytes", "requested_bytes", "reserved_bytes", "inactive_split_bytes",
    "allocation", "active", "segment", "inactive_split",
)  # fmt: skip
COUNTERS = ("num_alloc_retries", "num_ooms", "num_device_alloc", "num_device_free", "num_sync_all_streams")


def _cuda_memoryStats(device):
    held = ALLOCATED[device]
    figures = {"all": {"current": held, "peak": held, "allocated": held, "freed": 0}}
    return {**dict.fromkeys(FAMILIES, figures), **dict.fromkeys(COUNTERS, 0)}


def _cuda_memorySnapshot(how):
    return {"segments": [], "device_traces": [[{"action": "alloc"}]]}


def _cuda_isHistoryEnabled():
    return False


def _cuda_getAllocatorBackend():
    return "native"


def _cuda_attach_out_of_memory_observer(observer):
    OBSERVERS.append(observer)
