"""`./dev bench [NAME…] [--json]`: what Allocscope costs, measured here and now. docs/BENCHMARKS.md says what was.

Each bench prints figures, never a verdict: a machine that is busy with something else gives other ones. Where two things are
compared they run in turn, in one run, and the ratio is of each pair.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from tests.bench import (
    daemon_cost,
    forecast_tick,
    ingest,
    inspect_snapshot,
    outage,
    owners,
    probe_cost,
    replay,
    resume,
    simulator,
    suite,
    uplink_call,
)
from tests.bench import fresh_setup as setup
from tests.bench.figures import Figure


@dataclass(frozen=True, slots=True)
class Bench:
    """Something that can be measured."""

    measures: str
    figures: Callable[[argparse.Namespace], Iterable[Figure]]


BENCHES = {
    "ingest": Bench("a collector's samples a second, beside a bare executemany", lambda _: ingest.figures()),
    "daemon": Bench("a daemon's CPU and memory with 8 devices and 16 jobs", lambda _: daemon_cost.figures()),
    "outage": Bench("how soon a node has caught up after an hour without a collector", lambda _: outage.figures()),
    "uplink": Bench("what handing on a sample costs a job's thread", lambda _: uplink_call.figures()),
    "owners": Bench("what it costs a daemon to say whose processes are", lambda _: owners.figures()),
    "forecast": Bench("a tick of the forecast over 10,000 allocators", lambda _: forecast_tick.figures()),
    "resume": Bench("a collector's start, beside following the same jobs live", lambda _: resume.figures()),
    "probe": Bench("what the probe costs a job, on the real allocator in the rig", lambda _: probe_cost.figures()),
    "simulator": Bench("the simulator's requests a second, beside a bare dict", lambda _: simulator.figures()),
    "replay": Bench("allocscope replay of eight settings, and of a long history", lambda _: replay.figures()),
    "inspect": Bench(
        "allocscope inspect of large snapshots, beside bare unpickling", lambda _: inspect_snapshot.figures()
    ),
    "setup": Bench("./dev setup in a fresh clone, packages downloaded before", lambda _: setup.figures()),
    "tests": Bench("./dev test", lambda _: suite.figures()),
}


def main() -> int:
    """Run those that are named, or all."""
    parser = _parser()
    options = parser.parse_args()
    if unknown := set(options.names) - BENCHES.keys():
        parser.error(f"there is no bench {', '.join(sorted(unknown))} (there are {', '.join(BENCHES)})")
    measured = {}
    for name in options.names or BENCHES:
        if not options.json:
            print(f"{name}: {BENCHES[name].measures}", flush=True)
        measured[name] = list(BENCHES[name].figures(options))
        if not options.json:
            print("".join(f"  {figure}\n" for figure in measured[name]), flush=True)
    if options.json:
        benches = {name: [figure.to_json() for figure in figures] for name, figures in measured.items()}
        print(json.dumps({"machine": _machine(), "benches": benches}))
    else:
        print(f"on {_machine()}")
    return 0


def _parser() -> argparse.ArgumentParser:
    listed = "\n".join(f"  {name:<9} {bench.measures}" for name, bench in BENCHES.items())
    parser = argparse.ArgumentParser(
        prog="./dev bench", description=f"{__doc__}\n{listed}", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: all")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    return parser


def _machine() -> str:
    load = os.getloadavg()[0]
    python = platform.python_version()
    return f"{len(os.sched_getaffinity(0))} CPUs, {platform.machine()}, Python {python}; load average when done: {load:.1f}"


if __name__ == "__main__":
    sys.exit(main())
