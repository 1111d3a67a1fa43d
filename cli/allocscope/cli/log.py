"""`allocscope log`: what PyTorch's allocator did, event by event, and what it came to."""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict
from heapq import merge
from itertools import chain

from allocscope.allocator.chronicle.choice import Choice
from allocscope.allocator.chronicle.events import Event
from allocscope.allocator.chronicle.history import DeviceHistory
from allocscope.allocator.chronicle.lines import LineReader
from allocscope.allocator.chronicle.standing import Standing
from allocscope.allocator.chronicle.tally import Tally
from allocscope.allocator.errors import AllocatorError
from allocscope.allocator.messages import LogReader
from allocscope.cli.log_json import account_as_json, end_as_json, event_as_json
from allocscope.cli.log_options import choice_of, parser, stamp_us
from allocscope.cli.log_source import WANTED, LogError, Recorded, Text, opened
from allocscope.cli.log_summary import Account, as_text
from allocscope.cli.log_text import (
    NO_SUCH_LINES,
    LineText,
    TextEnd,
    beginning_as_text,
    end_as_text,
    end_of_text,
    heading,
)
from allocscope.cli.prose import fold, prose_width

HELP = "what PyTorch's allocator did, event by event, and what it came to"


def main(arguments: list[str]) -> int:
    """0: told; 2: the file cannot be read, or tells no history."""
    asked = parser(HELP).parse_args(arguments)
    collects = gc.isenabled()
    gc.disable()  # a large history is many values and no cycles
    try:
        with opened(asked.file) as source:
            if isinstance(source, Recorded) and source.settings_problem:
                problem = f"its settings cannot be read ({source.settings_problem}), and are taken to be the defaults"
                print(f"allocscope log: {asked.file}: {problem}", file=sys.stderr)
            for line in _lines(asked, source):
                print(line)
    except AllocatorError as error:
        sys.stdout.flush()
        print(f"allocscope log: {error}", file=sys.stderr)
        return 2
    finally:
        if collects:
            gc.enable()
    return 0


# the answer, line by line


def _lines(asked: argparse.Namespace, source: Recorded | Text) -> Iterator[str]:
    if isinstance(source, Text):
        return _of_text(asked, source)
    places = range(len(source.devices))
    if asked.device is not None:
        places = [at for at in places if source.devices[at] == asked.device]  # type: ignore[assignment]
        if not places:
            known = ", ".join(map(str, source.devices))
            raise LogError(asked.file, f"has no history of device {asked.device}, but of {known}")
    end_us = max((source.traces[at][-1].time_us for at in places), default=0) or None
    choice = choice_of(asked, end_us)
    histories = (source.open(at) for at in places)
    if asked.summary:
        return _summary(asked, histories, choice)
    return _events(asked, list(histories), choice, end_us)


def _events(
    asked: argparse.Namespace, histories: list[DeviceHistory], choice: Choice, end_us: int | None
) -> Iterator[str]:
    show = _shown(asked, end_us)
    if not asked.json:
        for history in histories:
            yield "\n".join(beginning_as_text(history))
        yield heading(utc=asked.utc or end_us is None)
    streams = [history.events() for history in histories]
    events = streams[0] if len(streams) == 1 else merge(*streams, key=_time)
    yield from map(show, _chosen(asked, events, choice))
    for history in histories:
        yield json.dumps(end_as_json(history)) if asked.json else fold(end_as_text(history), prose_width())


def _shown(asked: argparse.Namespace, end_us: int | None) -> Callable[[Event], str]:
    if asked.json:
        return lambda event: json.dumps(event_as_json(event))
    return LineText(None if asked.utc else end_us).line


def _chosen(asked: argparse.Namespace, events: Iterator[Event], choice: Choice) -> Iterator[Event]:
    chosen = events if choice.is_all else filter(choice.takes, events)
    return iter(deque(chosen, maxlen=asked.last)) if asked.last else chosen


def _time(event: Event) -> int:
    return event.time_us or 0


def _summary(asked: argparse.Namespace, histories: Iterator[DeviceHistory], choice: Choice) -> Iterator[str]:
    accounts = []
    for history in histories:
        standing = Standing(history.live_before, history.reserved_before)
        tally = Tally(late_from_entry=history.entries // 2)

        def watched(history: DeviceHistory = history, standing: Standing = standing) -> Iterator[Event]:
            for event in history.events():
                if choice.until_us is None or (event.time_us or 0) <= choice.until_us:
                    standing.take(event)
                yield event

        for event in _chosen(asked, watched(), choice):
            tally.take(event)
        accounts.append(Account(device=history.device, tally=tally, history=history, standing=standing))
    yield _told(asked, accounts)


def _told(asked: argparse.Namespace, accounts: list[Account]) -> str:
    if asked.json:
        return json.dumps({"file": asked.file, "devices": [account_as_json(account) for account in accounts]})
    return "\n\n".join(fold(as_text(account), prose_width()) for account in accounts)


def _of_text(asked: argparse.Namespace, source: Text) -> Iterator[str]:
    """The same of a log, which is read once, as it comes."""
    log = _TextLog(source)
    events = log.events() if asked.device is None else filter(lambda e: e.pool.device == asked.device, log.events())
    chosen = _chosen(asked, events, choice_of(asked, None))
    if asked.summary:
        tally = Tally()
        for event in chosen:
            tally.take(event)
        told = log.end(asked.file)
        tally.ooms = told.ooms
        yield _told(asked, [Account(device=asked.device, tally=tally, lines=told.lines)])
        return
    first = next(chosen, None)
    if first is not None and not asked.json:
        yield f"{fold(NO_SUCH_LINES, prose_width())}\n{heading(utc=True)}"
    yield from map(_shown(asked, None), chain(() if first is None else (first,), chosen))
    told = log.end(asked.file)
    yield json.dumps({"kind": "end"} | asdict(told)) if asked.json else end_of_text(told)


class _TextLog:
    """A log's text, read for events and for out-of-memory texts at once."""

    def __init__(self, source: Text) -> None:
        self._source, self._reader, self._messages = source, LineReader(stamp_us), LogReader()
        self._found = False

    def events(self) -> Iterator[Event]:
        """All that its lines tell."""
        for event in self._reader.events(self._chunks()):
            self._found = True
            yield event

    def _chunks(self) -> Iterator[str]:
        for chunk in self._source.chunks:
            self._messages.feed(chunk)
            yield chunk

    def end(self, file: str) -> TextEnd:
        """After the last event. LogError or NotASnapshotError: it told nothing."""
        report, lines = self._messages.end(), self._reader.lines
        ooms = sum(message.is_oom for message in report.messages)
        if not (self._found or ooms or report.retries):
            problem = f"tells nothing of an allocator in {lines:,} lines; {WANTED}"
            raise self._source.no_snapshot or LogError(file, problem)
        return TextEnd(lines, ooms, report.retries)
