"""One way to read settings: a frozen dataclass from flags, environment and file, in that order of weight.

    @dataclass(frozen=True, slots=True)
    class Settings:
        node: str
        '''The docstring under a field says what it means, its unit, and why this default.'''
        interval_s: float = setting(1.0, at_least=0.1, at_most=60)

    read(Settings, file=tomllib.loads(text), environ=os.environ, flags={"node": "a"})

Fields are str, int, float, bool, Path, tuple[str, ...], or one of these or None. Every problem is reported together.
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

_Settings = TypeVar("_Settings")

Check = Callable[[Any], "str | None"]
"""Says what would be right about a value that is not; None where it is."""


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong: where it was said, the value seen, what would be right."""

    key: str
    value: object
    right: str
    nearest: str | None = None
    """The name that was probably meant, for one that is unknown."""

    def __str__(self) -> str:
        seen = "" if self.value is MISSING else f" is {self.value!r}:"
        hint = f" (did you mean {self.nearest!r}?)" if self.nearest else ""
        return f"{self.key}{seen} {self.right}{hint}"


class SettingsError(ValueError):
    """What is wrong with the settings, all of it."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(map(str, self.problems)))


def setting(
    default: Any = MISSING,
    *,
    at_least: float | None = None,
    at_most: float | None = None,
    choices: tuple[str, ...] | None = None,
    check: Check | None = None,
    secret: bool = False,
) -> Any:
    """A field with bounds (inclusive), choices, a check of its own, or a value that is never shown."""
    metadata = {"at_least": at_least, "at_most": at_most, "choices": choices, "check": check, "secret": secret}
    return field(default=default, metadata=metadata)


def read(
    cls: type[_Settings],
    *,
    file: Mapping[str, object] | None,
    environ: Mapping[str, str],
    flags: Mapping[str, object],
    prefix: str = "ALLOCSCOPE_",
) -> _Settings:
    """The settings, or a SettingsError with every problem.

    A flag of None and an empty variable are not given. Variables and flags may be text, which is read as the field's type;
    a file's values have types of their own.
    """
    reader = _Reader(get_type_hints(cls))
    names = list(reader.types)
    reader.unknown(file or {}, names, "a setting", "in the file")
    reader.unknown(flags, names, "a flag", "among the flags")
    for it in fields(cls):  # type: ignore[arg-type]
        variable = prefix + it.name.upper()
        if flags.get(it.name) is not None:
            reader.take(it, "--" + it.name.replace("_", "-"), flags[it.name], text=True)
        elif environ.get(variable):
            reader.take(it, variable, environ[variable], text=True)
        elif file and it.name in file:
            reader.take(it, it.name, file[it.name], text=False)
        elif it.default is MISSING and it.default_factory is MISSING:
            flag = "--" + it.name.replace("_", "-")
            reader.problems.append(Problem(it.name, MISSING, f"must be given, as {flag}, {variable}, or in the file"))
    if reader.problems:
        raise SettingsError(reader.problems)
    return cls(**reader.values)


def near_misses(
    cls: type, environ: Mapping[str, str], *, known: Collection[str] = (), prefix: str = "ALLOCSCOPE_"
) -> tuple[str, ...]:
    """Warnings about variables that are nobody's (not in `known` either), but nearly one of this class's."""
    right = [prefix + it.name.upper() for it in fields(cls)]
    warnings = []
    for variable in sorted(environ):
        if variable.startswith(prefix) and variable not in right and variable not in known:
            near = difflib.get_close_matches(variable, right, n=1, cutoff=0.85)
            if near:
                warnings.append(f"{variable} is no setting; did you mean {near[0]}?")
    return tuple(warnings)


def docstrings(source: str) -> dict[str, str]:
    """The docstring under each field of each class in a module's source, by the field's name, on one line."""
    classes = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]
    pairs = [pair for node in classes for pair in zip(node.body, node.body[1:])]  # noqa: B905 (pairs)
    return {
        name.target.id: " ".join(doc.value.value.split())
        for name, doc in pairs
        if isinstance(name, ast.AnnAssign) and isinstance(name.target, ast.Name)
        if isinstance(doc, ast.Expr) and isinstance(doc.value, ast.Constant) and isinstance(doc.value.value, str)
    }


def host_port(value: str) -> str | None:
    """A check: "HOST:PORT", an IPv6 address in brackets; port 0 lets the system choose."""
    host, colon, port = value.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if colon and host and (":" not in host or bracketed) and port.isascii() and port.isdigit() and int(port) <= 65535:
        return None
    return "must be HOST:PORT, with a PORT from 0 to 65535 and an IPv6 HOST in brackets"


class _Reader:
    """Collects values and problems."""

    def __init__(self, types: Mapping[str, Any]) -> None:
        self.types = types
        self.values: dict[str, Any] = {}
        self.problems: list[Problem] = []

    def unknown(self, given: Mapping[str, object], names: list[str], what: str, where: str) -> None:
        for key in given:
            if key not in names:
                near = difflib.get_close_matches(key, names, n=1)
                self.problems.append(Problem(key, MISSING, f"is not {what}, but is {where}", near[0] if near else None))

    def take(self, it: Any, key: str, value: object, *, text: bool) -> None:
        try:
            read_value = _convert(self.types[it.name], value, text=text)
            _hold(it.metadata, read_value)
        except ValueError as error:
            self.problems.append(Problem(key, "…" if it.metadata.get("secret") else value, str(error)))
        else:
            self.values[it.name] = read_value


_TRUTH = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


def _convert(kind: Any, value: object, *, text: bool) -> object:
    """The value as its field's type; ValueError says what would be right."""
    options = [t for t in get_args(kind) if t is not type(None)] if type(None) in get_args(kind) else []
    if options:
        return None if value is None else _convert(options[0], value, text=text)
    if get_origin(kind) is tuple:
        return _strings(value, text=text)
    if kind is bool:
        return _bool(value, text=text)
    if kind in (int, float):
        return _number(kind, value, text=text)
    if kind is str:
        if not isinstance(value, str):
            raise ValueError("must be text")
        return value
    if not isinstance(value, str) and not hasattr(value, "__fspath__"):
        raise ValueError("must be a path, as text")
    if value == "":
        raise ValueError("must be a path, not empty")
    return kind(value)  # a Path, which is not named here: this module is pure


