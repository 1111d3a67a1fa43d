"""Which settings are worth a try for a history."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from allocscope.allocator.conf import SIZE_KEYS, kept, text_of
from allocscope.allocator.settings import MIB, MIN_LARGE_BYTES, SMALL_MAX_BYTES, AllocatorSettings, parse_settings
from allocscope.allocator.simulator.history import Asked

_LARGE_SEGMENT_MB = 128
_SHARES = (1 / 4, 1 / 2, 3 / 4)
"""Of the sizes that may be kept whole, the ones at which max_split_size_mb is tried."""
_MIXED_BYTES = 128 * MIB
"""How much must be live at once in requests that share segments, for the size of these to matter."""


def candidates(
    asked: Sequence[Asked], in_force: Mapping[str, str], release: tuple[int, int], *, has_limit: bool
) -> list[str]:
    """PYTORCH_CUDA_ALLOC_CONF strings, the simplest and safest first; none says what is in force already.

    `in_force` are the keys that are set; what decides no sizes stays in all of them. `release` is PyTorch's, first two numbers.
    """
    now = parse_settings(text_of(in_force))
    return _confs(_choices(asked, in_force, now, release, has_limit), in_force)


def more_candidates(in_force: Mapping[str, str], release: tuple[int, int]) -> list[str]:
    """The same, of what is tried only where none of the others serves: before it is said that no settings do."""
    return _confs(_further_choices(release), in_force)


def _confs(choices: Iterable[dict[str, str]], in_force: Mapping[str, str]) -> list[str]:
    now = parse_settings(text_of(in_force))
    found = dict.fromkeys(text_of({**kept(in_force), **each}) for each in choices)
    return [conf for conf in found if parse_settings(conf) != now]


def _further_choices(release: tuple[int, int]) -> Iterator[dict[str, str]]:
    for divisions in ("2", "4", "32"):
        yield {"roundup_power2_divisions": divisions}
    if release >= (2, 1):
        for divisions in ("4", "8"):
            yield {"expandable_segments": "True", "roundup_power2_divisions": divisions}
    for limit_mb in ("32", "64", "128", "256", "512"):
        yield {"max_split_size_mb": limit_mb}
        yield {"max_split_size_mb": limit_mb, "roundup_power2_divisions": "8"}
    if release >= (2, 11):
        yield {"expandable_segments": "True", "large_segment_size_mb": "12"}
        for segment_mb in ("32", "64", "128", "256"):
            yield {"large_segment_size_mb": segment_mb}


def _choices(
    asked: Sequence[Asked],
    in_force: Mapping[str, str],
    now: AllocatorSettings,
    release: tuple[int, int],
    has_limit: bool,
) -> Iterator[dict[str, str]]:
    if any(key in in_force for key in SIZE_KEYS):
        yield {}
    expandable = {"expandable_segments": "True"} if release >= (2, 1) else None
    if expandable:
        yield expandable
        rounding = in_force.get("roundup_power2_divisions")
        if rounding:
            yield {**expandable, "roundup_power2_divisions": rounding}
    for divisions in ("8", "16"):
        yield {"roundup_power2_divisions": divisions}
    if expandable:
        yield {**expandable, "roundup_power2_divisions": "16"}
    limits = split_limits_mb(asked, now)
    for limit_mb in limits:
        yield {"max_split_size_mb": str(limit_mb)}
    if limits:
        yield {"max_split_size_mb": str(limits[len(limits) // 2]), "roundup_power2_divisions": "16"}
    if release >= (2, 11) and _mixed_peak_bytes(asked) >= _MIXED_BYTES:
        yield {"large_segment_size_mb": str(_LARGE_SEGMENT_MB)}
    if has_limit:
        yield {"garbage_collection_threshold": "0.8"}


def split_limits_mb(asked: Sequence[Asked], settings: AllocatorSettings) -> list[int]:
    """At which sizes this job's large requests part into those to be kept whole and the rest; MiB, none below what PyTorch takes."""
    least = AllocatorSettings().large_segment_bytes
    sizes = sorted({settings.round(each.size) for each in asked if each.what == "malloc" and each.size > least})
    return list(dict.fromkeys(sizes[int(share * len(sizes))] // MIB for share in _SHARES)) if sizes else []


def _mixed_peak_bytes(asked: Sequence[Asked]) -> int:
    """The most that is live at once of what gets no segment of its own."""
    live = peak = 0
    sizes: dict[int, int] = {}
    for each in asked:
        if each.what == "malloc" and SMALL_MAX_BYTES < each.size < MIN_LARGE_BYTES:
            sizes[each.key] = each.size
            live += each.size
            peak = max(peak, live)
        elif each.what == "free":
            live -= sizes.pop(each.key, 0)
    return peak
