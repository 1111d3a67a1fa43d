"""The allocator's settings, and the sizes that follow from them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
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
SINCE = {
    "expandable_segments": (2, 1),
    "release_lock_on_cudamalloc": (2, 3),
    "pinned_num_register_threads": (2, 3),
    "pinned_use_cuda_host_register": (2, 3),
    "max_non_split_rounding_mb": (2, 6),
    "pinned_use_background_threads": (2, 6),
    "graph_capture_record_stream_reuse": (2, 9),
    "per_process_memory_fraction": (2, 10),
    "pinned_reserve_segment_size_mb": (2, 10),
    "large_segment_size_mb": (2, 11),
    "pinned_free_catch_all": (2, 12),
    "throw_on_cudamalloc_oom": (2, 12),
    "pinned_max_cached_size_mb": (2, 13),
    "pinned_max_round_threshold_mb": (2, 13),
}
"""The first release of PyTorch that is known to take a key, of those that not every one takes."""

_WHOLE = r"[0-9]+"
_SHARE = r"(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?"
_FORMS = {
    **dict.fromkeys(
        (
            "max_split_size_mb",
            "max_non_split_rounding_mb",
            "large_segment_size_mb",
            "pinned_max_cached_size_mb",
            "pinned_max_round_threshold_mb",
        ),
        (_WHOLE, "a whole number of MiB"),
    ),
    **dict.fromkeys(
        ("garbage_collection_threshold", "per_process_memory_fraction"), (_SHARE, "a share from 0 to 1, such as 0.8")
    ),
    **dict.fromkeys(
        (
            "expandable_segments",
            "throw_on_cudamalloc_oom",
            "graph_capture_record_stream_reuse",
            "pinned_free_catch_all",
            "pinned_use_background_threads",
            "pinned_use_cuda_host_register",
            "release_lock_on_cudamalloc",
        ),
        ("True|False", "True or False, written so"),
    ),
    "roundup_power2_divisions": (
        r"[0-9]+|\[(?:(?:[0-9]+|>):[0-9]+(?:,|(?=\])))*\]",
        "a power of two, such as 8, or [SIZE:N,...,>:N] of such, with sizes in MiB",
    ),
    "pinned_num_register_threads": ("1|2|4|8|16|32|64|128", "a power of two up to 128"),
    "pinned_reserve_segment_size_mb": ("0*[1-9][0-9]*", "a whole number of MiB from 1 on"),
}
"""What values look like, and in words; of the other keys they are not looked at."""
_ENTRY = re.compile(r"([A-Za-z0-9_]+):(\[[^\]]*\]|[^,:\[\]]*)(?:,|$)")
_ASSIGNED = re.compile(r"\s*(?:export\s+)?PYTORCH_(?:CUDA_|HIP_)?ALLOC_CONF\s*=")
_LEADING_NUMBER = re.compile(r"[+-]?[0-9]+")
_LEADING_SHARE = re.compile(rf"[+-]?{_SHARE}")
_UNSIGNED = 1 << 64
"""One more than the largest number that PyTorch reads."""
_LONGEST = 64
"""Characters of a number that is looked at: Python refuses to read endless ones."""


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

    Numbers are read as PyTorch reads them, up to where they end: 64.5 and 64MB are 64, and -1 is the largest there is.

    Strings of PyTorch 2.0 to 2.14; sizes become bytes. SettingsError: it is not in their form, or a value cannot be its key's.
    """
    settings = AllocatorSettings()
    for key, value in entries_of(conf):
        try:
            settings = _with(settings, key, value)
        except (ValueError, IndexError) as error:
            raise _odd_value(conf, key, value) from error
    return settings


def _odd_value(conf: str, key: str, value: str) -> SettingsError:
    return SettingsError(conf, f"{key} cannot be {value!r}: it is {_FORMS[key][1]}")


def parse_settings_to_try(conf: str) -> AllocatorSettings:
    """The same of what somebody typed: what PyTorch 2.14 would refuse is refused, and so are another allocator than its own, and
    values that PyTorch takes for something else than they say.

    SettingsError for each; sizes become bytes.
    """
    if assigned := _ASSIGNED.match(conf):
        raise SettingsError(conf, f"give the value alone, without {assigned[0].strip()}")
    settings = parse_settings(conf)
    for key, value in entries_of(conf):
        if key not in KEYS:
            near = get_close_matches(key, sorted(KEYS), n=1)
            raise SettingsError(conf, f"PyTorch has no {key}" + (f" (did you mean {near[0]}?)" if near else ""))
        pattern, _ = _FORMS.get(key, (".*", ""))
        if not re.fullmatch(pattern, value):
            raise _odd_value(conf, key, value)
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


def as_read(key: str, value: str) -> str:
    """The value as it would be written for what PyTorch takes it for: 64 for the 64.5 of a number. Raises nothing."""
    pattern, _ = _FORMS.get(key, (".*", ""))
    if not re.fullmatch(pattern, value):
        with suppress(ValueError):
            return str(_share(value) if pattern == _SHARE else _number(value))
    return value


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
            limit = _positive(value) * MIB
            return replace(settings, max_split_bytes=limit if limit < _UNSIGNED // 2 else None)
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
            return replace(settings, divisions=_divisions(value, settings.divisions))
        case _:
            return settings


def _boolean(value: str) -> bool:
    if value not in ("True", "False"):
        raise ValueError(value)
    return value == "True"


def _positive(value: str) -> int:
    number = _number(value)
    if number == 0:
        raise ValueError(value)
    return number


def _number(value: str) -> int:
    """As C++'s std::stoull reads it, by which PyTorch does: the digits that it begins with; below 0 it is counted from the end."""
    found = _LEADING_NUMBER.match(value)
    if found is None or len(found[0]) > _LONGEST or abs(number := int(found[0])) >= _UNSIGNED:
        raise ValueError(value)
    return number % _UNSIGNED


def _share(value: str) -> float:
    """As std::stod reads it; neither below 0 nor endless, and no NaN."""
    found = _LEADING_SHARE.match(value)
    if found is None or not 0 <= (share := float(found[0])) < inf:
        raise ValueError(value)
    return share


def _divisions(value: str, table: tuple[int, ...]) -> tuple[int, ...]:
    """The table from a number for all, or from [SIZE_MB:N,…,>:N], which sets of `table` what it names (ALLOCATOR.md 9).

    The first size sets all up to its own, the others their own alone, and > all above the last one.
    """
    if not value.startswith("["):
        return (_power_of_two(value),) * DIVISIONS
    found, first, last = list(table), 0, 0
    entries = value[1:-1].removesuffix(",")
    for size, _, number in (entry.partition(":") for entry in entries.split(",") if entries):
        if ":" in number:
            raise ValueError(value)
        divisions = _number(number) and _power_of_two(number)
        if size == ">":
            found[last + 1 :] = [divisions] * (DIVISIONS - last - 1)
            continue
        last = min(_power_of_two(size).bit_length() - 1, DIVISIONS - 1)
        start = min(first, last)
        found[start : last + 1] = [divisions] * (last + 1 - start)
        first = DIVISIONS
    return tuple(found)


def _power_of_two(value: str) -> int:
    number = _number(value)
    if number == 0 or number & (number - 1):
        raise ValueError(value)
    return number


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
