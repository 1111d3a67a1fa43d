"""Messages in a log of any size, in bounded memory."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields, replace
from itertools import product

from allocscope.allocator.messages.cleaning import Line, Source, plain_lines, squeeze, undress
from allocscope.allocator.messages.drafts import LONGEST_MESSAGE, drafts, retry_alone
from allocscope.allocator.messages.message import OomMessage, Origin
from allocscope.allocator.messages.phrases import anchored, begins_message

BLOCK_CHARS = 1 << 16
"""The log is read in blocks of about so many characters; one without any anchor is passed over."""
MAX_KEPT_CHARS = 1 << 15
"""So much text of one source is kept before it is read."""
MAX_SOURCES = 256
MAX_MESSAGES = 10_000
QUIET_LINES = 30
"""After so many lines of a source without any anchor its message is over."""
_TAIL_CHARS = 64
_IDLE_CHARS = 400
"""What is kept of a source that says nothing of memory: an anchor may be broken over lines."""
_IDLE_PARTS = 64
_LOOK_BACK = 64
"""So many of the last messages are looked at for one that a message repeats."""


@dataclass(frozen=True, slots=True)
class OomReport:
    """What a log holds.

    What counts as one message: texts of one source (rank and worker, as far as they say) with the same figures, wherever they
    stand in the log. So an exception that chained tracebacks repeat, or that a launcher prints again, is one, with `times`; the
    same text of two ranks is two. A cut copy is the same message where it has the request and the device's free or total bytes
    in common with the whole one. Retry warnings of one rank and device are one message that shows the first one's figures.
    """

    messages: tuple[OomMessage, ...]
    """In the order of their first lines."""
    retries: int
    """Retry warnings, each counted (PyTorch 2.13 on: an OOM is preceded by two, a request that succeeds after a flush by one)."""
    lines: int
    left_out: int
    """Messages beyond MAX_MESSAGES different ones."""


def read_log(chunks: Iterable[str]) -> OomReport:
    """All out-of-memory texts of a log, given in chunks of any size.

    Holds for texts of PyTorch 1.0 to 2.14. Raises nothing; text without any message gives an empty report. Memory is bounded
    whatever the log holds: at most MAX_SOURCES × MAX_KEPT_CHARS characters and MAX_MESSAGES messages; the time grows with its
    size.
    """
    reader = LogReader()
    for chunk in chunks:
        reader.feed(chunk)
    return reader.end()


@dataclass(slots=True)
class _Kept:
    """What one source has said lately."""

    source: Source
    parts: list[tuple[int, int | None, str]] = field(default_factory=list)
    """Line number, the device of its prefix, squeezed text."""
    chars: int = 0
    tail: str = ""
    open: bool = False
    quiet: int = 0

    def add(self, number: int, line: Line) -> None:
        self.parts.append((number, line.device, line.squeezed))
        self.chars += len(line.squeezed)
        probe = self.tail + line.squeezed
        self.tail = probe[-_TAIL_CHARS:]
        if anchored(probe):
            self.open, self.quiet = True, 0
        elif self.open:
            self.quiet += 1
        else:
            self._forget()

    def _forget(self) -> None:
        while self.parts and (self.chars - len(self.parts[0][2]) >= _IDLE_CHARS or len(self.parts) > _IDLE_PARTS):
            self.chars -= len(self.parts.pop(0)[2])
        if self.chars > 2 * _IDLE_CHARS:
            number, device, text = self.parts[-1]
            self.parts = [(number, device, text[-_IDLE_CHARS:])]
            self.chars = _IDLE_CHARS

    def starts(self) -> Iterator[int]:
        """Where each part begins in the text."""
        at = 0
        for part in self.parts:
            yield at
            at += len(part[2])

    def drop(self, count: int) -> None:
        """Forget so many characters from the beginning."""
        while self.parts and count >= len(self.parts[0][2]):
            count -= len(self.parts.pop(0)[2])
        if count and self.parts:
            number, device, text = self.parts[0]
            self.parts[0] = (number, device, text[count:])
        self.chars = sum(len(part[2]) for part in self.parts)
        self.open, self.quiet = bool(self.parts), 0
        if not self.parts:
            self.tail = ""


class LogReader:
    """Reads a log chunk by chunk; `end` gives the report."""

    def __init__(self) -> None:
        self._rest: list[str] = []
        self._rest_chars = 0
        self._line = 1
        self._middle = False
        """Does the next block begin in the middle of a line?"""
        self._seam = ""
        self._kept: OrderedDict[Source, _Kept] = OrderedDict()
        self._last = Source()
        self._parts: dict[Source, Source] = {}
        self._found = _Found()

    def feed(self, text: str) -> None:
        """Take the next text of the log, of any size."""
        for at in range(0, len(text), BLOCK_CHARS):
            piece = text[at : at + BLOCK_CHARS]
            self._rest.append(piece)
            self._rest_chars += len(piece)
            if self._rest_chars >= BLOCK_CHARS:
                self._take_block(last=False)

    def end(self) -> OomReport:
        """No more comes: what the log held."""
        self._take_block(last=True)
        for kept in self._kept.values():
            self._read(kept)
        self._kept.clear()
        return self._found.report(self._line - 1 + self._middle)

    def _take_block(self, *, last: bool) -> None:
        block = "".join(self._rest)
        cut = len(block) if last or self._rest_chars >= 2 * BLOCK_CHARS else block.rfind("\n") + 1
        if not cut:
            return
        block, rest = block[:cut], block[cut:]
        self._rest, self._rest_chars = [rest], len(rest)
        squeezed = squeeze(block)
        if not anchored(self._seam + squeezed) and not any(kept.open for kept in self._kept.values()):
            block = self._pass_over(block)
        self._seam = squeezed[-_TAIL_CHARS:]
        *whole, broken = block.split("\n")
        for raw in whole:
            self._take_line(raw)
            self._middle = False
            self._line += 1
        if broken:
            self._take_line(broken)
            self._middle = True

    def _pass_over(self, block: str) -> str:
        """All but the last lines, which may hold the beginning of an anchor."""
        at = len(block) - _IDLE_CHARS
        at = block.find("\n", at) + 1 if at > 0 else 0
        if at:
            self._line += block.count("\n", 0, at)
            self._middle = False
        return block[at:]

    def _take_line(self, raw: str) -> None:
        if self._middle:
            self._keep(self._last, Line(None, None, squeeze(" ".join(plain_lines(raw)))))
            return
        source: Source | None = None
        for part in plain_lines(raw):
            line = undress(part)
            source = self._source(line) or source or self._unsaid(line)
            self._last = source
            retry = retry_alone(line.squeezed)
            if retry is None:
                self._keep(source, line)
            else:
                self._found.add(retry.message(self._line, source.rank, source.worker, line.device))

    def _source(self, line: Line) -> Source | None:
        """Whose a line is that says so; one that says only a part continues the last one of which that was a part."""
        said = line.source
        if said is None:
            return None
        part = Source(None, said.worker) if said.rank is not None and said.worker else said.without_inner()
        if part != said:
            if len(self._parts) >= MAX_SOURCES:
                self._parts.clear()
            self._parts[part] = said
            return said
        if begins_message(line.squeezed):
            self._parts.pop(said, None)
        return self._parts.get(said, said)

    def _unsaid(self, line: Line) -> Source:
        """Whose a line is that does not say: it continues the line before, unless it has a beginning of its own."""
        return Source() if begins_message(line.squeezed) else self._last

    def _keep(self, source: Source, line: Line) -> None:
        kept = self._kept.get(source)
        if kept is None:
            if len(self._kept) >= MAX_SOURCES:
                self._read(self._kept.popitem(last=False)[1])
            kept = self._kept[source] = _Kept(source)
        else:
            self._kept.move_to_end(source)
        kept.add(self._line, line)
        if kept.open and (kept.quiet > QUIET_LINES or kept.chars > MAX_KEPT_CHARS):
            self._read(kept, hold_back=kept.quiet <= QUIET_LINES)

    def _read(self, kept: _Kept, *, hold_back: bool = False) -> None:
        """Read what is kept of a source, and forget it; a message that may still go on is held back."""
        text, starts = "".join(part[2] for part in kept.parts), list(kept.starts())
        begins = frozenset(starts)
        found = drafts(text, begins.__contains__) if kept.open else []
        held = found[-1].start if hold_back and found and len(text) - found[-1].start <= LONGEST_MESSAGE else len(text)
        for draft in found:
            if draft.start < held or not held:
                number, device, _ = kept.parts[bisect_right(starts, draft.start) - 1]
                self._found.add(draft.message(number, kept.source.rank, kept.source.worker, device))
        kept.drop(held or len(text))


class _Found:
    """The messages so far, each once."""

    def __init__(self) -> None:
        self._messages: list[OomMessage] = []
        self._figures: list[tuple[object, ...]] = []
        """Of each message, as its first copy has them."""
        self._by_figures: dict[tuple[object, ...], list[int]] = {}
        """By figures, rank and worker, either of these as it is said (or not) and as `_ANY`."""
        self._retries = self._left_out = 0

    def add(self, message: OomMessage) -> None:
        self._retries += message.origin is Origin.RETRY
        at = self._same(message)
        if at is not None:
            known = self._messages[at]
            self._messages[at] = joined = _joined(known, message)
            if (joined.rank, joined.worker) != (known.rank, known.worker):
                self._index(at)
            return
        if len(self._messages) >= MAX_MESSAGES:
            self._left_out += 1
            return
        self._messages.append(message)
        self._figures.append(_figures(message))
        self._index(len(self._messages) - 1)

    def _index(self, at: int) -> None:
        message, figures = self._messages[at], self._figures[at]
        for rank, worker in product((message.rank, _ANY), (message.worker, _ANY)):
            found = self._by_figures.setdefault((figures, rank, worker), [])
            if at not in found[-1:]:
                insort(found, at)

    def report(self, lines: int) -> OomReport:
        ordered = sorted(self._messages, key=lambda message: message.line)
        return OomReport(tuple(ordered), self._retries, lines, self._left_out)

    def _same(self, message: OomMessage) -> int | None:
        figures = _figures(message)
        ranks = (_ANY,) if message.rank is None else (message.rank, None)
        workers = (_ANY,) if message.worker is None else (message.worker, None)
        equals = [self._first(message, (figures, rank, worker)) for rank, worker in product(ranks, workers)]
        if found := [at for at in equals if at is not None]:
            return min(found)
        for at in range(len(self._messages) - 1, max(len(self._messages) - _LOOK_BACK, 0) - 1, -1):
            if _one_source(self._messages[at], message) and _cut_copies(self._messages[at], message):
                return at
        return None

    def _first(self, message: OomMessage, key: tuple[object, ...]) -> int | None:
        """The first under a key that is the message's source still: a joined copy may have said more of it."""
        places = self._by_figures.get(key, [])
        while places and not _one_source(self._messages[places[0]], message):
            del places[0]
        return places[0] if places else None


