"""All that Python's garbage collector knows of, in slices, with as little as possible kept alive meanwhile.

`gc.get_objects` and `gc.get_referents` run no code of anybody's. The list that the first gives keeps all that is in it
alive, so it is taken generation by generation, the youngest first, and used up from its young end: what a job lets go of in
these milliseconds is young as a rule.

Tuples are not listed, but found in what holds them. C code that makes one of something it does not know the length of, as
`tuple(...)` and `f(*(...))` do, has it tracked before it is whole, and a reference of anybody else's makes that fail: SystemError,
in the job, when its size is set (CPython up to 3.13, tupleobject.c, _PyTuple_Resize).
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, compress, count, islice, repeat
from operator import attrgetter, is_, is_not, methodcaller, setitem
from types import FunctionType
from typing import Any

from allocscope.probe.tensors_frames import values
from allocscope.probe.tensors_pace import Pace
from allocscope.probe.tensors_undisturbed import undisturbed

SLICE = 512
"""Objects at a time: 0.2 ms of work."""
LIST_S_PER_BLOCK = 50e-9
"""What one of Python's memory blocks adds to the time of a list of all objects, while which no other thread runs: 0.07 s for 1 M objects of 1.5 M blocks."""
YOUNGEST = 10_000
DEEPEST_TUPLE = 10
"""Of tuples in tuples."""
_CALL = methodcaller("__call__")


def slices(pace: Pace, sought: str) -> Iterator[list[Any]]:
    """Every object that may hold others, but tuples, once or twice, to look for what is `sought`. Ends, and says so, where the time is up."""
    for generation in (0, 1, 2):
        if generation == 2 and sys.getallocatedblocks() * LIST_S_PER_BLOCK > pace.limit_s:
            pace.leave_out(
                "old objects: there are so many that listing them would stop the job for longer than allowed"
            )
            continue
        objects = _listed(generation)
        try:
            while objects:
                if pace.is_over():
                    pace.leave_out(f"{sought} among {len(objects):,} objects: no time was left")
                    return
                piece = objects[-SLICE:]
                del objects[-SLICE:]
                yield piece
        finally:
            objects.clear()  # it holds what it was made with, which holds it
    if gc.get_freeze_count():
        yield from _reachable(pace, sought)


def _listed(generation: int) -> list[Any]:
    """What is tracked and no tuple, in one call of C: from before it to after it, nobody sees that a reference to a tuple was there."""
    found: list[Any] = []
    take = partial(found.extend, chain.from_iterable(map(gc.get_objects, (generation,))))
    rest: Any = compress(found, map(is_not, map(type, found), repeat(tuple)))
    leave = partial(setitem, found, slice(None), rest)
    undisturbed(partial(list, map(_CALL, (take, leave))))
    # The list itself is among them, and one of the youngest.
    place = next(compress(count(1), map(is_, islice(reversed(found), YOUNGEST), repeat(found))), 0)
    del found[len(found) - place : len(found) - place + 1]
    return found


def _reachable(pace: Pace, sought: str) -> Iterator[list[Any]]:
    """What `gc.freeze()` has put out of the collector's sight is found from the modules and the running functions down."""
    queue: list[Any] = [*sys.modules.values(), *values()]
    seen = set(map(id, queue))
    while queue:
        if pace.is_over():
            pace.leave_out(f"{sought} among what gc.freeze() hides: no time was left for all of it")
            return
        piece = queue[-SLICE:]
        del queue[-SLICE:]
        yield piece
        found = gc.get_referents(*piece)
        for item in compress(found, map(gc.is_tracked, found)):
            if id(item) not in seen:
                seen.add(id(item))
                queue.append(item)


def referrers(pace: Pace, targets: set[int], examine: Callable[[Any, set[int]], None], *, functions: bool) -> None:
    """Call `examine(object, ids)` for each object that refers to some of `targets`, which are ids; for functions only if told so."""
    met: set[int] = set()
    for piece in slices(pace, "holders"):
        kinds = list(map(type, piece))
        asked = list(compress(piece, map(is_not, kinds, repeat(FunctionType))))
        # A function, and there are many, holds nothing but by these.
        called = list(compress(piece, map(is_, kinds, repeat(FunctionType))))
        tuples = _tuples([*chain.from_iterable(map(_TUPLES, called))])
        if functions and not targets.isdisjoint(map(id, tuples)):
            _examine(called, targets, examine, met)
        for _ in range(DEEPEST_TUPLE):
            found = gc.get_referents(*asked)
            if not targets.isdisjoint(map(id, found)):
                _examine(asked, targets, examine, met)
            asked = tuples + _tuples(found)
            tuples = []
            if not asked:
                break


def _tuples(items: list[Any]) -> list[Any]:
    # `is`, since a metaclass may have an == of its own.
    return list(compress(items, map(is_, map(type, items), repeat(tuple))))


_TUPLES = attrgetter("__closure__", "__defaults__")


def _examine(asked: list[Any], targets: set[int], examine: Callable[[Any, set[int]], None], tuples: set[int]) -> None:
    """`tuples`: those that were examined; several may hold one."""
    for item in asked:
        found = targets.intersection(map(id, gc.get_referents(item)))
        if found and not (type(item) is tuple and id(item) in tuples):
            examine(item, found)
            if type(item) is tuple:
                tuples.add(id(item))
