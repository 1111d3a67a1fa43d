"""`allocscope capture`: a whole snapshot of a job that runs, fetched into a file; and who holds its tensors.

Exit status: 0 all that was asked for is there, 1 not all of it, 2 a wrong call, 130 nobody waited for it (Ctrl-C).
"""

from __future__ import annotations

import argparse
import json
import sys

from allocscope.cli.ask import PAGE, Collector, Json, Unanswered, answer, piece, understood
from allocscope.cli.capture_files import FileProblem, check_output, place_of, save
from allocscope.cli.capture_options import read_options, wrong_value
from allocscope.cli.capture_tensors import Told, read_tensors
from allocscope.cli.capture_text import Fetched, as_json, as_text, kept_rows, ordered_text
from allocscope.cli.capture_wait import Waiting
from allocscope.cli.known import check_job

HELP = "a whole snapshot of a job that runs, and who holds its tensors"
INTERRUPTED = 130
GIVEN_UP_AFTER_S = 450.0
"""A collector gives an order up after 420 s and its history's time, and then says why."""


def main(arguments: list[str]) -> int:
    """Order, wait, fetch, print."""
    options = read_options(arguments, HELP)
    try:
        return _run(options)
    except FileProblem as problem:
        print(f"allocscope capture: {problem}", file=sys.stderr)
        return 2
    except Unanswered as error:
        if (wrong := wrong_value(error)) is not None:
            print(f"allocscope capture: {wrong}", file=sys.stderr)
            return 2
        print(f"allocscope: {error}", file=sys.stderr)
        return 1


def _run(options: argparse.Namespace) -> int:
    if options.list:
        return _list(options)
    older = read_tensors(options.since) if options.since else None
    if options.read:
        return _tell([Fetched(None, options.read, read_tensors(options.read))], older, options)
    check_output(options.output, several=options.rank == "all")
    with Collector.of(options) as collector, understood(collector.url):
        if options.id is not None:
            found = [collector.get(f"captures/{piece(options.id)}/about")]
            return _tell([_fetched(collector, about, options) for about in found], older, options)
        return _order(collector, older, options)


def _list(options: argparse.Namespace) -> int:
    def known(collector: Collector) -> None:
        if options.job is not None:
            check_job(collector, options.job)

    return answer(options, "captures", {"job": options.job, "state": "kept", "limit": PAGE}, kept_rows, known=known)


def _order(collector: Collector, older: Told | None, options: argparse.Namespace) -> int:
    ordered = collector.post(f"jobs/{piece(options.job)}/captures", _wanted(options))
    if options.no_wait:
        print(json.dumps(ordered) if options.json else ordered_text(ordered["items"]))
        return 0
    waiting = Waiting(collector, ordered["items"])
    timeout_s = options.timeout if options.timeout is not None else GIVEN_UP_AFTER_S + (options.history or 0)
    try:
        waiting.wait(timeout_s)
        fetched = [_fetched(collector, about, options) for about in waiting.items]
    except KeyboardInterrupt:
        print(f"\n{waiting.how_to_fetch_later()}", file=sys.stderr)
        return INTERRUPTED
    return _tell(fetched, older, options)


def _wanted(options: argparse.Namespace) -> Json:
    wanted = {
        "rank": options.rank,
        "device": options.device,
        "history_s": options.history,
        "history_entries": options.entries,
        "tensors": options.tensors or None,
    }
    return {name: value for name, value in wanted.items() if value is not None}


def _fetched(collector: Collector, about: Json, options: argparse.Namespace) -> Fetched:
    """What came of it; whatever cannot be fetched or read costs itself only."""
    if about["state"] in ("ordered", "sent", "failed"):
        return Fetched(about, problem=about["problem"] or "it has not come yet: fetch it later with --id")
    path = place_of(options.output, about)
    try:
        with collector.download(f"captures/{piece(about['capture_id'])}") as pieces:
            save(pieces, path, about["snapshot_bytes"])
    except (Unanswered, FileProblem) as error:
        return Fetched(about, problem=str(error))
    try:
        return Fetched(about, path, read_tensors(path) if options.tensors else None)
    except FileProblem as problem:
        return Fetched(about, path, problem=str(problem))


def _tell(fetched: list[Fetched], older: Told | None, options: argparse.Namespace) -> int:
    print(json.dumps(as_json(fetched, older)) if options.json else as_text(fetched, older))
    return 1 if any(each.problem for each in fetched) else 0