_ANY = object()
_SAID = tuple(
    f.name
    for f in fields(OomMessage)
    if f.name not in ("line", "kind", "rank", "worker", "times", "expandable", "conf_name")
)
_SAID_BY_PARTS = tuple(name for name in _SAID if name not in ("origin", "other_processes", "over_limit"))


def _figures(message: OomMessage) -> tuple[object, ...]:
    if message.origin is Origin.RETRY:
        return (message.origin, message.device)
    return tuple(getattr(message, name) for name in _SAID)


def _one_source(a: OomMessage, b: OomMessage) -> bool:
    """May both be of one source, as far as they say?"""
    return (a.rank is None or b.rank is None or a.rank == b.rank) and (
        a.worker is None or b.worker is None or a.worker == b.worker
    )


def _cut_copies(a: OomMessage, b: OomMessage) -> bool:
    """Is one a cut copy of the other?"""
    if a.origin is not b.origin or a.requested is None or a.requested != b.requested:
        return False
    if not (a.free == b.free is not None or a.total == b.total is not None):
        return False
    short, long = sorted((a.other_processes, b.other_processes), key=len)
    if short and short != long[: len(short)]:
        return False
    return all(
        getattr(a, name) is None or getattr(b, name) is None or getattr(a, name) == getattr(b, name)
        for name in _SAID_BY_PARTS
    )


def _joined(first: OomMessage, again: OomMessage) -> OomMessage:
    """The message with what its copy adds."""
    if first.origin is Origin.RETRY:
        return replace(first, times=first.times + 1)
    known = {f.name: getattr(first, f.name) for f in fields(OomMessage)}
    added = {name: getattr(again, name) for name, value in known.items() if value is None or value == ()}
    return replace(first, **added, line=min(first.line, again.line), times=first.times + again.times)
