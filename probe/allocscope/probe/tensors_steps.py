"""How one object refers to another, as people write it: an index, a key, an attribute, a variable of a closure.

No method of the objects is called: containers are read by the methods of Python's own types, attributes by their dicts and slots.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from enum import Enum
from types import (
    AsyncGeneratorType,
    CellType,
    CoroutineType,
    FrameType,
    FunctionType,
    GeneratorType,
    MemberDescriptorType,
)
from typing import Any, NamedTuple

from allocscope.probe.tensors_torch import attributes_of, mro_of, own_of, type_name

LONGEST_KEY = 100
MOST_MATERIALIZED = 1_000
"""Objects whose attributes are made a dict to be read: it stays. Others of the same class are asked for the names found so."""
MOST_LEARNT = 16


class Way(Enum):
    """How an object refers to another."""

    INDEX = "index"
    KEY = "key"
    ATTRIBUTE = "attribute"
    ATTRIBUTES = "attributes"
    """The object's own dict of them."""
    MEMBER = "member"
    """Of a set; or a key of a dict."""
    CONTENTS = "contents"
    """Of a cell."""
    CLOSURE = "closure"
    """The tuple of a function's cells."""
    UNKNOWN = "unknown"


class Reference(NamedTuple):
    """How an object refers to one that has the id `held`."""

    held: int
    way: Way
    text: str = ""
    """The index, the key as written, the attribute, the object's class, the names of a closure's variables."""


_SEQUENCES: tuple[Any, ...] = (list, tuple, deque)
_SETS: tuple[Any, ...] = (set, frozenset)
# Types are looked up by their ids: a metaclass may have a hash and an == of its own.
_BUILT_IN = set(map(id, (*_SEQUENCES, dict, *_SETS, CellType)))
"""What has no attributes of its own, unless in a subclass."""
_WRITTEN_AS_IS = set(map(id, (str, int, bool, float, bytes, type(None))))
_RUNNERS: dict[int, Callable[[Any], FrameType | None]] = {
    id(GeneratorType): GeneratorType.__dict__["gi_frame"].__get__,
    id(CoroutineType): CoroutineType.__dict__["cr_frame"].__get__,
    id(AsyncGeneratorType): AsyncGeneratorType.__dict__["ag_frame"].__get__,
}


def frame_of(item: Any) -> FrameType | None:
    """The frame that it is, or that it runs in."""
    if type(item) is FrameType:
        return item
    get = _RUNNERS.get(id(type(item)))
    return get(item) if get is not None else None


def described(item: Any) -> str | None:
    """A container, with how many lie in it; None for what is none."""
    for base in (*_SEQUENCES, dict, *_SETS):
        if issubclass(type(item), base):
            return f"{type_name(item)} of {base.__len__(item)}"
    return None


