"""The options of `allocscope capture`, and what of them cannot be together."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from allocscope.cli.ask import Unanswered, parser, read_name


def read_options(arguments: list[str], does: str) -> argparse.Namespace:
    """SystemExit, as argparse does it, where the call is wrong."""
    asking = _parser(does)
    options = asking.parse_args(arguments)
    if (wrong := _wrong_call(options)) is not None:
        asking.error(wrong)
    return options


def _parser(does: str) -> argparse.ArgumentParser:
    made = parser("capture", does, "llama --rank 3 --history 20s --tensors")
    made.add_argument(
        "job", type=read_name, metavar="JOB", nargs="?", help="the job to capture; with --list: of which to list"
    )
    made.add_argument(
        "--rank", type=_rank, metavar="R", help="a rank, or all (default: the one nearest to running out)"
    )
    made.add_argument("--device", metavar="D", help="a GPU's index on its node, or its UUID (default: all it uses)")
    made.add_argument(
        "--history",
        type=read_seconds,
        metavar="TIME",
        help="record the history for so long first, such as 20s; 0.1s to 10m",
    )
    made.add_argument(
        "--entries", type=_whole, metavar="N", help="at most so many entries of history; 1 to 1000000 (default: 200000)"
    )
    made.add_argument("--tensors", action="store_true", help="tell who holds the live tensors")
    made.add_argument("--since", type=Path, metavar="FILE", help="an earlier capture: what grew since then, of tensors")
    made.add_argument(
        "--output", type=Path, metavar="PATH", help="a file, or a folder (default: named for the job, here)"
    )
    made.add_argument(
        "--timeout",
        type=read_seconds,
        metavar="TIME",
        help="how long to wait (default: 450s and the history's time; the collector has given it up by then)",
    )
    made.add_argument("--no-wait", action="store_true", help="order it, and fetch it another time with --id")
    made.add_argument("--list", action="store_true", help="list those that are kept")
    made.add_argument("--id", type=read_name, metavar="ID", help="fetch one that is kept; --list tells its id")
    made.add_argument("--read", type=Path, metavar="FILE", help="tell of the tensors in a file that was fetched before")
    return made


def _wrong_call(options: argparse.Namespace) -> str | None:
    ways = [options.list, options.id is not None, options.read is not None]
    if sum(ways) > 1:
        return "--list, --id and --read exclude one another"
    if options.job is None and not any(ways):
        return "name the job to capture, or --list, --id or --read"
    if options.job is not None and any(ways[1:]):
        return "with --id or --read no job is named"
    if options.since is not None and not (options.tensors or options.read):
        return "--since compares tensors: it needs --tensors"
    if options.no_wait and any((options.output, options.since, *ways)):
        return "with --no-wait nothing is fetched"
    return None


def _rank(told: str) -> int | str:
    if told == "all":
        return told
    if re.fullmatch(r"\d{1,9}", told) is None:
        raise argparse.ArgumentTypeError(f"{told!r} is not a rank, nor all")
    return int(told)


def _whole(told: str) -> int:
    if re.fullmatch(r"\d{1,18}", told, re.ASCII) is None:
        raise argparse.ArgumentTypeError(f"{told!r} is not a whole number, such as 100000")
    return int(told)


def _option(parameter: str) -> str:
    """What the command line calls what the collector's API calls so."""
    return {"history_s": "--history", "history_entries": "--entries"}.get(parameter, f"--{parameter}")


def wrong_value(refusal: Unanswered) -> str | None:
    """What is wrong with the options of an order, where the collector refuses their values; None: that is not why."""
    problems = refusal.details.get("problems") if refusal.code == "bad_parameter" else None
    if not isinstance(problems, list) or not problems:
        return None
    return "; ".join(
        f"{_option(str(one.get('parameter')))}: {one.get('message')}" for one in problems if isinstance(one, dict)
    )


_SECONDS = {"": 1, "s": 1, "m": 60, "min": 60, "h": 3600}


def read_seconds(told: str) -> float:
    """Seconds of an option: a number of them, or of minutes or hours."""
    found = re.fullmatch(r"(\d{1,9}(?:\.\d{1,6})?) ?(s|m|min|h|)", told)
    if found is None:
        raise argparse.ArgumentTypeError(f"{told!r} is not a time, such as 20s or 5m")
    return float(found[1]) * _SECONDS[found[2]]
