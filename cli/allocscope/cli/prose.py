"""Sentences folded to the width of a terminal."""

from __future__ import annotations

import re
import shutil
import sys

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def prose_width() -> int | None:
    """Columns of the terminal that standard output is; None where it is none: what reads a pipe wants whole lines."""
    if sys.stdout is None or not sys.stdout.isatty():
        return None
    return shutil.get_terminal_size((100, 24)).columns


def fold(text: str, width: int | None) -> str:
    """Every line folded between words, its rest further indented; no word is cut, and colours take no columns."""
    if width is None:
        return text
    return "\n".join(_fold_line(line, width) for line in text.split("\n"))


def _fold_line(line: str, width: int) -> str:
    if _columns(line) <= width:
        return line
    indent = line[: len(line) - len(line.lstrip(" "))]
    first, *words = line.lstrip(" ").split(" ")
    folded = [indent + first]
    for word in words:
        if _columns(folded[-1]) + 1 + _columns(word) > width:
            folded.append(f"{indent}  {word}")
        else:
            folded[-1] += f" {word}"
    return "\n".join(folded)


def _columns(text: str) -> int:
    return len(_COLOUR.sub("", text))
