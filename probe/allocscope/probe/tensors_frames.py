"""The variables of running functions, by what they hold, without leaving a trace in them.

`frame.f_locals` of a running function, up to Python 3.12, puts a dict with all its variables beside it and leaves it there: a
tensor that the function lets go of would live until the function returns. So each version is asked otherwise:

- 3.13 and later: f_locals, which is a view by then (PEP 667);
- 3.12: PyFrame_GetVar, of Python's C interface;
- 3.11: the frame's memory (Include/internal/pycore_frame.h), each slot by one call of C, with no other thread in between, and
  only where that memory names this frame's own code and globals;
- 3.10: `gc.get_referents`, which does not tell names.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from operator import attrgetter, itemgetter
from pathlib import PurePath
from struct import unpack
from types import CellType, CodeType, FrameType
from typing import Any

from allocscope.probe.tensors_undisturbed import undisturbed

CO_OPTIMIZED = 1
"""Of a function's code; a module's and a class body's variables lie in a dict."""
MOST_FRAMES = 5_000
OURS = "allocscope.probe.tensors"
UNNAMED = "?"
_WORD = ctypes.sizeof(ctypes.c_void_p)
_STANDARD_LIBRARY = os.path.dirname(os.__file__)  # noqa: PTH120 (a text to compare with)
_CONTENTS = attrgetter("contents")

Variables = Iterable[tuple[str, Any]]
"""Names, and what they hold."""


@dataclass(frozen=True, slots=True)
class Variable:
    """A variable of a frame."""

    name: str
    function: str
    file: str
    line: int | None
    library: bool
    """Whether the function is Python's own or of an installed package."""


def variables_by_id() -> dict[int, Variable]:
    """What the running functions of all threads hold; of what several hold, the one that says most to people."""
    found: dict[int, Variable] = {}
    for frame in _running():
        for held, variable in variables_of(frame):
            known = found.get(held)
            if known is None or _rank(variable) < _rank(known):
                found[held] = variable
    return found


def values() -> list[Any]:
    """All that the running functions of all threads hold."""
    return [held for frame in _running() for _, held in _read(frame)]


def namespaces() -> dict[int, str]:
    """The dicts of the global variables that the running functions of all threads have, by id, and their modules' names."""
    return {id(frame.f_globals): _module(frame) for frame in _running()}


def variables_of(frame: FrameType) -> Iterator[tuple[int, Variable]]:
    """One function's variables, running or not; none of a module's, of a class body's, or of this report's own."""
    code, module = frame.f_code, _module(frame)
    if not code.co_flags & CO_OPTIMIZED or module.startswith(OURS):
        return
    file = code.co_filename
    library = "-packages" in file or file.startswith(("<frozen", _STANDARD_LIBRARY)) or module.startswith("allocscope.")
    function = getattr(code, "co_qualname", code.co_name)  # co_qualname: from 3.11 on
    where = function, PurePath(file).name, frame.f_lineno, library
    for name, held in _read(frame):
        yield id(held), Variable(name, *where)
        if type(held) is CellType:
            with suppress(ValueError):  # empty
                yield id(held.cell_contents), Variable(name, *where)


def _module(frame: FrameType) -> str:
    name = dict.get(frame.f_globals, "__name__")  # of dict itself: the program may run with globals of its own kind
    return name if type(name) is str else UNNAMED


def _running() -> list[FrameType]:
    return [frame for top in undisturbed(sys._current_frames).values() for frame in _stack(top)][:MOST_FRAMES]


def _stack(top: FrameType) -> list[FrameType]:
    """The outermost first: what it calls a thing is what its reader calls it."""
    frames: list[FrameType] = []
    frame: FrameType | None = top
    while frame is not None and len(frames) < MOST_FRAMES:
        frames.append(frame)
        frame = frame.f_back
    return frames[::-1]


def _rank(variable: Variable) -> tuple[bool, bool]:
    return variable.library, variable.name == "self"


def _names(code: CodeType) -> list[str]:
    """Of the slots of a frame in their order: variables, cells that are no arguments, and what closures bring."""
    own = code.co_varnames
    return [*own, *(name for name in code.co_cellvars if name not in own), *code.co_freevars]


# one way for each version


def _by_view(frame: FrameType) -> Variables:
    return list(frame.f_locals.items())


def _by_call() -> Callable[[FrameType], Variables]:
    prototype = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.py_object, ctypes.py_object)
    get = prototype(("PyFrame_GetVar", ctypes.pythonapi))

    def read(frame: FrameType) -> Variables:
        found = []
        for name in _names(frame.f_code):
            try:
                found.append((name, get(frame, name)))
            except NameError:  # not bound just now
                continue
        return found

    return read


_FRAME_OFFSET = 24
"""Of `_PyInterpreterFrame *f_frame` in CPython 3.11's PyFrameObject."""
_GLOBALS, _CODE, _LOCALS = 1, 4, 9
"""Words of CPython 3.11's _PyInterpreterFrame: f_globals, f_code, localsplus."""


def _by_memory(frame: FrameType) -> Variables:
    names = _names(frame.f_code)
    words = _view(frame, ctypes.c_void_p, _LOCALS)
    # One call of C, without Python's loop in between: no other thread runs, so the frame cannot move before it is copied.
    memory = unpack(f"{_LOCALS}N", undisturbed(partial(next, map(bytes, map(_CONTENTS, (words,))))))
    if memory[_CODE] != id(frame.f_code) or memory[_GLOBALS] != id(frame.f_globals):
        return []
    found, slots = [], _view(frame, ctypes.py_object, _LOCALS + len(names))
    for slot, name in enumerate(names, _LOCALS):
        with suppress(ValueError):  # not bound just now
            found.append((name, undisturbed(partial(next, map(itemgetter(slot), map(_CONTENTS, (slots,)))))))
    return found


def _view(frame: FrameType, kind: Any, count: int) -> Any:
    """A pointer as it lies in the frame object: it leads to where the frame's memory is by the time that it is followed."""
    return ctypes.POINTER(kind * count).from_address(id(frame) + _FRAME_OFFSET)  # ctypes keeps one such type a count


def _by_referents(frame: FrameType) -> Variables:
    return [(UNNAMED, value) for value in gc.get_referents(frame)]


def _none(frame: FrameType) -> Variables:
    return ()


def _way() -> Callable[[FrameType], Variables]:
    if sys.implementation.name != "cpython":
        return _none
    version: tuple[int, int] = sys.version_info[:2]
    if version >= (3, 13):
        return _by_view
    if version == (3, 12):
        return _by_call()
    if version == (3, 11):
        return _by_memory if _WORD == 8 and _reads_itself() else _none
    return _by_referents


def _reads_itself() -> bool:
    """Whether this Python's frames look as `_by_memory` takes them to."""
    one, other = object(), object()
    held = dict(_by_memory(sys._getframe()))
    return held.get("one") is one and held.get("other") is other


_read = _way()
TELLS = _read is not _none
"""Whether the variables of running functions can be told in this Python."""
