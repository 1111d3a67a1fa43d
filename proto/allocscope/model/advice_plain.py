"""Advice as plain values, as JSON and databases have it, and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from allocscope.model.advice import Advice, AdviceKind, Trial


def advice_to_plain(advice: Advice) -> dict[str, Any]:
    """By the fields' names; `kind` by value."""
    plain = asdict(advice)
    return {
        **{name: list(value) if isinstance(value, tuple) else value for name, value in plain.items()},
        "kind": advice.kind.value,
    }


def advice_of_plain(plain: Mapping[str, Any]) -> Advice:
    """What `advice_to_plain` gave, also that of another version: what it does not know is left out. ValueError, TypeError: it is none."""
    given = _known(plain, Advice)
    given["kind"] = AdviceKind(plain.get("kind"))
    given["trials"] = tuple(Trial(**_known(trial, Trial)) for trial in plain.get("trials", ()))
    for name in ("gains", "costs", "hazards"):
        given[name] = tuple(str(phrase) for phrase in plain.get(name, ()))
    return Advice(**given)


def _known(plain: Mapping[str, Any], of: type[Advice | Trial]) -> dict[str, Any]:
    if not isinstance(plain, Mapping):
        raise TypeError(f"a {type(plain).__name__} is where an object should be")
    return {field.name: plain[field.name] for field in fields(of) if field.name in plain}
