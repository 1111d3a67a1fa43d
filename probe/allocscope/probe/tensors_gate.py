"""Lets a look at C++'s own fields through only while no other thread can be changing them.

The GIL is no protection there: PyTorch lets go of it while it runs an operation or a backward, and while it frees a tensor. A
field may then lead to freed memory: reading `p.grad` while another thread was in `p.grad = None` crashed PyTorch 2.14 within
seconds, since the field is emptied only after what it held is freed, which lets go of the GIL (c10/util/intrusive_ptr.h, reset).

It is the same with the node of a graph that a tensor stems from: an operation that changes the tensor in place gives it another
one, in two steps (the node, its counter of references), without the GIL. A look in between has a node that may end under it:
reading `x.grad_fn.next_functions` while another thread was in `x.add_(1)` crashed PyTorch 2.13 within seconds.

So a look is one call of C in which, first, each thread is asked whether it could be doing that: by the names in the code of the
function that it runs, and for operators by the instruction that it is at. Within that call no other thread gets the GIL
(`tensors_undisturbed`), and to begin something of the kind it needs it.

Where C++ calls Python in the middle of it, a thread runs yet another function: a hook, while the engine's threads for other devices
go on; what a weak reference calls, while a gradient that was set to None is freed. So the functions that called it are asked, too.

In a program with an audit hook nothing passes: Python calls the hook within a look, and other threads run meanwhile.

What cannot be seen is C++ that changes tensors under a name that says nothing. With PyTorch 2.13 none of 380,000 looks at a tensor
crashed, while another thread did nothing but change it by an alias of `add_`, `exp_` or `detach_`, nor did one of 50,000 while
TorchScript added to it; TorchScript in an endless `detach_`, or in a `resize_` to more than five dimensions, crashed within seconds.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import accumulate, chain, compress, repeat, starmap, takewhile
from opcode import opmap
from operator import and_, attrgetter, getitem, is_not, methodcaller, not_
from types import FrameType
from typing import Any, NamedTuple

from allocscope.probe.tensors_pace import Pace
from allocscope.probe.tensors_undisturbed import undisturbed


class Doing(NamedTuple):
    """What a thread may be doing."""

    called: re.Pattern[str] | None = None
    """Some name in its function's code, of what that may call or set, says so; as all of these it is found in names with spaces between."""
    text: str | None = None
    """Or this text does, as in `setattr(parameter, "grad", None)`."""
    operators: frozenset[int] = frozenset()
    """Or the instruction that it is at."""
    called_by_any: str | None = None
    """Or this name does, in its function's code or in that of one which called it."""
    operators_of_any: frozenset[int] = frozenset()
    """Or the instruction that one of these is at."""


BACKWARD = Doing(re.compile(r"\brun_backward\b"), "run_backward", called_by_any="_execution_engine")
"""What every way into the autograd engine calls last, on torch's object of that name: torch.autograd's own, and those of programs that go round it."""
GRADIENT = Doing(
    re.compile(r"\bgrad\b"), "grad", operators_of_any=frozenset({opmap["STORE_ATTR"], opmap["DELETE_ATTR"]})
)
"""Whoever sets one has that name in his code."""
IN_PLACE = Doing(
    re.compile(
        r"[^\W_]_(?= |$)|\b(?:__i\w+__|i(?:add|sub|mul|matmul|truediv|floordiv|mod|pow|and|or|xor|[lr]shift)|(?:__)?setitem(?:__)?)(?= |$)"
    ),
    operators=frozenset(
        code
        for name, code in opmap.items()
        if name == "BINARY_OP" or name.startswith(("INPLACE_", "STORE_SUBSCR", "STORE_SLICE"))
    ),
)
"""By a function that ends in one underscore, as PyTorch's all do, by an operator (`x += 1`, `x[0] = 1`), or by such a one's name."""


AUDITED = "what is read while no other thread runs: this program has an audit hook, which lets them run"