def _strings(value: object, *, text: bool) -> tuple[str, ...]:
    if text and isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    if isinstance(value, (list, tuple)) and all(isinstance(part, str) for part in value):
        return tuple(value)
    raise ValueError("must be texts, separated by commas" if text else "must be a list of texts")


def _bool(value: object, *, text: bool) -> bool:
    if isinstance(value, bool):
        return value
    if text and isinstance(value, str) and value.lower() in _TRUTH:
        return _TRUTH[value.lower()]
    raise ValueError("must be true or false")


def _number(kind: type[int | float], value: object, *, text: bool) -> int | float:
    right = "must be a whole number" if kind is int else "must be a number"
    if isinstance(value, bool) or not isinstance(value, (int, float, str)) or (isinstance(value, str) and not text):
        raise ValueError(right)
    if kind is int and isinstance(value, float):
        raise ValueError(right)
    try:
        number = kind(value)
    except ValueError:
        raise ValueError(right) from None
    if number != number:
        raise ValueError(right)
    return number


def _hold(metadata: Mapping[str, Any], value: Any) -> None:
    """ValueError where a value breaks its field's bounds."""
    if value is None or not metadata:
        return
    least, most, choices, check = (metadata.get(key) for key in ("at_least", "at_most", "choices", "check"))
    if (least is not None and value < least) or (most is not None and value > most):
        raise ValueError(_bounds(least, most))
    if choices is not None and value not in choices:
        raise ValueError("must be one of " + ", ".join(choices))
    wrong = check(value) if check else None
    if wrong:
        raise ValueError(wrong)


def _bounds(least: float | None, most: float | None) -> str:
    if most is None:
        return f"must be at least {least:.15g}"
    return f"must be at most {most:.15g}" if least is None else f"must be from {least:.15g} to {most:.15g}"
