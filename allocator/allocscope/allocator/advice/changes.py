"""What a program could do otherwise: its requests, changed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise

from allocscope.allocator.advice.steps import short_lived_bytes, step_ends
from allocscope.allocator.settings import SMALL_MAX_BYTES
from allocscope.allocator.simulator.history import Asked
from allocscope.allocator.snapshot import DEFAULT_POOL

CHANGES = ("buckets:8", "empty_cache:10", "one_stream", "largest_first")
"""What `advise` tries."""
MOST = 1_000_000
_SHARES = 100
"""Where no steps are to be seen, so many equal shares of the requests stand for them."""

Change = Callable[[Sequence[Asked]], Sequence[Asked]]


def changed(asked: Iterable[Asked], change: str) -> Sequence[Asked]:
    """The requests of a program that does otherwise:

    - "buckets:N": shapes padded to N buckets. Steps with the same number of allocations are put in order of what they ask for,
      N groups of equal ratio are made of them, and each asks for the most that one of its group does, allocation by allocation.
      Where no steps are to be seen, requests of more than 1 MiB are rounded up to N sizes.
    - "empty_cache:N": torch.cuda.empty_cache() after every N steps.
    - "one_stream": all work on one stream; no free waits for another.
    - "largest_first": the step that asks for most is run once more, after the first one.

    Sizes are bytes. ValueError: there is no such change.
    """
    return _change(change)(list(asked))


def check_change(change: str) -> None:
    """ValueError: there is no such change."""
    _change(change)


def _change(change: str) -> Change:
    name, colon, told = change.partition(":")
    if name in ("buckets", "empty_cache"):
        number = int(told) if told.isascii() and told.isdecimal() and len(told) < len(str(MOST)) else 0
        if not 1 <= number <= MOST:
            raise ValueError(f"{change!r} needs a whole number from 1 on, such as {name}:8")
        return (lambda asked: _buckets(asked, number)) if name == "buckets" else lambda asked: _emptied(asked, number)
    if name in ("one_stream", "largest_first"):
        if colon:
            raise ValueError(f"{change!r}: {name} takes no number")
        return _one_stream if name == "one_stream" else _largest_first
    raise ValueError(
        f"{change!r} is no change to a program; there are buckets:N, empty_cache:N, one_stream, largest_first"
    )


def _one_stream(asked: Sequence[Asked]) -> Sequence[Asked]:
    return [
        each._replace(stream=0) if each.what in ("malloc", "hole") else each
        for each in asked
        if each.what not in ("wait", "done")
    ]


def _emptied(asked: Sequence[Asked], every: int) -> Sequence[Asked]:
    ends = step_ends(asked) or range(len(asked) // _SHARES, len(asked), max(len(asked) // _SHARES, 1))
    emptied: list[Asked] = []
    start = 0
    for end in ends[every - 1 :: every]:
        emptied += asked[start:end]
        if end:
            emptied.append(Asked("empty_cache", asked[end - 1].time_us, 0, 0, 0, DEFAULT_POOL))
        start = end
    return [*emptied, *asked[start:]]


def _largest_first(asked: Sequence[Asked]) -> Sequence[Asked]:
    ends = step_ends(asked)
    series = short_lived_bytes(asked)
    if not ends:
        return asked
    start, end = max(pairwise(ends), key=lambda step: max(series[step[0] : step[1]]))
    own = {each.key for each in asked[start:end] if each.what == "malloc"}
    own &= {each.key for each in asked[start:end] if each.what == "free"}
    first_key = max((each.key for each in asked), default=0) + 1
    keys = {key: first_key + at for at, key in enumerate(sorted(own))}
    time_us = asked[ends[0] - 1].time_us
    once_more = [each._replace(key=keys[each.key], time_us=time_us) for each in asked[start:end] if each.key in keys]
    return [*asked[: ends[0]], *once_more, *asked[ends[0] :]]


def _buckets(asked: Sequence[Asked], count: int) -> Sequence[Asked]:
    ends = step_ends(asked)
    sizes = _padded_steps(asked, ends, count) if ends else _padded_sizes(asked, count)
    return [each._replace(size=sizes.get(each.key, each.size)) if each.what == "malloc" else each for each in asked]


def _padded_steps(asked: Sequence[Asked], ends: Sequence[int], count: int) -> Mapping[int, int]:
    """By allocation: what it asks for then."""
    alike: dict[int, list[list[Asked]]] = defaultdict(list)
    for start, end in pairwise(ends):
        step = [each for each in asked[start:end] if each.what == "malloc"]
        alike[len(step)].append(step)
    padded: dict[int, int] = {}
    for steps in alike.values():
        totals = [sum(each.size for each in step) for step in steps]
        for bucket in _in_buckets(totals, count):
            for column in zip(*(steps[at] for at in bucket), strict=True):
                most = max(each.size for each in column)
                padded.update((each.key, most) for each in column)
    return padded


def _padded_sizes(asked: Sequence[Asked], count: int) -> Mapping[int, int]:
    mallocs = [each for each in asked if each.what == "malloc" and each.size > SMALL_MAX_BYTES]
    padded: dict[int, int] = {}
    for bucket in _in_buckets([each.size for each in mallocs], count):
        most = max(mallocs[at].size for at in bucket)
        padded.update((mallocs[at].key, most) for at in bucket)
    return padded


def _in_buckets(sizes: Sequence[int], count: int) -> Iterator[list[int]]:
    """Which of them, by index, lie between the smallest and the largest in each of `count` parts of equal ratio."""
    if not sizes:
        return
    least, most = max(min(sizes), 1), max(*sizes, 1)
    found: dict[int, list[int]] = defaultdict(list)
    tops = [least * (most / least) ** (part / count) for part in range(1, count)]
    for at, size in enumerate(sizes):
        found[_first_above(tops, size)].append(at)
    yield from found.values()


def _first_above(tops: Iterable[float], size: int) -> int:
    return sum(size > top for top in tops)
