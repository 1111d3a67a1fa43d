"""PYTORCH_CUDA_ALLOC_CONF strings made of others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from allocscope.allocator.settings import DIVISIONS, KEYS, MIB, AllocatorSettings, as_read, entries_of, parse_settings

SIZE_KEYS = (
    "expandable_segments",
    "max_split_size_mb",
    "max_non_split_rounding_mb",
    "roundup_power2_divisions",
    "garbage_collection_threshold",
    "large_segment_size_mb",
)
"""What advice may change; all else stays as it is set."""


def conf_in_force(conf: str, settings: AllocatorSettings) -> dict[str, str]:
    """Keys and values that come to `settings`: what was told last in `conf`, corrected by what is really in force.

    Keys that PyTorch does not have are left out. SettingsError: `conf` cannot be read.
    """
    told = {key: as_read(key, value) for key, value in entries_of(conf) if key in KEYS}
    said = parse_settings(text_of(told))
    if said.expandable != settings.expandable:
        told["expandable_segments"] = str(settings.expandable)
    if said.max_split_bytes != settings.max_split_bytes:
        limit = settings.max_split_bytes
        _set(told, "max_split_size_mb", None if limit is None else str(limit // MIB))
    if said.divisions != settings.divisions:
        _set(told, "roundup_power2_divisions", _divisions(settings.divisions))
    return told


def agree(said: AllocatorSettings, in_force: AllocatorSettings) -> bool:
    """Whether what is in force is what was said, but for a memory fraction, which programs set by a call of its own."""
    return replace(said, memory_fraction=in_force.memory_fraction) == in_force


def text_of(told: Mapping[str, str]) -> str:
    """The string."""
    return ",".join(f"{key}:{value}" for key, value in told.items())


def kept(told: Mapping[str, str]) -> dict[str, str]:
    """What no advice changes."""
    return {key: value for key, value in told.items() if key not in SIZE_KEYS}


def _set(told: dict[str, str], key: str, value: str | None) -> None:
    if value:
        told[key] = value
    else:
        told.pop(key, None)


def _divisions(table: tuple[int, ...]) -> str | None:
    if max(table) <= 1:
        return None
    if len(set(table)) == 1:
        return str(table[0])
    return "[" + ",".join(f"{1 << at}:{max(table[at], 1)}" for at in range(DIVISIONS - 1)) + f",>:{max(table[-1], 1)}]"
