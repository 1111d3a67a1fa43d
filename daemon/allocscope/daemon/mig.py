"""A device in MIG mode: its instances, each of which is a device of its own to CUDA and NVML.

Nothing here catches what the driver says of the device as a whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from allocscope.daemon.nvml_problems import ProblemKind, problem_of

MOST_INSTANCES = 64
"""A device has seven at most; a driver that tells of more, as by "not available", is not asked for each."""
_NO_MIG = frozenset({ProblemKind.NOT_SUPPORTED, ProblemKind.OLD_DRIVER, ProblemKind.NO_PERMISSION})


def is_in_mig_mode(nvml: Any, handle: Any) -> bool:
    """False also where the device, or a driver before 450, does not know of MIG."""
    try:
        current, _ = nvml.nvmlDeviceGetMigMode(handle)
    except Exception as error:
        if problem_of(error).kind in _NO_MIG:
            return False
        raise
    return bool(current == nvml.NVML_DEVICE_MIG_ENABLE)


def instances(nvml: Any, handle: Any) -> Iterator[Any]:
    """The handles of the instances that there are now; their numbers have gaps once some have been destroyed."""
    for number in range(min(nvml.nvmlDeviceGetMaxMigDeviceCount(handle), MOST_INSTANCES)):
        try:
            yield nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number)
        except nvml.NVMLError as error:
            if error.value not in (nvml.NVML_ERROR_NOT_FOUND, nvml.NVML_ERROR_INVALID_ARGUMENT):
                raise
