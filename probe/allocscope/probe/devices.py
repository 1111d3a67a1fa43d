"""By which UUID NVML, and so the daemon, knows a device that CUDA numbers.

CUDA's numbers are its own: CUDA_VISIBLE_DEVICES leaves devices out and orders them, CUDA_DEVICE_ORDER orders them by speed or by
bus (CUDA Programming Guide, "CUDA Environment Variables"), NVML does neither. So a number is never taken for one of NVML's.

The UUID comes from the driver that is loaded (`cuDeviceGetUuid_v2`, since CUDA 11.4: of a MIG device that of its compute instance),
else from torch's properties (since torch 2.4, without the prefix), else from CUDA_VISIBLE_DEVICES, where it is written out. Of a MIG
device NVML has "MIG-<UUID>", and drivers before R470 "MIG-GPU-<UUID of the GPU>/<GPU instance>/<compute instance>" (NVML's change
log), which CUDA_VISIBLE_DEVICES may still say to newer ones. What is not certain is unknown: figures on the wrong device are worse.
"""

from __future__ import annotations

import ctypes
import os
import re
import uuid
from typing import Any

DRIVER = "libcuda.so.1"
WHOLE = re.compile(r"(GPU|MIG)-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
BEFORE_R470 = re.compile(r"MIG-GPU-([0-9a-f-]{36})/[0-9]+/[0-9]+")
PREFIXED = ("GPU-", "MIG-")


def device_uuid(properties: Any, index: int, visible: str | None) -> str | None:
    """NVML's name of CUDA's device `index`, whose torch properties these are; `visible` is CUDA_VISIBLE_DEVICES. None: not certain."""
    told = getattr(properties, "uuid", None)
    model = str(getattr(properties, "name", ""))
    return name_device(
        by_driver=uuid_by_driver(index),
        by_torch=None if told is None else str(told) or None,
        is_mig=" MIG " in model,  # as in "NVIDIA A100-SXM4-40GB MIG 1g.5gb"
        entry=entry_of(visible, index),
    )


def name_device(*, by_driver: str | None, by_torch: str | None, is_mig: bool, entry: str | None) -> str | None:
    """Of what was found, NVML's name. The UUIDs are bare, or have their prefix."""
    known = by_driver or by_torch
    if known is None:
        return entry if entry and (WHOLE.fullmatch(entry) or BEFORE_R470.fullmatch(entry)) else None
    if known.startswith(PREFIXED):
        return known
    if not is_mig:
        return f"GPU-{known}"
    return f"MIG-{known}" if by_driver is not None else _name_mig(known, entry)


def _name_mig(by_torch: str, entry: str | None) -> str | None:
    """What torch tells may be the instance's own UUID, or that of the GPU that it is a part of (`cuDeviceGetUuid`, the older call)."""
    if entry is None or not entry.startswith("MIG-"):
        return f"MIG-{by_torch}"
    if match := BEFORE_R470.fullmatch(entry):
        return entry if match[1] == by_torch else f"MIG-{by_torch}"
    if WHOLE.fullmatch(entry):
        return entry
    return f"MIG-{by_torch}" if by_torch.startswith(entry.removeprefix("MIG-")) else None


def entry_of(visible: str | None, index: int) -> str | None:
    """What CUDA_VISIBLE_DEVICES calls CUDA's device `index`; None: it says nothing, or nothing that CUDA heeds.

    CUDA heeds the entries up to the first that is none (-1, garbage); one that is there twice leaves no device at all. What it
    takes for a number only begins with one ("1gpu2").
    """
    entries: list[str] = []
    for text in (visible or "").split(","):
        entry = _entry(text.strip())
        if entry is None:
            break
        if entry in entries:
            return None
        entries.append(entry)
    return entries[index] if index < len(entries) else None


def _entry(text: str) -> str | None:
    if text.upper().startswith(PREFIXED):
        return re.sub("gpu-|mig-", lambda prefix: prefix[0].upper(), text.lower())
    number = re.match(r"\+?[0-9]+", text)
    return str(int(number[0])) if number else None


def uuid_by_driver(index: int) -> str | None:
    """The bare UUID as the CUDA driver tells it, where it is loaded; it makes no context and initialises nothing."""
    try:
        driver = ctypes.CDLL(DRIVER, mode=os.RTLD_NOW | os.RTLD_NOLOAD)
        device, found = ctypes.c_int(), (ctypes.c_ubyte * 16)()
        refused = driver.cuDeviceGet(ctypes.byref(device), index) or driver.cuDeviceGetUuid_v2(found, device)
    except (AttributeError, OSError):  # no driver, or one before CUDA 11.4
        return None
    return str(uuid.UUID(bytes=bytes(found))) if not refused and any(found) else None
