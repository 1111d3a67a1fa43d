"""What people call an object: where the way to it begins, and the way as they write it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from allocscope.model.tensors import Holder, HolderKind
from allocscope.probe.tensors_steps import Way

LONGEST_TEXT = 400
NAME = "{}"
"""In the place of a namespace: the name that is looked for in it."""


class Form(Enum):
    """How what lies in an object is written."""

    PLAIN = "plain"
    NAMESPACE = "namespace"
    """A dict of global variables: by the bare key."""
    ATTRIBUTES = "attributes"
    """An object's own dict: as an attribute."""
    CELLS = "cells"
    """A closure's tuple: by the variable's name."""


@dataclass(slots=True)
class Name:
    """Of an object. Nothing changes it once it is handed out."""

    kind: HolderKind
    path: str
    place: str | None = None
    line: int | None = None
    library: bool = False
    """Whether it begins in a function of Python's own or of an installed package."""
    container: str | None = None
    form: Form = Form.PLAIN
    text: str = ""
    """Of attributes, the class; of cells, the variables."""

    def rank(self) -> tuple[bool, bool, int]:
        """Least first: what says most to people."""
        return self.kind is HolderKind.OBJECT, self.library, len(self.path)

    def holder(self) -> Holder:
        return Holder(self.kind, _short(self.path), self.place and _short(self.place), self.container, self.line)

    def renamed(self, kind: HolderKind, path: str) -> Name:
        """Another one that begins where this does."""
        return Name(kind, path, self.place, self.line, self.library, self.container)


def further(above: Name, way: Way, text: str) -> Name:
    """The name of what is one step further."""
    name = Name(above.kind, above.path, above.place, above.line, above.library)
    if way is Way.ATTRIBUTES:
        name.form, name.text = Form.ATTRIBUTES, text
    elif way is Way.CLOSURE:
        name.kind, name.form, name.text = HolderKind.CLOSURE, Form.CELLS, text
    elif above.form is Form.CELLS and way is Way.INDEX:
        place = f"closure of {above.path}()"
        name.path, name.place = above.text.split()[int(text)], f"{place} in {above.place}" if above.place else place
    elif way is not Way.CONTENTS:
        _step(name, above, way, text)
    return name


def _step(name: Name, above: Name, way: Way, text: str) -> None:
    word = text[1:-1] if way is Way.KEY and text[:1] == "'" else None
    if above.form is Form.NAMESPACE and word is not None:
        name.path, name.place = word, (above.place or "").replace(NAME, repr(word), 1)
    elif above.form is Form.ATTRIBUTES and word is not None:
        name.path, name.container = f"{above.path}.{word}", above.text or None
    elif way is Way.ATTRIBUTE:
        name.path = f"{above.path}.{text}"
    else:
        name.path = above.path + {Way.MEMBER: "{…}", Way.UNKNOWN: ".<?>"}.get(way, f"[{text}]")


def _short(text: str) -> str:
    return text if len(text) <= LONGEST_TEXT else f"{text[: LONGEST_TEXT // 2]}…{text[-LONGEST_TEXT // 2 :]}"
