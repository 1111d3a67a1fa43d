"""The allocator's settings, and the sizes that follow from them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from math import inf
from typing import Any

from allocscope.allocator.errors import SettingsError

KIB, MIB = 1 << 10, 1 << 20
MIN_BLOCK_BYTES = 512
SMALL_MAX_BYTES = 1 * MIB
"""A rounded request of up to this is served by the small pool."""
SMALL_SEGMENT_BYTES = 2 * MIB
"""A segment of the small pool; the page of a small expandable segment."""
MIN_LARGE_BYTES = 10 * MIB
"""A rounded request from this on gets a segment of its own."""
ROUND_LARGE_BYTES = 2 * MIB
DIVISIONS = 16
"""Entries of the power-of-two table: up to 2 MiB, then one an octave, the last from 32 GiB on."""

KEYS = frozenset(
    {
        "max_split_size_mb",
        "max_non_split_rounding_mb",
        "large_segment_size_mb",
        "garbage_collection_threshold",
        "per_process_memory_fraction",
        "expandable_segments",
        "throw_on_cudamalloc_oom",
        "roundup_power2_divisions",
        # and those that decide no sizes
        "backend",
        "graph_capture_record_stream_reuse",
        "pinned_free_catch_all",
        "pinned_max_cached_size_mb",
        "pinned_max_round_threshold_mb",
        "pinned_num_register_threads",
        "pinned_reserve_segment_size_mb",
        "pinned_use_background_threads",
        "pinned_use_cuda_host_register",
        "release_lock_on_cudamalloc",
        "roundup_bypass_threshold_mb",
    }
)
"""All that PyTorch 2.0 to 2.14 takes (ALLOCATOR.md 9)."""

_TAKES = {
    **dict.fromkeys(
        ("max_split_size_mb", "max_non_split_rounding_mb", "large_segment_size_mb"), "a whole number of MiB"
    ),
    **dict.fromkeys(
        ("garbage_collection_threshold", "per_process_memory_fraction"), "a share from 0 to 1, such as 0.8"
    ),
    **dict.fromkeys(("expandable_segments", "throw_on_cudamalloc_oom"), "True or False, written so"),
    "roundup_power2_divisions": "a power of two, such as 8, or [SIZE:N,...,>:N] of such, with sizes in MiB",
}
"""Of the keys that decide sizes, what their values are."""
_ENTRY = re.compile(r"([A-Za-z0-9_]+):(\[[^\]]*\]|[^,\[\]]*)(?:,|$)")


@dataclass(frozen=True, slots=True)
class AllocatorSettings:
    """What of PYTORCH_CUDA_ALLOC_CONF decides sizes (ALLOCATOR.md 2 and 9)."""

    max_split_bytes: int | None = None
    """Blocks from this size on are not split; None: no such limit."""
    max_non_split_rounding_bytes: int | None = None
    """How much larger than asked a block of that size may be; None: a large segment."""
    expandable: bool = False
    large_segment_bytes: int = 20 * MIB
    """A segment for requests between 1 and 10 MiB; the page of a large expandable segment."""
    gc_threshold: float = 0.0
    memory_fraction: float = 1.0
    """Of the device, what may be reserved; 1: no such limit."""
    throw_on_oom: bool = False
    """Refuse at once what would exceed memory_fraction (throw_on_cudamalloc_oom, from 2.12 on)."""
    divisions: tuple[int, ...] = (0,) * DIVISIONS
    """By the octave of a request: into how many steps it is rounded; 0 and 1: to 512 bytes."""

    def round(self, request_bytes: int) -> int:
        """What a block for that request must hold at least (ALLOCATOR.md 2.2)."""
        if request_bytes < MIN_BLOCK_BYTES:
            return MIN_BLOCK_BYTES
        divisions = self._divisions_of(request_bytes)
        if divisions > 1 and request_bytes > MIN_BLOCK_BYTES * divisions:
            return _round_in_octave(request_bytes, divisions)
        return -(-request_bytes // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES

    def floor(self, block_bytes: int) -> int:
        """The largest request that rounds to at most so much: the other way round of `round`; 0: there is none."""
        if block_bytes < MIN_BLOCK_BYTES:
            return 0
        divisions = self._divisions_of(block_bytes)
        if divisions > 1 and block_bytes > MIN_BLOCK_BYTES * divisions:
            step = (1 << (block_bytes.bit_length() - 1)) // divisions
            return block_bytes // step * step
        return block_bytes // MIN_BLOCK_BYTES * MIN_BLOCK_BYTES

    def _divisions_of(self, request_bytes: int) -> int:
        return self.divisions[min(max(request_bytes.bit_length() - 21, 0), DIVISIONS - 1)]

    @property
    def rounds_plainly(self) -> bool:
        """Whether all requests are rounded to 512 bytes and no more."""
        return max(self.divisions) <= 1

    def segment_bytes(self, rounded_bytes: int) -> int:
        """The segment that a rounded request asks of the driver (ALLOCATOR.md 2.3)."""
        if rounded_bytes <= SMALL_MAX_BYTES:
            return SMALL_SEGMENT_BYTES
        if rounded_bytes < MIN_LARGE_BYTES:
            return self.large_segment_bytes
        return -(-rounded_bytes // ROUND_LARGE_BYTES) * ROUND_LARGE_BYTES

    def page_bytes(self, *, small: bool) -> int:
        """The page of an expandable segment."""
        return SMALL_SEGMENT_BYTES if small else self.large_segment_bytes

    @property
    def non_split_rounding_bytes(self) -> int:
        """`max_non_split_rounding_bytes`, or its default."""
        given = self.max_non_split_rounding_bytes
        return self.large_segment_bytes if given is None else given


def _round_in_octave(request_bytes: int, divisions: int) -> int:
    if request_bytes & (request_bytes - 1) == 0:
        return request_bytes
    power = 1 << (request_bytes.bit_length() - 1)
    step = power // divisions
    return -(-request_bytes // step) * step if step else power << 1


def parse_settings(conf: str) -> AllocatorSettings:
    """Settings from a PYTORCH_CUDA_ALLOC_CONF string; keys that decide no sizes, and unknown ones, are passed over.

    Strings of PyTorch 2.0 to 2.14; sizes become bytes. SettingsError: it is not in their form, or a value cannot be its key's.
    """
    settings = AllocatorSettings()
    for key, value in entries_of(conf):
        try:
            settings = _with(settings, key, value)
        except (ValueError, IndexError) as error:
            raise SettingsError(conf, f"{key} cannot be {value!r}: it is {_TAKES[key]}") from error
    return settings


def parse_settings_to_try(conf: str) -> AllocatorSettings:
    """The same of what somebody typed: what PyTorch 2.14 would refuse is refused, and so is another allocator than its own.

    SettingsError for either; sizes become bytes.
    """
    settings = parse_settings(conf)
    for key, value in entries_of(conf):
        if key not in KEYS:
            near = get_close_matches(key, sorted(KEYS), n=1)
            raise SettingsError(conf, f"PyTorch has no {key}" + (f" (did you mean {near[0]}?)" if near else ""))
        if key == "backend" and value != "native":
            raise SettingsError(conf, f"{value} is another allocator, which is not simulated")
    least = settings.large_segment_bytes
    if least <= MIN_LARGE_BYTES:
        raise SettingsError(conf, f"large_segment_size_mb must be more than {MIN_LARGE_BYTES // MIB}")
    if settings.max_split_bytes is not None and settings.max_split_bytes < least:
        raise SettingsError(conf, f"max_split_size_mb must be at least {least // MIB}")
    if settings.non_split_rounding_bytes < least:
        raise SettingsError(conf, f"max_non_split_rounding_mb must be at least {least // MIB}")
    if "garbage_collection_threshold" in conf and not 0 < settings.gc_threshold < 1:
        raise SettingsError(conf, "garbage_collection_threshold must be between 0 and 1")
    if not 0 <= settings.memory_fraction <= 1:
        raise SettingsError(conf, "per_process_memory_fraction must be from 0 to 1")
    return settings


def entries_of(conf: str) -> Iterator[tuple[str, str]]:
    """Its keys and their values, in order, as they are written but for spaces. SettingsError: it is not in their form."""
    compact, at = "".join(conf.split()), 0
    while at < len(compact):
        entry = _ENTRY.match(compact, at)
        if entry is None:
            raise SettingsError(conf, f"cannot be read from {compact[at:]!r} on: it is KEY:VALUE,KEY:VALUE")
        yield entry[1], entry[2]
        at = entry.end()


def _with(settings: AllocatorSettings, key: str, value: str) -> AllocatorSettings:
    match key:
        case "max_split_size_mb":
            return replace(settings, max_split_bytes=_positive(value) * MIB)
        case "max_non_split_rounding_mb":
            return replace(settings, max_non_split_rounding_bytes=_positive(value) * MIB)
        case "large_segment_size_mb":
            return replace(settings, large_segment_bytes=_positive(value) * MIB)
        case "garbage_collection_threshold":
            return replace(settings, gc_threshold=_share(value))
        case "per_process_memory_fraction":
            return replace(settings, memory_fraction=_share(value))
        case "expandable_segments":
            return replace(settings, expandable=_boolean(value))
        case "throw_on_cudamalloc_oom":
            return replace(settings, throw_on_oom=_boolean(value))
        case "roundup_power2_divisions":
            return replace(settings, divisions=_divisions(value))
        case _:
            return settings


def _boolean(value: str) -> bool:
    return value == "True" or (value != "False" and _no(value))


def _no(value: str) -> bool:
    raise ValueError(value)


def _positive(value: str) -> int:
    number = _number(value)
    return number if number > 0 else _no(value)


def _number(value: str) -> int:
    """Digits alone, and no more than any device has MiB."""
    return int(value) if re.fullmatch(r"[0-9]{1,12}", value) else int(_no(value))


def _share(value: str) -> float:
    """Neither below 0 nor endless, and no NaN."""
    return share if 0 <= (share := float(value)) < inf else _no(value)


def _divisions(value: str) -> tuple[int, ...]:
    """The table from a number for all, or from [SIZE_MB:N,…,>:N] (ALLOCATOR.md 9: an entry but the first sets only its own)."""
    if not value.startswith("["):
        return (_power_of_two(value),) * DIVISIONS
    table, last = [0] * DIVISIONS, -1
    for size, _, number in (item.partition(":") for item in value[1:-1].split(",")):
        divisions = _power_of_two(number)
        if size == ">":
            table[last + 1 :] = [divisions] * (DIVISIONS - last - 1)
            break
        index = min(_power_of_two(size).bit_length() - 1, DIVISIONS - 1)
        table[0 if last < 0 else index : index + 1] = [divisions] * (index + 1 if last < 0 else 1)
        last = index
    return tuple(table)


def _power_of_two(value: str) -> int:
    number = _number(value)
    return number if number & (number - 1) == 0 else _no(value)


def settings_of_snapshot(told: Mapping[str, Any]) -> AllocatorSettings:
    """Settings from a snapshot's `allocator_settings`, whose string knows what its keys leave out (ALLOCATOR.md 7).

    Snapshots of PyTorch 2.1 to 2.14; sizes are bytes. SettingsError: its string cannot be read; TypeError and ValueError: it is
    not as PyTorch writes it.
    """
    conf = told.get("PYTORCH_CUDA_ALLOC_CONF") or ""
    if type(conf) is not str:
        raise TypeError("PYTORCH_CUDA_ALLOC_CONF is not a string")
    settings = parse_settings(conf)
    if type(limit := told.get("max_split_size")) is int:
        settings = replace(settings, max_split_bytes=limit if limit > 0 else None)
    if "expandable_segments" in told:
        settings = replace(settings, expandable=bool(told["expandable_segments"]))
    if isinstance(table := told.get("roundup_power2_divisions"), Mapping) and table:
        settings = replace(settings, divisions=_told_divisions(table.items()))
    return settings


def _told_divisions(told: Iterable[tuple[Any, Any]]) -> tuple[int, ...]:
    table = [0] * DIVISIONS
    for size_mb, divisions in told:
        if type(size_mb) is not str or type(divisions) is not int:
            raise TypeError("roundup_power2_divisions is not a table of numbers by size")
        table[min(max(int(size_mb).bit_length() - 1, 0), DIVISIONS - 1)] = divisions
    return tuple(table)
