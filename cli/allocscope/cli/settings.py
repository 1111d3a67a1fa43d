"""A service's settings from its command line, the environment and its file; what is wrong is printed, all of it."""

from __future__ import annotations

import argparse
import inspect
import os
import sys
import tomllib
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from allocscope.model import settings

_Settings = TypeVar("_Settings")

CONFIG_VARIABLE = "ALLOCSCOPE_CONFIG"
PROBE_VARIABLES = ("ALLOCSCOPE_JOB", "ALLOCSCOPE_DISABLE", "ALLOCSCOPE_SOCKET", CONFIG_VARIABLE)
ASKING_VARIABLES = ("ALLOCSCOPE_URL", "ALLOCSCOPE_CA", "ALLOCSCOPE_TOKEN", "ALLOCSCOPE_TOKEN_FILE")
"""Variables that are somebody else's, and no near misses."""


class UnusableError(Exception):
    """Settings that cannot be used; the text is for the terminal."""


def read_settings(cls: type[_Settings], arguments: list[str], *, command: str, about: str) -> _Settings:
    """Settings of class `cls`; raises UnusableError, and SystemExit as argparse does (--help, an unknown flag)."""
    return settings_given(cls, vars(settings_parser(cls, command, about).parse_args(arguments)), command=command)


def settings_given(cls: type[_Settings], given: dict[str, Any], *, command: str) -> _Settings:
    """Settings from what a `settings_parser` found, and from the environment and the file; raises UnusableError."""
    path = given.pop("config") or os.environ.get(CONFIG_VARIABLE)
    for warning in settings.near_misses(cls, os.environ, known=(*PROBE_VARIABLES, *ASKING_VARIABLES)):
        print(f"allocscope {command}: {warning}", file=sys.stderr)
    try:
        return settings.read(cls, file=_table(path) if path else None, environ=os.environ, flags=given)
    except settings.SettingsError as error:
        where = f"; the file is {path}" if path else ""
        listed = "\n".join(f"  {problem}" for problem in error.problems)
        raise UnusableError(f"{len(error.problems)} problem(s) with the settings{where}\n{listed}") from error


def _table(path: str) -> dict[str, object]:
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UnusableError(f"cannot read the settings file {path}: {error.strerror}") from error
    except ValueError as error:
        raise UnusableError(f"the settings file {path} is not TOML: {error}") from error


def settings_parser(cls: type, command: str, about: str) -> argparse.ArgumentParser:
    """A flag for each setting, and --config."""
    parser = argparse.ArgumentParser(
        prog=f"allocscope {command}",
        description=about,
        epilog=f"Each setting may also be a variable (ALLOCSCOPE_ and its name) or a line of the file;"
        f" flags outweigh variables, and those the file. {CONFIG_VARIABLE} names the file too.",
        allow_abbrev=False,
    )
    parser.add_argument("--config", metavar="FILE", help="settings in TOML")
    module = inspect.getmodule(cls)
    docs = settings.docstrings(inspect.getsource(module)) if module else {}
    types = get_type_hints(cls)
    for field in fields(cls):
        text = (docs.get(field.name, "") + _default(field)).replace("%", "%%")
        action = "append" if get_origin(types[field.name]) is tuple else "store"
        flag = "--" + field.name.replace("_", "-")
        parser.add_argument(flag, action=action, metavar=_form(field, types[field.name]), help=text)
    return parser


def _form(field: Field[Any], kind: Any) -> str:
    """How a value looks: its choices, or its kind, or the last word of its name, which is its unit where it has one."""
    if choices := field.metadata.get("choices"):
        return "{" + ",".join(choices) + "}"
    if field.metadata.get("check") is settings.host_port:
        return "HOST:PORT"
    if kind is bool:
        return "{true,false}"
    if Path in (kind, *get_args(kind)):
        return "PATH"
    if field.name.endswith("bytes_per_s"):
        return "BYTES"
    last = field.name.rpartition("_")[2]
    return "SECONDS" if last == "s" else last.upper()


def _default(field: Field[Any]) -> str:
    """None and () have no words of their own: the docstring tells what holds without."""
    default = field.default
    if default == ():
        return " (may be given several times)"
    if default is MISSING or default is None:
        return ""
    told = (
        str(default).lower()
        if isinstance(default, bool)
        else f"{default:.15g}"
        if isinstance(default, float)
        else default
    )
    return f" (default: {told})"
