"""What must not be set here, and what is to be known of what is set (ALLOCATOR.md 4.4, 5.4, 9)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from allocscope.allocator.advice.attempt import limit_bytes
from allocscope.allocator.advice.circumstances import Circumstances, circumstances_of, release_of
from allocscope.allocator.conf import agree
from allocscope.allocator.errors import SettingsError
from allocscope.allocator.settings import (
    KEYS,
    SINCE,
    AllocatorSettings,
    entries_of,
    parse_settings,
    parse_settings_to_try,
)
from allocscope.allocator.simulator.script import Script
from allocscope.allocator.simulator.what_if import Source

Release = tuple[int, int]
"""Of PyTorch, its first two numbers."""

_RESET = ("max_split_size_mb", "max_non_split_rounding_mb", "garbage_collection_threshold", "roundup_power2_divisions")
"""What each call that sets others at run time sets back, unless it repeats them."""


def hazards_of(
    source: Source, script: Script, confs: Sequence[str], known: Circumstances, *, version: str | None = None
) -> tuple[tuple[str, ...], ...]:
    """Of each of these settings, the ones in force first, what is to be known before they are used, as far as a history shows it.

    `version` is PyTorch's, where the source does not know it. SettingsError: one of `confs` cannot be read.
    """
    circumstances = circumstances_of(source, known)
    release = release_of(version, source.version, script.version)
    limited = [limit_bytes(script, conf) is not None for conf in confs]
    first = hazards_in_force(source.conf, source.settings, circumstances, release, has_limit=limited[0])
    others = []
    for conf, has_limit in zip(confs[1:], limited[1:], strict=True):
        against = _blocking(conf, circumstances, release, has_limit=has_limit)
        others.append((*_too_new(conf, source.told_in_force, release), *against))
    return tuple(first), *others


def blocked_by(conf: str, circumstances: Circumstances, release: Release, *, has_limit: bool) -> str | None:
    """Why these settings must not be advised; None: nothing is known against them.

    `has_limit`: whether a memory fraction limits the allocator. PyTorch 2.0 to 2.14. SettingsError: `conf` cannot be read.
    """
    return next(_blocking(conf, circumstances, release, has_limit=has_limit), None)


def _blocking(conf: str, circumstances: Circumstances, release: Release, *, has_limit: bool) -> Iterator[str]:
    try:
        settings = parse_settings_to_try(conf)
    except SettingsError as error:
        yield str(error)
    else:
        yield from _against(settings, circumstances, release, has_limit=has_limit)


def hazards_in_force(
    conf: str, settings: AllocatorSettings, circumstances: Circumstances, release: Release, *, has_limit: bool
) -> Iterator[str]:
    """What is to be known of the settings in force: `conf` as it was told, `settings` as they are."""
    for each in _against(settings, circumstances, release, has_limit=has_limit):
        yield f"as it is set: {each}"
    yield from _misread(conf, settings)


def hazards_of_advice(told: Mapping[str, str], circumstances: Circumstances, release: Release) -> Iterator[str]:
    """What is to be known before these keys and values are set."""
    if told.get("expandable_segments") == "True":
        unknown = [
            text
            for known, text in (
                (circumstances.uses_private_pools, "MemPools or CUDA graphs with pools of their own"),
                (circumstances.uses_ipc, "tensors shared with other processes by CUDA IPC"),
                (circumstances.has_virtual_memory, "a vGPU without virtual memory"),
                (circumstances.has_nvml if release >= (2, 13) else True, "no libnvidia-ml.so.1 in the process"),
            )
            if known is None
        ]
        if unknown:
            yield f"expandable_segments does not go with: {'; '.join(unknown)}. Whether the job has any of it is not known"
    again = [key for key in _RESET if key in told]
    if again:
        yield (
            f"set it before the process starts, or whole: each call that changes settings at run time sets {', '.join(again)} "
            "back, unless it repeats them"
        )
    at_start = [key for key in ("per_process_memory_fraction", "backend") if key in told]
    if at_start:
        yield f"{' and '.join(at_start)} can be set only before the process starts"


def _too_new(conf: str, in_force: Mapping[str, str], release: Release) -> Iterator[str]:
    for key, _ in entries_of(conf):
        first = SINCE.get(key, release)
        if release < first and key not in in_force:
            now, then = (".".join(map(str, each)) for each in (release, first))
            yield f"{key}: PyTorch {now} is not known to have it, and does not start with a key that it does not have; {then} has it"


def _against(
    settings: AllocatorSettings, circumstances: Circumstances, release: Release, *, has_limit: bool
) -> Iterator[str]:
    if settings.expandable:
        yield from _against_expandable(settings, circumstances, release)
    if settings.gc_threshold and not has_limit:
        yield "garbage_collection_threshold does nothing without a memory fraction below 1"


def _against_expandable(settings: AllocatorSettings, circumstances: Circumstances, release: Release) -> Iterator[str]:
    if circumstances.uses_private_pools:
        yield (
            "expandable_segments with MemPools or CUDA graphs' pools: PyTorch counts a pool's pages wrongly, and may give it up "
            "while tensors live in it"
        )
    if circumstances.uses_ipc:
        yield "expandable_segments with CUDA IPC: such memory cannot be shared with other processes as it is done elsewhere"
    if circumstances.has_virtual_memory is False:
        yield "expandable_segments on a device without virtual memory (some vGPUs)"
    if circumstances.has_nvml is False and release >= (2, 13):
        yield "expandable_segments without libnvidia-ml.so.1 crashes PyTorch from 2.13 on"
    if settings.max_split_bytes is not None and release >= (2, 12):
        yield (
            "expandable_segments with max_split_size_mb: a free block of that size or more, which is what expandable segments "
            "grow together to, then serves no smaller request"
        )


def _misread(conf: str, settings: AllocatorSettings) -> Iterator[str]:
    """Where what was told is not what is in force."""
    try:
        entries, said = dict(entries_of(conf)), parse_settings(conf)
    except SettingsError as error:
        yield str(error)
        return
    for key in entries:
        if key not in KEYS:
            try:
                parse_settings_to_try(f"{key}:1")
            except SettingsError as error:
                yield error.problem
    if not agree(said, settings):
        yield (
            f"what is in force is not what {conf or 'the default configuration'} says: something changed it at run time. "
            "The replay goes by what is in force"
        )
