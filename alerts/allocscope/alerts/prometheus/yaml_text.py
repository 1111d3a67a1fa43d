"""Documents as YAML: what our own need of it, so that nobody needs a YAML library to print the rules."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

Document = str | Mapping[str, "Document"] | Sequence["Document"]

_PLAIN = re.compile(r"[A-Za-z][\w./-]*|\d+[smh]")
_TAKEN = frozenset({"true", "false", "yes", "no", "on", "off", "null", "y", "n"})
"""What YAML 1.1, which Prometheus and Kubernetes read, takes for something else than text."""


def written(document: Document) -> str:
    """Maps and lists in blocks, in their order; texts plain where nothing can misread them, else quoted; those of lines as lines."""
    return "\n".join(_lines(document)) + "\n"


def _lines(document: Document) -> Iterator[str]:
    if isinstance(document, str):
        yield _text(document)
    elif not document:
        yield "{}" if isinstance(document, Mapping) else "[]"
    elif isinstance(document, Mapping):
        for key, value in document.items():
            yield from _entry(f"{_text(key)}:", value)
    else:
        for item in document:
            first, *rest = _lines(item)
            yield f"- {first}"
            yield from (f"  {line}" for line in rest)


def _entry(key: str, value: Document) -> Iterator[str]:
    if isinstance(value, str) and _is_lines(value):
        yield f"{key} |-"
        yield from (f"  {line}" for line in value.split("\n"))
    elif isinstance(value, str) or not value:
        yield f"{key} {next(_lines(value))}"
    else:
        yield key
        yield from (f"  {line}" for line in _lines(value))


def _is_lines(text: str) -> bool:
    """Whether it can be written as lines."""
    lines = text.split("\n")
    return len(lines) > 1 and lines[0][:1].strip() != "" and lines[-1] != "" and all(map(str.isprintable, lines))


def _text(text: str) -> str:
    if _PLAIN.fullmatch(text) and text.lower() not in _TAKEN:
        return text
    if text.isprintable() and ("'" not in text or '"' in text or "\\" in text):
        return "'" + text.replace("'", "''") + "'"
    return '"' + "".join(map(_escaped, text)) + '"'


def _escaped(character: str) -> str:
    if character in '"\\':
        return f"\\{character}"
    return character if character.isprintable() else f"\\U{ord(character):08x}"
