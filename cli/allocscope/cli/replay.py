"""`allocscope replay`: a recording's requests once more, under other settings; advice."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from allocscope.allocator.advice import Attempt, advise, check_change, hazards_of, outcome_of
from allocscope.allocator.errors import AllocatorError, ReplayError
from allocscope.allocator.recording import SUFFIX, read_recording
from allocscope.allocator.settings import parse_settings_to_try
from allocscope.allocator.simulator.history import Outcome
from allocscope.allocator.simulator.rules import is_version
from allocscope.allocator.simulator.script import Script
from allocscope.allocator.simulator.sources import source_of, sources_of
from allocscope.allocator.simulator.what_if import Source, different, script_of, weigh
from allocscope.allocator.snapshot import read_snapshot
from allocscope.cli.prose import fold, prose_width
from allocscope.cli.replay_case import golden_text, requests_text
from allocscope.cli.replay_options import known_of, options
from allocscope.cli.replay_progress import Bar
from allocscope.cli.replay_text import Replays, replays_as_json, replays_as_text
from allocscope.cli.replay_workers import Done, WorkerDied, Workers, processors
from allocscope.cli.snapshot_file import snapshot_data

HELP = "a recording's requests once more, under other settings; advice"
USUAL_ATTEMPTS = 20
"""What advice tries, about."""
WORTH_A_PROCESS = 100_000
"""Requests, of all settings together, from which on it is quicker to start processes than to go on alone."""
_FOR_A_FILE = (
    "conf",
    "change",
    "advise",
    "has",
    "lacks",
    "torch",
    "device_total",
    "device_other",
    "memory_fraction",
    "processes",
)


def main(arguments: list[str]) -> int:
    """0: replayed, to the end or to an OutOfMemoryError; 1: a worker process was killed; 2: the file cannot be used; 130: interrupted."""
    parser = options(HELP)
    asked = parser.parse_args(arguments)
    if sum(map(bool, (asked.file, asked.requests, asked.golden))) != 1:
        parser.error("name a FILE, or --requests, or --golden")
    if not asked.file and any(_is_given(getattr(asked, option)) for option in _FOR_A_FILE):
        names = [f"--{option.replace('_', '-')}" for option in _FOR_A_FILE]
        parser.error(f"{', '.join(names[:-1])} and {names[-1]} are for a FILE; requests written down have their own")
    if both := asked.has & asked.lacks:
        parser.error(f"--has and --lacks both name {', '.join(sorted(both))}")
    try:
        if asked.golden:
            text = golden_text(asked.golden, as_json=asked.json)
        elif asked.requests:
            text = requests_text(asked.requests, as_json=asked.json)
        else:
            text = _file(asked)
    except AllocatorError as error:
        print(f"allocscope replay: {error}", file=sys.stderr)
        return 2
    except WorkerDied as error:
        print(f"allocscope replay: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print(text)
    return 0


def _is_given(value: object) -> bool:
    return value is not None and value is not False and value not in ([], frozenset())


def _file(asked: argparse.Namespace) -> str:
    for conf in asked.conf:
        parse_settings_to_try(conf)
    if asked.torch and not is_version(asked.torch):
        raise ReplayError(asked.torch, "is not a version of PyTorch, such as 2.14.1")
    for change in asked.change:
        try:
            check_change(change)
        except ValueError as error:
            raise ReplayError("--change", str(error)) from error
    with Bar() as bar:
        bar.begin("reading")
        sources = {index: source for index, source in _sources(asked).items() if source.trace}
        if not sources:
            raise ReplayError(asked.file, "has no history; record one with torch.cuda.memory._record_memory_history()")
        found = {}
        for index, source in sources.items():
            bar.begin(f"device {index}" if len(sources) > 1 else "replaying")
            found[index] = _replays(source, asked, bar.tell)
    if asked.json:
        return json.dumps(replays_as_json(found))
    return fold(replays_as_text(found), prose_width())


def _replays(source: Source, asked: argparse.Namespace, tell: Callable[[float, int], None]) -> Replays:
    """All that was asked for of one device."""
    confs, changes = different(source.conf_in_force, asked.conf), list(dict.fromkeys(asked.change))
    history, script = script_of(source, version=asked.torch)
    attempts = [*(Attempt(conf) for conf in confs), *(Attempt(confs[0], change) for change in changes)]
    expected = len(attempts) + (USUAL_ATTEMPTS if asked.advise else 0)
    processes = asked.processes or (processors() if len(script.asked) * expected >= WORTH_A_PROCESS else 1)
    known = known_of(asked)
    with Workers(_replayed, script, min(processes, expected), tell) as workers:
        outcomes = list(workers.each(attempts))
        advice = None
        if asked.advise:
            advice = advise(
                source, circumstances=known, version=asked.torch, history=history, replays=lambda _: workers.each
            )
    return Replays(
        weigh(source, history, script, list(zip(confs, outcomes, strict=False)), version=asked.torch),
        changes=tuple(zip(changes, outcomes[len(confs) :], strict=True)),
        hazards=hazards_of(source, script, confs, known, version=asked.torch),
        advice=advice,
    )


def _replayed(script: Script, attempt: Attempt, done: Done) -> Outcome:
    if attempt.change is not None or attempt.room_bytes is not None:
        return outcome_of(script, attempt)
    requests = max(len(script.asked), 1)
    return script.replay(attempt.conf, lambda made: done(made / requests))


def _sources(asked: argparse.Namespace) -> dict[int, Source]:
    """What FILE says of each device, and what is told of it."""
    path, total, other = asked.file, asked.device_total, asked.device_other
    if path.endswith(SUFFIX):
        run = read_recording(path)
        source = source_of(run)
        found = {
            run.device_index: replace(
                source,
                device_total_bytes=total or source.device_total_bytes,
                other_used=source.other_used if other is None else other,
            )
        }
    else:
        snapshot = read_snapshot(snapshot_data(Path(path)), path, tolerant=True)
        if snapshot.settings_problem:
            problem = f"its settings cannot be read ({snapshot.settings_problem}), and are taken to be the defaults"
            print(f"allocscope replay: {path}: {problem}", file=sys.stderr)
        found = sources_of(snapshot, device_total_bytes=total, other_bytes=other)
    if asked.memory_fraction is None:
        return found
    return {index: replace(source, memory_fraction=asked.memory_fraction) for index, source in found.items()}