class References:
    """Reads how objects refer to others."""

    def __init__(self) -> None:
        self._classes: dict[int, _Class] = {}
        self._materialized = 0

    def of(self, item: Any, held: set[int]) -> list[Reference]:
        """How `item` refers to those of the ids; UNKNOWN where that cannot be told. Raises RuntimeError if it changes meanwhile."""
        found = [reference for reference in self._all(item, held) if reference.held in held]
        return found + [Reference(one, Way.UNKNOWN) for one in held.difference(r.held for r in found)]

    def _all(self, item: Any, held: set[int]) -> Iterator[Reference]:
        kind = type(item)
        if kind is CellType:
            yield from (Reference(one, Way.CONTENTS) for one in held)
        elif kind is FunctionType:
            if item.__closure__ is not None:
                yield Reference(id(item.__closure__), Way.CLOSURE, " ".join(item.__code__.co_freevars))
            return
        elif issubclass(kind, _SETS):
            yield from (Reference(one, Way.MEMBER) for one in held)
        elif issubclass(kind, dict):
            yield from _of_dict(item, held)
        else:
            yield from _of_sequence(item, held)
        if id(kind) not in _BUILT_IN and not issubclass(kind, type):
            yield from self._of_object(item, held)

    def _of_object(self, item: Any, held: set[int]) -> Iterator[Reference]:
        own = [(name, value) for name, value in self._known_attributes(item) if id(value) in held]
        yield from (Reference(id(value), Way.ATTRIBUTE, name) for name, value in own)
        left = held.difference(id(value) for _, value in own)
        if left and self._materialized < MOST_MATERIALIZED:
            attributes = attributes_of(item)
            if attributes is not None:
                yield from self._of_attributes(item, attributes, left)

    def _known_attributes(self, item: Any) -> Iterator[tuple[str, Any]]:
        """What its slots hold, and those of the attributes that others of its class were found to have."""
        known = self._class(type(item))
        for name, slot in known.slots:
            with suppress(AttributeError):  # not set
                yield name, slot.__get__(item)
        for name in known.learnt:
            with suppress(AttributeError):
                # No class of it has that name, so this finds what lies in the object itself, and calls nothing.
                yield name, object.__getattribute__(item, name)

    def _of_attributes(self, item: Any, attributes: dict[Any, Any], held: set[int]) -> Iterator[Reference]:
        yield Reference(id(attributes), Way.ATTRIBUTES, type_name(item))
        self._materialized += id(attributes) not in held
        for name, value in list(attributes.items()):
            if id(value) in held and type(name) is str:
                self._class(type(item)).learn(name)
                yield Reference(id(value), Way.ATTRIBUTE, name)

    def _class(self, kind: type) -> _Class:
        known = self._classes.get(id(kind))
        if known is None:
            known = self._classes[id(kind)] = _Class(kind)
        return known


class _Class:
    """What is known of the attributes of its instances. It keeps the class, so that its id means it."""

    def __init__(self, kind: type) -> None:
        self._kind = kind
        self.slots = [pair for base in mro_of(kind) for pair in own_of(base).items() if _is_slot(*pair)]
        self.learnt: list[str] = []

    def learn(self, name: str) -> None:
        if name in self.learnt or len(self.learnt) >= MOST_LEARNT:
            return
        if not any(name in own_of(base) for base in mro_of(self._kind)):
            self.learnt.append(name)


def _is_slot(name: str, descriptor: object) -> bool:
    return type(descriptor) is MemberDescriptorType and name != "__dict__"


def _of_dict(mapping: Any, held: set[int]) -> list[Reference]:
    try:
        return _of_items(dict.items(mapping), held)
    except RuntimeError:  # it changed meanwhile; a copy is made without a pause
        return _of_items(list(dict.items(mapping)), held)


def _of_items(items: Iterable[tuple[Any, Any]], held: set[int]) -> list[Reference]:
    found = []
    for key, value in items:
        if id(value) in held:
            found.append(Reference(id(value), Way.KEY, key_text(key)))
        if id(key) in held:
            found.append(Reference(id(key), Way.MEMBER))
    return found


def _of_sequence(items: Any, held: set[int]) -> Iterator[Reference]:
    """By what the collector sees of it, never by its elements: C code may be in the middle of making it, and what is not there yet would crash."""
    for base in _SEQUENCES:
        if issubclass(type(items), base):
            length = base.__len__(items)
            seen = gc.get_referents(items)[-length:] if length else []  # a subclass's own come first
            for place, one in enumerate(map(id, seen if base is deque or not _FROM_THE_END else reversed(seen))):
                if one in held:
                    yield Reference(one, Way.INDEX, str(place))


_FROM_THE_END = gc.get_referents([_SETS, _WRITTEN_AS_IS])[0] is _WRITTEN_AS_IS
"""The collector goes through lists and tuples from their last element to their first (CPython, listobject.c and tupleobject.c), but through deques forward."""


def key_text(key: Any) -> str:
    """A key as written in Python; of what could run code of its own only the class."""
    if id(type(key)) in _WRITTEN_AS_IS:
        text = repr(key)
    elif type(key) is tuple:
        text = f"({', '.join(map(key_text, key[:8]))})"
    else:
        text = f"<{type_name(key)}>"
    return text if len(text) <= LONGEST_KEY else f"{text[: LONGEST_KEY - 2]}…{text[-1]}"
