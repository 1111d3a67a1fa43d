"""What a program asked of its allocator, in order."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import starmap
from typing import NamedTuple

OtherUsed = Callable[[int], int]
"""Bytes of the device in use at a moment (unix microseconds) that are not this allocator's."""


class Asked(NamedTuple):
    """One thing that a program asked for, or that came about."""

    what: str
    """malloc; free; wait: another stream uses it, and so its free will wait; done: the stream does not any more; empty_cache;
    end_pool: nobody uses a private pool any more, and what is free of it goes back; free_pool: it goes back when the cache is
    emptied. Of a history that begins in the middle first what was there: malloc for what was live; hole for a segment in pieces,
    freed again at once for these to lie in, and for what lay free between them, freed once all are there; and then began: figures
    are counted from here on. A hole for which there is no room is left out."""
    time_us: int
    key: int
    """Of the allocation, in order; of what is of no allocation 0."""
    size: int
    """malloc, hole: bytes as asked for."""
    stream: int
    pool_id: tuple[int, int]
    survived: bool = False
    """malloc: it ended in an OutOfMemoryError when it was recorded, and the program asked for more afterwards."""


_WHATS = ("malloc", "free", "wait", "done", "empty_cache", "end_pool", "free_pool", "hole", "began")
_CODES = {what: code for code, what in enumerate(_WHATS)}
_SURVIVED = len(_WHATS)
_LARGEST = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class Packed:
    """The same in columns: a fifth of the memory, and quickly handed to another process."""

    codes: bytes
    times_us: array[int]
    keys: array[int]
    sizes: array[int]
    streams: tuple[int, ...]
    """Each that occurs, and so the pools."""
    stream_at: array[int]
    pools: tuple[tuple[int, int], ...]
    pool_at: array[int]

    def __iter__(self) -> Iterator[Asked]:
        whats = [*((what, False) for what in _WHATS), *((what, True) for what in _WHATS)]
        kinds, survived = [what for what, _ in whats], [each for _, each in whats]
        return starmap(
            Asked,
            zip(
                map(kinds.__getitem__, self.codes),
                self.times_us,
                self.keys,
                self.sizes,
                map(self.streams.__getitem__, self.stream_at),
                map(self.pools.__getitem__, self.pool_at),
                map(survived.__getitem__, self.codes),
                strict=True,
            ),
        )

    def __len__(self) -> int:
        return len(self.codes)


def pack(asked: Sequence[Asked]) -> Packed:
    """In columns. Numbers larger than any that PyTorch has (damaged files do have them) become the largest there is."""
    streams = {stream: at for at, stream in enumerate(dict.fromkeys(each.stream for each in asked))}
    pools = {pool_id: at for at, pool_id in enumerate(dict.fromkeys(each.pool_id for each in asked))}
    return Packed(
        codes=bytes(_CODES[each.what] + _SURVIVED * each.survived for each in asked),
        times_us=_column(each.time_us for each in asked),
        keys=_column(each.key for each in asked),
        sizes=_column(each.size for each in asked),
        streams=tuple(streams),
        stream_at=_column(streams[each.stream] for each in asked),
        pools=tuple(pools),
        pool_at=_column(pools[each.pool_id] for each in asked),
    )


def _column(values: Iterable[int]) -> array[int]:
    told = list(values)
    try:
        return array("q", told)
    except OverflowError:
        return array("q", [max(min(value, _LARGEST), -_LARGEST) for value in told])


@dataclass(frozen=True, slots=True)
class OtherUse:
    """What others used, moment by moment, as steps: it is an `OtherUsed` that can be handed to another process."""

    since_us: tuple[int, ...]
    bytes: tuple[int, ...]

    def __call__(self, time_us: int) -> int:
        return self.bytes[max(bisect_right(self.since_us, time_us) - 1, 0)]


def other_use(asked: Iterable[Asked], other_used: OtherUsed) -> OtherUse:
    """As steps, where it is as these requests meet it."""
    since_us, bytes_ = [0], [0]
    last_us = None
    for each in asked:
        if each.time_us != last_us:
            last_us = each.time_us
            now = other_used(last_us)
            if now != bytes_[-1]:
                since_us.append(last_us)
                bytes_.append(now)
    return OtherUse(tuple(since_us), tuple(bytes_))
