"""Parameters that several questions over HTTP have, each with its bounds; and how one is refused."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from http import HTTPStatus
from typing import Annotated, Any

from fastapi import Query

LARGEST_TIME_S = 4_102_444_800.0
"""The year 2100."""

Cursor = Annotated[str | None, Query(max_length=512, description="next_cursor of the page before.")]
Limit = Annotated[int, Query(ge=1, le=500, description="Items of a page, at most.")]
Name = Annotated[str | None, Query(max_length=512)]
Seconds = Annotated[float | None, Query(ge=0, le=LARGEST_TIME_S, allow_inf_nan=False)]


LONGEST_VALUE = 100
"""Letters of a value that was refused, as it is told again."""


def problems_of(errors: Iterable[Mapping[str, Any]]) -> list[dict[str, str]]:
    """What is wrong with each parameter, from what pydantic says of it: in words, with what is allowed and what came."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for error in errors:
        place = "body" if error["type"] == "json_invalid" else (*error["loc"][1:], "body")[0]
        found.setdefault(str(place), []).append(
            error
        )  # several of one parameter: it may be of kinds, a number or "all"
    return [_problem(parameter, each) for parameter, each in found.items()]


def _problem(parameter: str, errors: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    allowed = " or ".join(_allowed(error, " s" if parameter.endswith("_s") else "") for error in errors)
    came = errors[0].get("input")
    value = f"{came:.15g}" if isinstance(came, float) else str(came)[:LONGEST_VALUE]
    told = "" if errors[0]["type"] in _WITHOUT_VALUE else f", not {value}"
    return {"parameter": parameter, "message": allowed + told, "value": value}


_WITHOUT_VALUE = frozenset({"missing", "extra_forbidden", "json_invalid", "string_too_long"})


def _allowed(error: Mapping[str, Any], unit: str) -> str:
    """`at most 600 s`; pydantic's own words where we have none."""
    facts = error.get("ctx") or {}
    match error["type"]:
        case "less_than_equal":
            return f"at most {facts['le']:.15g}{unit}"
        case "greater_than_equal":
            return f"at least {facts['ge']:.15g}{unit}"
        case "string_too_long":
            return f"at most {facts['max_length']} letters"
        case "enum" | "literal_error":
            return str(facts["expected"])
        case "int_type" | "int_parsing" | "int_from_float" | "int_parsing_size":
            return "a whole number"
        case "float_type" | "float_parsing" | "finite_number":
            return "a number of seconds" if unit else "a number"
        case "bool_type":
            return "true or false"
        case "string_type":
            return "a text"
        case "model_attributes_type" | "dict_type":
            return "a JSON object"
        case "missing":
            return "it is wanted"
        case "extra_forbidden":
            return "there is no such parameter"
        case "json_invalid":
            return "it is not JSON"
    return str(error["msg"])


class Refused(Exception):  # noqa: N818  (an answer, not a failure)
    """A request that cannot be answered, in the API's words."""

    def __init__(self, status: HTTPStatus, code: str, message: str, **details: Any) -> None:
        super().__init__(message)
        self.status, self.code, self.message, self.details = status, code, message, details
