"""`python -m tests.advice FOLDER`: advice for everything in a folder, held against what is known of it, in tables.

FOLDER holds recordings (NAME.run.json, NAME.pickle.gz, and labels.json, which says how each ended), held against replays; or
cases of the real allocator (PROFILE-SETTINGS.json.gz), held against the same requests under other settings; or both. 1: some
advice is wrong.
"""

from __future__ import annotations

import argparse
import os
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from tests.advice import over_folder, truth
from tests.replay.cases import read_cases

Judged = over_folder.Judged | truth.Judged


def main() -> int:
    """Print the tables, and what they come to."""
    parser = argparse.ArgumentParser(prog="python -m tests.advice", description=__doc__)
    parser.add_argument("folder", type=Path, help="recordings, or cases")
    options = parser.parse_args()
    recordings, profiles = over_folder.recordings(options.folder), read_cases(options.folder)
    if not recordings and not profiles:
        parser.error(f"{options.folder} has neither recordings (NAME.run.json) nor cases (PROFILE-SETTINGS.json.gz)")
    judged: list[Judged] = []
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        if recordings:
            _head("| recording | it | advice | | exact | right |")
            for run in pool.map(over_folder.judge, recordings):
                print(_line(run, run.wrong or "yes"), flush=True)
                judged.append(run)
        if profiles:
            _head("| case | it | advice | | exact | the real allocator |")
            for cases in pool.map(truth.judge, profiles.values()):
                for case in cases:
                    print(_line(case, case.wrong or case.borne_out_by or "–"), flush=True)
                    judged.append(case)
    _sum_up(judged)
    return int(any(each.wrong for each in judged))


def _head(head: str) -> None:
    print(head, "|---" * (head.count("|") - 1) + "|", sep="\n")


def _line(each: Judged, verdict: str) -> str:
    advice = each.advice
    conf = "the default" if advice.conf == "" else advice.conf
    what = ", ".join(filter(None, (conf, advice.change))) or "–"
    return (
        f"| {each.name} | {'died' if each.died else 'did not fail'} | {advice.kind.value} | {what} |"
        f" {'yes' if advice.is_exact else 'no'} | {verdict} |"
    )


def _sum_up(judged: Sequence[Judged]) -> None:
    print()
    for died, title in ((True, "died"), (False, "did not fail")):
        own = [each for each in judged if each.died is died]
        kinds = Counter(each.advice.kind.value for each in own)
        right = sum(each.wrong is None for each in own)
        told = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
        print(f"of {len(own)} that {title}: {told}; right {right} of {len(own)}")


if __name__ == "__main__":
    raise SystemExit(main())
