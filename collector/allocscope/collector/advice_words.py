"""Advice as an alert says it."""

from __future__ import annotations

from allocscope.model import Advice, AdviceKind

ESTIMATE = "This is an estimate."
"""As advice says it that is one."""
LONGEST = 1000
"""Characters: annotations are for screens and messages."""


def how_exact(exactness: str) -> str:
    """What is behind the verdict that it begins with."""
    return exactness.removeprefix("exact: ").removeprefix("an estimate: ")


def alert_words(advice: Advice) -> str | None:
    """In a sentence or two, with figures; None: there is nothing to say to somebody who is woken by it."""
    if advice.kind is AdviceKind.UNKNOWN:
        return None
    words = advice.summary
    if not advice.is_exact:
        why = how_exact(advice.exactness) or "the replay could not be checked against what happened"
        words = f"{words.removesuffix(ESTIMATE).rstrip()} {ESTIMATE.removesuffix('.')}: {why}."
    return words if len(words) <= LONGEST else f"{words[: LONGEST - 1]}…"
