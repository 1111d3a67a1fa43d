"""`./dev foresight FOLDER` (python -m tests.foresight): how good the forecast is over recorded runs, in a table, one line a way of seeing them.

FOLDER holds recordings (NAME.run.json, NAME.pickle.gz) and labels.json. `--fit` looks instead for better constants, family by family;
`--unseen N` takes no folder, and makes runs up instead.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from allocscope.alerts.forecast import Constants
from tests.foresight import fit, unseen
from tests.foresight.lockstep import rehearse
from tests.foresight.runs import VARIANTS, Run, read_runs
from tests.foresight.verdict import Verdict, verdict

HEAD = "| seen | deaths foreseen | by fragmentation | false alarms | cause right | median lead | not foreseen; false; too often |"
UNSEEN_HEAD = "| made-up runs | deaths foreseen | false alarms | cause right | median lead | too often |"


def main() -> int:
    """Print what was asked for."""
    parser = argparse.ArgumentParser(prog="./dev foresight", description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", help="recordings, with labels.json")
    parser.add_argument("--fit", action="store_true", help="look for better constants")
    parser.add_argument(
        "--unseen", type=int, metavar="N", help="make up N runs of each kind, and say how these come out"
    )
    parser.add_argument("--first-seed", type=int, default=0, metavar="SEED", help="of the N runs (default: 0)")
    options = parser.parse_args()
    if options.unseen is not None:
        return _unseen(range(options.first_seed, options.first_seed + options.unseen))
    if options.folder is None or not (options.folder / "labels.json").is_file():
        parser.error(f"{options.folder or 'no folder'} has no labels.json, which says of each recording how it ended")
    runs = read_runs(options.folder)
    if options.fit:
        return fit.report(runs)
    _print_head(HEAD)
    for name, variant in VARIANTS.items():
        print(_line(name, [variant(run) for run in runs]), flush=True)
    print(_line("expandable segments on, by replay", read_runs(options.folder, expandable=True)), flush=True)
    return 0


def _print_head(head: str) -> None:
    print(head, "|---" * head.count("|", 1) + "|", sep="\n")


def _unseen(seeds: range) -> int:
    wanted = list(unseen.wanted(seeds))
    runs = unseen.made(wanted)
    found = verdict(runs, rehearse(runs, Constants()))
    _print_head(UNSEEN_HEAD)
    for what, among in _groups(wanted):
        outcomes = (outcome for run, outcome in zip(wanted, found.outcomes, strict=True) if run in among)
        print(_unseen_line(what, Verdict(tuple(outcomes))), flush=True)
    return 0


def _groups(runs: list[unseen.Wanted]) -> Iterator[tuple[str, set[unseen.Wanted]]]:
    """Whose verdict is a line of its own."""
    yield "all", set(runs)
    yield "families and seeds that rules were chosen by", {run for run in runs if not run.is_held_out}
    yield "the others", {run for run in runs if run.is_held_out}
    yield "nothing grows", {run for run in runs if not run.kind.course}
    for low, high in unseen.FULL:
        yield f"stops at {low:.0%} to {high:.0%} of the room", {run for run in runs if run.stops_between(low, high)}
    for kind in (*unseen.GROWING, *unseen.LEVEL):
        yield kind.name, {run for run in runs if run.kind == kind}


def _unseen_line(what: str, found: Verdict) -> str:
    lead = "–" if found.lead_s is None else f"{found.lead_s:.0f} s"
    return (
        f"| {what} | {found.hits} of {len(found.deaths)} | {found.false} of {len(found.healthy)} |"
        f" {found.right} of {found.hits} | {lead} | {len(found.flapping)} |"
    )


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
