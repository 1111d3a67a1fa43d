"""Tokens, and what they open: one a line, and behind it the nodes that may be spoken for with it."""

from __future__ import annotations

import hmac
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

SHORTEST = 16
"""Letters: 16 random ones cannot be guessed."""


@dataclass(frozen=True, slots=True)
class Token:
    """One of them."""

    text: str
    nodes: tuple[str, ...] = ()
    """Names, or patterns such as gpu-*; none: any node."""

    def is_for(self, node: str) -> bool:
        """Whether its bearer may speak for this node."""
        return not self.nodes or any(fnmatchcase(node, pattern) for pattern in self.nodes)


def read_tokens(text: str) -> tuple[Token, ...]:
    """Of a file's text; empty lines and those that begin with # are left out. ValueError says which line is wrong, not what it says."""
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words[0]) < SHORTEST or not (words[0].isascii() and words[0].isprintable()):
            raise ValueError(f"line {number}: a token has at least {SHORTEST} letters, all of printable ASCII")
        found.append(Token(words[0], tuple(words[1:])))
    if not found:
        raise ValueError("there is no token in it")
    return tuple(found)


def bearer_of(authorization: str | bytes | None) -> str | None:
    """The token in an Authorization header; None: there is none."""
    text = authorization.decode("latin-1") if isinstance(authorization, bytes) else authorization or ""
    kind, _, token = text.partition(" ")
    return token.strip() if kind.lower() == "bearer" and token.strip() else None


def find(tokens: Iterable[Token], given: str) -> Token | None:
    """The one that was given. How long it takes does not tell how much of one was right."""
    found = None
    for token in tokens:
        if hmac.compare_digest(token.text.encode(), given.encode("utf-8", "replace")):
            found = token
    return found
