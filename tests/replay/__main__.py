"""`./dev replay FOLDER…` (python -m tests.replay): how exact replays are, as the tables of docs/REPLAY.md.

Each FOLDER holds recordings (NAME.run.json, NAME.pickle.gz), or cases (PROFILE-SETTINGS.json.gz) of what PyTorch's allocator did.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from statistics import median

from allocscope.allocator.recording import SUFFIX, read_recording
from allocscope.allocator.simulator.sources import source_of
from allocscope.allocator.simulator.what_if import WhatIf, what_if
from tests.replay.cases import Case, read_cases
from tests.replay.cuts import Cut, cuts_of
from tests.replay.pairs import Pair, pairs_of

_RUNS = "| runs | entries | explained | segments | flushes | peak reserved | failing request |"
_PAIRS = (
    "| requests of | streams | pairs | segments | peak reserved | flushes, where known | failing request | all |"
    " of those whose history shows each empty_cache |"
)
_CUTS = "| runs | cuts | explained to the end | of all entries | a request fails where one did | and the same | peak / the real one |"


def main() -> int:
    """Print the tables; 1: a whole history, or a pair of one stream, is not exact."""
    parser = argparse.ArgumentParser(prog="./dev replay", description=__doc__)
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER")
    folders = parser.parse_args().folders
    paths = [path for folder in folders for path in sorted(folder.glob(f"*{SUFFIX}"))]
    profiles = {profile: cases for folder in folders for profile, cases in read_cases(folder).items()}
    if not paths and not profiles:
        parser.error(f"no recordings and no cases in {', '.join(map(str, folders))}")
    with ProcessPoolExecutor() as pool:
        runs = list(pool.map(_whole, paths))
        cases = [each for found in pool.map(_wholes, profiles.values()) for each in found]
        for what, found in (("recordings", runs), ("cases", cases)):
            if found:
                _print(f"Under the recorded settings: {what}", _RUNS, _whole_lines(found))
        pairs = dict(zip(profiles, pool.map(_pairs, profiles.values()), strict=True))
        if pairs:
            _print("Under other settings", _PAIRS, _pair_lines(profiles, pairs))
        if paths:
            cuts = [cut for found in pool.map(_cuts, paths) for cut in found]
            _print("Begun in the middle", _CUTS, _cut_lines(cuts))
    failed = [name for name, found in (*runs, *cases) if not found.exactness.exact]
    failed += [
        f"{pair.history} under {pair.other}"
        for profile, found in pairs.items()
        for pair in found
        if not pair.equal and profiles[profile][0].streams == 1
    ]
    for name in failed:
        print("not exact:", name)
    return bool(failed)


def _print(title: str, head: str, lines: Iterable[str]) -> None:
    print(f"\n## {title}\n", head, "|---" * (head.count("|") - 1) + "|", *lines, sep="\n", flush=True)


def _whole(path: Path) -> tuple[str, WhatIf]:
    run = read_recording(path)
    found = what_if(source_of(run), [])
    return run.name, _small(found)


def _wholes(cases: Sequence[Case]) -> list[tuple[str, WhatIf]]:
    return [(case.name, _small(what_if(case.source, []))) for case in cases]


def _small(found: WhatIf) -> WhatIf:
    """Without the requests, which are many."""
    bare = replace(found.history, asked=())
    return replace(found, history=bare, exactness=replace(found.exactness, history=bare))


def _pairs(cases: Sequence[Case]) -> list[Pair]:
    return list(pairs_of(cases))


def _cuts(path: Path) -> list[Cut]:
    run = read_recording(path)
    return list(cuts_of(run.name, source_of(run)))


def _whole_lines(wholes: Sequence[tuple[str, WhatIf]]) -> Iterator[str]:
    """A line a family, which is a name without what follows its last or last but one dash."""
    families: dict[str, list[WhatIf]] = {}
    for name, found in wholes:
        families.setdefault(name.split("-")[0], []).append(found)
    families["all"] = [found for _, found in wholes]
    for family, each in families.items():
        count = len(each)
        entries = sum(found.history.entries for found in each)
        explained = sum(found.history.explained for found in each)
        then, now = [e.exactness.recorded for e in each], [e.exactness.replayed for e in each]
        figures = (
            sum(
                (a.num_device_alloc, a.num_device_free) == (b.num_device_alloc, b.num_device_free)
                for a, b in zip(then, now, strict=True)
            ),
            sum(e.history.num_alloc_retries == e.exactness.replayed.num_alloc_retries for e in each),
            sum(a.reserved_peak_bytes == b.reserved_peak_bytes for a, b in zip(then, now, strict=True)),
            sum(e.exactness.replayed.failed_at == e.history.failed_at for e in each),
        )
        told = " | ".join(f"{figure} of {count}" for figure in figures)
        yield f"| {family} ({count}) | {entries:,} | {explained:,} | {told} |"


def _pair_lines(profiles: dict[str, list[Case]], pairs: dict[str, list[Pair]]) -> Iterator[str]:
    for profile, found in pairs.items():
        known = [pair for pair in found if pair.retries is not None]
        counts = (
            f"{sum(pair.segments for pair in found)}",
            f"{sum(pair.peak for pair in found)}",
            f"{sum(bool(pair.retries) for pair in known)} of {len(known)}",
            f"{sum(pair.failure for pair in found)}",
            f"{sum(pair.equal for pair in found)}",
            f"{sum(pair.equal for pair in found if pair.shown)} of {sum(pair.shown for pair in found)}",
        )
        yield f"| {profile} | {profiles[profile][0].streams} | {len(found)} | {' | '.join(counts)} |"


def _cut_lines(cuts: Sequence[Cut]) -> Iterator[str]:
    families: dict[str, list[Cut]] = {}
    for cut in cuts:
        families.setdefault(cut.name.split("-")[0], []).append(cut)
    families["all"] = list(cuts)
    for family, each in families.items():
        share = sum(cut.explained for cut in each) / sum(cut.entries for cut in each)
        ratios = [cut.peak_ratio for cut in each]
        ends, alike = sum(cut.ends_alike for cut in each), sum(cut.fails_alike for cut in each)
        yield (
            f"| {family} | {len(each)} | {sum(cut.exact for cut in each)} | {100 * share:.1f} % | {ends} | {alike} |"
            f" {median(ratios):.3f} ({min(ratios):.3f}–{max(ratios):.3f}) |"
        )


if __name__ == "__main__":
    raise SystemExit(main())
