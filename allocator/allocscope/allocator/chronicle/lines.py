"""A log in the form that blog posts show, as events.

    [INFO] Allocator: block 0x7f8c4a000000 (size 1024 MB) allocated to stream 0
    [INFO] Allocator: block 0x7f8c4a000000 freed, returning to pool
    [INFO] Allocator: merging block 0x7f8c4a000000 with adjacent free block
    [INFO] Allocator: new free block size 2048 MB

PyTorch prints no such lines: no wheel from 2.0.1 to 2.14.1 has them, and nothing reads TORCH_CUDA_ALLOC_LOG_LEVEL (ALLOCATOR.md
10). What PyTorch does print, from 2.13 on, are its warnings that the driver had no room; these are events too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator

from allocscope.allocator.chronicle.events import Allocated, Event, Freed, Merged, Pool, Retry
from allocscope.allocator.messages.cleaning import Line, Source, plain_lines, undress
from allocscope.allocator.messages.drafts import retry_alone
from allocscope.allocator.messages.figures import read_figure

Moment = Callable[[str], int | None]
"""The moment that the beginning of a line tells, unix microseconds; None: it tells none."""

LONGEST_LINE = 1 << 16
"""Characters; of a longer line the rest is taken for another."""
MOST_BLOCKS = 1 << 20
"""So many blocks' sizes are kept, to tell how large one was that is freed or merged."""
MOST_BYTES = 1 << 60
_SIZE = r"[(\[]?\s*(?:of\s+)?(?:size)?\s*[:=]?\s*(?:of\s+)?(?P<n>\d{1,18}(?:\.\d{1,6})?)\s*(?P<u>[kmgt]i?b|bytes?|b)\b\s*[)\]]?"
_STREAM = re.compile(r"\bstream[\s:=#]*(0x[0-9a-f]{1,16}|\d{1,20})", re.IGNORECASE)
_DEVICE = re.compile(r"\b(?:device|gpu|cuda)[\s:=#]*(\d{1,3})\b", re.IGNORECASE)
_POOL = re.compile(r"\b(small|large)[\s_-]*(?:block[\s_-]*)?pool\b", re.IGNORECASE)
_BLOCK = re.compile(r"\bblock\s*(?:at\s*)?[:=]?\s*(0x[0-9a-f]{1,16})\b(?P<more>.{0,400})", re.IGNORECASE)
_DOES = re.compile(r"\b(?:is\s+|was\s+)?(?P<what>allocated|freed|free'd|released|returned)\b", re.IGNORECASE)
_MERGING = re.compile(r"\b(?:merg(?:ing|ed?)|coalesc(?:ing|ed?))\s+(?:the\s+|free\s+)*$", re.IGNORECASE)
_AMOUNT = re.compile(_SIZE, re.IGNORECASE)
_NEW_FREE = re.compile(rf"\bnew\s+free\s+block\b\s*(?:at\s*)?(?P<a>0x[0-9a-f]{{1,16}})?[\s,:=]*{_SIZE}", re.IGNORECASE)
_RETRY = "allocation failed with oom"


class LineReader:
    """Events of such a log, given in chunks of any size; `lines` counts all its lines, `entry` of an event is its line."""

    def __init__(self, moment: Moment) -> None:
        self.lines = 0
        self._moment = moment
        self._blocks: dict[tuple[Source | None, int], tuple[int | None, Pool]] = {}
        self._merging: Merged | None = None
        """What is merged, while the line that tells what came of it may follow."""
        self._time_us: int | None = None

    def events(self, chunks: Iterable[str]) -> Iterator[Event]:
        """All that it tells, in order."""
        rest = ""
        for chunk in chunks:
            *whole, rest = (rest + chunk).split("\n")
            for line in whole:
                yield from self._line(line)
            if len(rest) > LONGEST_LINE:
                yield from self._line(rest)
                rest = ""
        if rest:
            yield from self._line(rest)
        if self._merging is not None:
            yield self._merging

    def _line(self, line: str) -> Iterator[Event]:
        self.lines += 1
        lower = line.lower()
        if _RETRY not in lower and ("block" not in lower or ("0x" not in lower and "free" not in lower)):
            return
        for part in plain_lines(line):
            if (event := self._event(part)) is not None:
                if self._merging is not None and event is not self._merging:
                    yield self._merging
                    self._merging = None
                if isinstance(event, Merged) and event.block_bytes is None:
                    self._merging = event
                else:
                    self._merging = None
                    yield event

    def _event(self, text: str) -> Event | None:
        line = undress(text)
        if _RETRY in text.lower():
            return self._retry(text, line)
        if (told := _NEW_FREE.search(text)) is not None:
            return self._came_of(told)
        block = _BLOCK.search(text)
        if block is None:
            return None
        time_us, address = self._moment(text), int(block[1], 16)
        if _MERGING.search(text, max(block.start() - 40, 0), block.start()):
            known, pool = self._blocks.get((line.source, address), (None, self._pool(text)))
            freed = _bytes(_AMOUNT.match(block["more"].lstrip()))
            return Merged(self.lines, time_us, pool, address, None, known if freed is None else freed, None, None)
        does = _DOES.search(block["more"])
        if does is None:
            return None
        size = _bytes(_AMOUNT.match(block["more"][: does.start()].lstrip(" ,:")))
        if does["what"].lower() == "allocated":
            return self._allocated(time_us, self._pool(text), address, size, line.source)
        known, pool = self._blocks.get((line.source, address), (None, self._pool(text)))
        return Freed(self.lines, time_us, pool, address, None, known if size is None else size)

    def _allocated(
        self, time_us: int | None, pool: Pool, address: int, size: int | None, source: Source | None
    ) -> Allocated:
        if len(self._blocks) >= MOST_BLOCKS:
            self._blocks.clear()
        self._blocks[source, address] = (size, pool)
        return Allocated(self.lines, time_us, pool, address, None, size, None, None, None)

    def _came_of(self, told: re.Match[str]) -> Merged | None:
        """What a merge came to; without one before it nothing is known of what happened."""
        merging, size = self._merging, _bytes(told)
        if merging is None or size is None:
            return None
        address = merging.address if told["a"] is None else int(told["a"], 16)
        self._merging = merged = merging._replace(address=address, block_bytes=size)
        return merged

    def _retry(self, text: str, line: Line) -> Retry | None:
        draft = retry_alone(line.squeezed)
        if draft is None:
            return None
        message = draft.message(self.lines, None, None, line.device)
        asked, free = message.requested, message.free
        return Retry(
            self.lines,
            self._moment(text),
            Pool(message.device, None, None, None),
            None if asked is None else asked.bytes,
            None if free is None else free.bytes,
        )

    @staticmethod
    def _pool(text: str) -> Pool:
        stream, device, pool = _STREAM.search(text), _DEVICE.search(text), _POOL.search(text)
        return Pool(
            None if device is None else int(device[1]),
            None if stream is None else int(stream[1], 16 if stream[1][:2] in ("0x", "0X") else 10),
            None if pool is None else pool[1].lower() == "small",
            None,
        )


def _bytes(found: re.Match[str] | None) -> int | None:
    """A printed size; MB and the like count in 1024s, as the allocator's sizes do."""
    if found is None:
        return None
    figure = read_figure(found["n"], found["u"])
    return None if figure is None or figure.bytes > MOST_BYTES else figure.bytes
