"""`./dev foresight FOLDER` (python -m tests.foresight): how good the forecast is over recorded runs, in a table, one line a way of seeing them.

FOLDER holds recordings (NAME.run.json, NAME.pickle.gz) and labels.json. `--fit` looks instead for better constants, family by family.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from allocscope.alerts.forecast import Constants
from tests.foresight import fit
from tests.foresight.lockstep import rehearse
from tests.foresight.runs import VARIANTS, Run, read_runs
from tests.foresight.verdict import Verdict, verdict

HEAD = "| seen | deaths foreseen | by fragmentation | false alarms | cause right | median lead | not foreseen; false; too often |"


def main() -> int:
    """Print what was asked for."""
    parser = argparse.ArgumentParser(prog="./dev foresight", description=__doc__)
    parser.add_argument("folder", type=Path, help="recordings, with labels.json")
    parser.add_argument("--fit", action="store_true", help="look for better constants")
    options = parser.parse_args()
    if not (options.folder / "labels.json").is_file():
        parser.error(f"{options.folder} has no labels.json, which says of each recording how it ended")
    runs = read_runs(options.folder)
    if options.fit:
        return fit.report(runs)
    print(HEAD, "|---" * HEAD.count("|", 1) + "|", sep="\n")
    for name, variant in VARIANTS.items():
        print(_line(name, [variant(run) for run in runs]), flush=True)
    print(_line("expandable segments on, by replay", read_runs(options.folder, expandable=True)), flush=True)
    return 0


def _line(name: str, runs: list[Run]) -> str:
    found = verdict(runs, rehearse(runs, Constants()))
    hits, of = found.among("fragmentation")
    lead = "–" if found.lead_s is None else f"{found.lead_s:.0f} s"
    return (
        f"| {name} | {found.hits} of {len(found.deaths)} | {hits} of {of} | {found.false} of {len(found.healthy)} |"
        f" {found.right} of {found.hits} | {lead} | {_names(found)} |"
    )


def _names(found: Verdict) -> str:
    false = [o.run.name for o in found.healthy if o.false]
    return "; ".join(", ".join(names) or "–" for names in (found.missed, false, found.flapping))


if __name__ == "__main__":
    raise SystemExit(main())
