"""`allocscope demo`: a fleet on this machine, from recordings of real jobs, and
a verdict on what Allocscope said of them.

One collector on an embedded SQLite, three daemons as three pretend nodes, and
recorded jobs, each a process that behaves toward its daemon as the real one
did, only faster.

Exit status 0: every foreseeable death was foreseen, no healthy job had a
critical alert, and the database holds every sample that a job handed on, once.
1: not so. 2: the fleet could not be run.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from allocscope.cli.demo.fleet import Fleet, FleetError
from allocscope.cli.demo.run import Run, cast
from allocscope.cli.demo.screen import Headless, Screen, Terminal

HELP = "a fleet on this machine, from recordings of real jobs"
RECORDINGS = Path(__file__).parent.parent / "recordings"
LASTS_S = 70.0
"""The fleet, once started, plays the longest recording in what is left of this; the whole demo lasts at most 90 s."""


def main(arguments: list[str]) -> int:
    """Run the demo; see the module."""
    options = _parser().parse_args(arguments)
    folder = Path(tempfile.mkdtemp(prefix="allocscope-"))
    try:
        with _stopping():
            return _run(Fleet(folder), options)
    except FleetError as error:
        print(f"allocscope demo: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 0 if options.keep else 130
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _run(fleet: Fleet, options: argparse.Namespace) -> int:
    screen: Screen = Terminal() if sys.stdout.isatty() and not options.headless else Headless(quiet=options.json)
    try:
        with screen:
            run = Run(fleet, cast(options.recordings), screen.show, speed=options.speed, lasts_s=LASTS_S)
            result = run.through()
        if options.json:
            print(json.dumps(result.to_json()), flush=True)
        else:
            screen.verdict(result)
        if options.keep:
            screen.kept(result.url)
            run.again_for_ever()
        return 0 if result.ok else 1
    finally:
        if not options.json:
            print("stopping the fleet …", file=sys.stderr)
        fleet.stop()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="allocscope demo",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--headless", action="store_true", help="no live table, also on a terminal")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end, and nothing else")
    parser.add_argument(
        "--keep", action="store_true", help="leave the fleet running, its jobs start anew when they end; Ctrl-C ends it"
    )
    parser.add_argument(
        "--speed",
        type=_speed,
        default=None,
        metavar="X",
        help="recorded seconds a second (default: what makes the demo last some 70 s)",
    )
    parser.add_argument(
        "--recordings",
        type=Path,
        default=RECORDINGS,
        metavar="FOLDER",
        help="recordings with their labels.json (default: those that come with Allocscope)",
    )
    return parser


def _speed(text: str) -> float:
    try:
        speed = float(text)
    except ValueError:
        speed = 0.0
    if not 1 <= speed <= 100:
        raise argparse.ArgumentTypeError(f"{text!r}: a number from 1 to 100")
    return speed


@contextmanager
def _stopping() -> Iterator[None]:
    """SIGTERM, and SIGHUP when its terminal closes, end it as Ctrl-C does: the fleet is stopped in order."""
    before = {number: signal.signal(number, signal.default_int_handler) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