class Gate:
    """Reads of an object what `get` gets, unless a thread may be doing one of those things."""

    def __init__(self, *doings: Doing) -> None:
        self._is_open = _nobody_is(doings)
        self._is_audited = _is_audited()

    def read(self, item: Any, get: Callable[[Any], Any], pace: Pace) -> list[Any] | None:
        """A list of one: what was read. None where it is not to be read, and no time is left to wait for that.

        `get` must be C throughout, as `operator.attrgetter` is. What it raises comes out.
        """
        while True:
            found = undisturbed(partial(list, map(get, self._let_through(item))))
            if found or not self._waits(pace):
                return found or None

    def read_all(
        self, item: Any, get: Callable[[Any], Any], get_each: Callable[[Any], Any], pace: Pace
    ) -> list[Any] | None:
        """The same of something with several: what `get_each` gets of each."""
        while True:
            found = undisturbed(
                partial(list, map(list, map(partial(map, get_each), map(get, self._let_through(item)))))
            )
            if found or not self._waits(pace):
                return found[0] if found else None

    def _waits(self, pace: Pace) -> bool:
        """Whether it makes sense to look again."""
        if self._is_audited:
            pace.leave_out(AUDITED)
        return not self._is_audited and pace.wait()

    def _let_through(self, item: Any) -> Iterator[Any]:
        """The item, unless the gate is shut at the moment that it is taken."""
        return compress((), ()) if self._is_audited else compress((item,), self._is_open)


def _is_audited() -> bool:
    """Up to Python 3.13 `sys.audit` looks at its argument only where there is a hook (sysmodule.c); from 3.14 on it does not tell."""
    try:
        sys.audit(0)  # type: ignore[arg-type]
    except TypeError:
        return sys.version_info < (3, 14)
    return False


def _nobody_is(doings: tuple[Doing, ...]) -> Iterator[bool]:
    """Endlessly, looked up anew for each. C throughout; so are the next."""
    answers = [answer for doing in doings for answer in _answers(doing)]
    together = answers[0]
    for answer in answers[1:]:
        together = map(and_, together, answer)
    return together


def _answers(doing: Doing) -> Iterator[Iterator[bool]]:
    if doing.called is not None:
        names = map(_each(" ".join), _of(_running(), "f_code.co_names"))
        yield _none(_each(doing.called.search), names)
    if doing.text is not None:
        yield _none(_each(methodcaller("__contains__", doing.text)), _of(_running(), "f_code.co_consts"))
    if doing.operators:
        yield map(doing.operators.isdisjoint, _instructions(_running()))
    if doing.called_by_any is not None:
        yield _none(_each(methodcaller("__contains__", doing.called_by_any)), _of(_in_calls(), "f_code.co_names"))
    if doing.operators_of_any:
        yield map(doing.operators_of_any.isdisjoint, _instructions(_in_calls()))


def _none(holds: Any, found: Iterator[Iterator[Any]]) -> Iterator[bool]:
    return map(not_, map(any, map(holds, found)))


def _of(frames: Iterator[Iterable[FrameType]], *paths: str) -> Iterator[Iterator[Any]]:
    return map(_each(attrgetter(*paths)), frames)


def _instructions(frames: Iterator[Iterable[FrameType]]) -> Iterator[Iterator[Any]]:
    return map(partial(starmap, getitem), _of(frames, "f_code.co_code", "f_lasti"))


def _running() -> Iterator[Iterable[FrameType]]:
    """Endlessly: the frame that each thread runs."""
    return map(methodcaller("values"), iter(sys._current_frames, None))


def _in_calls() -> Iterator[Iterator[FrameType]]:
    """Endlessly: these, and the frames that called them."""
    outward = map(_each(chain), map(zip, _running()), repeat(repeat(repeat("f_back"))))
    stacks = map(_each(accumulate), outward, repeat(repeat(getattr)))
    ended = map(_each(takewhile), repeat(repeat(partial(is_not, None))), stacks)
    return map(chain.from_iterable, ended)


def _each(function: Any) -> Any:
    """Maps it over what comes. (pyright does not see through a partial of a map)"""
    return partial(map, function)
