"""Texts that come from the job, as a daemon takes them: one that it refuses would cost the whole hello, or note, that it stands in."""

from __future__ import annotations

LONGEST_NAME = 200
"""A job's name is a label in every metric."""
LONGEST_CONF = 4096
"""Settings are some hundred letters; daemons take no more."""
LONGEST_PROBLEM = 500
"""Collectors take no more."""


def printable(text: str, longest: int = LONGEST_NAME) -> str:
    """What cannot be printed is a space or a `?`: control characters, and bytes of a file's name that are no UTF-8."""
    if not text.isprintable():
        text = "".join(letter if letter.isprintable() else " " if letter.isspace() else "?" for letter in text)
    return text[:longest]
