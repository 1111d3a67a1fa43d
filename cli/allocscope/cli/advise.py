"""`allocscope advise`: what would help a job, from replays of its own requests.

Exit status: 0 told, 1 there is none (yet), or no collector answered, 2 a wrong call, 130 nobody waited for it (Ctrl-C).
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from allocscope.cli.advise_text import as_text, nothing_text, shell_word
from allocscope.cli.advise_wait import Missing, order_fresh, wait_for
from allocscope.cli.ask import PAGE, Collector, Json, Unanswered, parser, piece, read_name, understood
from allocscope.cli.capture_options import read_seconds, wrong_value
from allocscope.cli.known import check_rank
from allocscope.cli.prose import fold, prose_width

HELP = "what would help a job, from replays of its own requests"
INTERRUPTED = 130
HISTORY_S = 20.0
WITHIN_S = 900.0
"""Of an order that nobody answers a collector says so after 420 s and its history's time; a replay takes 120 s by default."""


def main(arguments: list[str]) -> int:
    """Ask, where wanted for a fresh one, and print."""
    options = _options(arguments)
    try:
        with Collector.of(options) as collector, understood(collector.url):
            found = _found(collector, options)
            if options.rank is not None and not found["items"] and not found["under_way"]:
                check_rank(collector, options.job, options.rank)
            return _tell(found, options)
    except (Unanswered, Missing) as error:
        if isinstance(error, Unanswered) and (wrong := wrong_value(error)) is not None:
            print(f"allocscope advise: {wrong}", file=sys.stderr)
            return 2
        print(f"allocscope: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"\nit goes on without you; ask again: allocscope advise {shell_word(options.job)}", file=sys.stderr)
        return INTERRUPTED


def _options(arguments: list[str]) -> argparse.Namespace:
    asking = parser("advise", HELP, "llama --fresh --history 1m")
    asking.add_argument("job", type=read_name, metavar="JOB", help="its name, as allocscope jobs tells it")
    asking.add_argument(
        "--rank", type=_rank, metavar="R", help="of this rank (default: of all that there is advice for)"
    )
    asking.add_argument("--wait", action="store_true", help="wait for what is still to come, if anything is")
    asking.add_argument(
        "--fresh", action="store_true", help="record the job's history now, and wait for what its replay says"
    )
    asking.add_argument(
        "--history",
        type=read_seconds,
        metavar="TIME",
        help=f"with --fresh: for so long; 0.1s to 10m (default: {HISTORY_S:.0f}s)",
    )
    asking.add_argument("--timeout", type=read_seconds, metavar="TIME", help="how long to wait (default: 15m)")
    options = asking.parse_args(arguments)
    if options.history is not None and not options.fresh:
        asking.error("--history is for --fresh")
    if options.timeout is not None and not (options.fresh or options.wait):
        asking.error("--timeout is for --wait and --fresh")
    return options


def _rank(told: str) -> int:
    if not (told.isascii() and told.isdecimal() and len(told) <= 9):
        raise argparse.ArgumentTypeError(f"{told!r} is not a rank")
    return int(told)


def _found(collector: Collector, options: argparse.Namespace) -> dict[str, Any]:
    """What the collector knows, after what was to be waited for."""
    path = f"jobs/{piece(options.job)}/advice"
    timeout_s = WITHIN_S if options.timeout is None else options.timeout
    params: Json = {"rank": options.rank, "limit": PAGE}
    if options.fresh:
        history_s = HISTORY_S if options.history is None else options.history
        capture_id = order_fresh(collector, options.job, options.rank, history_s)
        return wait_for(collector, path, {"capture": capture_id}, timeout_s)
    if options.wait:
        return wait_for(collector, path, params, timeout_s)
    return collector.get(path, params)


def _tell(found: Json, options: argparse.Namespace) -> int:
    if options.json:
        print(json.dumps(found))
    elif found["items"]:
        print(fold(as_text(found), prose_width()))
    else:
        print(fold(nothing_text(found), prose_width()))
    return 0 if found["items"] else 1
