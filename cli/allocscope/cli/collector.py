"""`allocscope collector`: the service that stores, foresees and alerts."""

from __future__ import annotations

import argparse
import os
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, fields
from importlib.resources import files
from pathlib import Path

from allocscope.collector.config import CollectorSettings
from allocscope.model.settings import SettingsError, docstrings, read

HELP = "the service that stores, foresees and alerts; one a fleet"
MANY = ("alertmanager", "webhook")
"""Flags that may be given more than once."""


def main(arguments: list[str]) -> int:
    """Until SIGTERM; 0: it ended in order, 1: it could not start, 2: its settings are wrong."""
    flags = vars(_parser().parse_args(arguments))
    config: Path | None = flags.pop("config")
    try:
        file = _read_file(config) if config else None
        settings = read(CollectorSettings, file=file, environ=os.environ, flags=flags)
    except SettingsError as error:
        where = f" ({config})" if config else ""
        return _complain(
            f"the settings are wrong{where}:\n" + "\n".join(f"  {problem}" for problem in error.problems), 2
        )
    except ConfigError as error:
        return _complain(str(error), 2)
    return run(settings)


def run(settings: CollectorSettings) -> int:
    """One collector; what keeps it from starting is one message."""
    from allocscope.alerts.notify import NotifyError
    from allocscope.collector.app import run as run_collector
    from allocscope.collector.errors import CollectorError
    from allocscope.storage.errors import CannotOpen

    try:
        run_collector(settings)
    except (CollectorError, CannotOpen, NotifyError) as error:
        return _complain(str(error), 1)
    return 0


class ConfigError(Exception):
    """A file of settings that cannot be read."""


def _read_file(path: Path) -> Mapping[str, object]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror} (--config names the file)") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error


def _complain(text: str, status: int) -> int:
    print(f"allocscope collector: {text}", file=sys.stderr)
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="allocscope collector",
        description=HELP,
        epilog="Each setting may also be an environment variable, ALLOCSCOPE_ and its name, or a line of the file.",
    )
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="settings as TOML; flags and environment weigh more"
    )
    said = docstrings((files("allocscope.collector") / "config.py").read_text(encoding="utf-8"))
    for it in fields(CollectorSettings):
        flag = "--" + it.name.replace("_", "-")
        default = "" if it.default in (MISSING, None, ()) else f" [{it.default}]"
        text = (said[it.name] + default).replace("%", "%%")
        parser.add_argument(flag, action="append" if it.name in MANY else "store", metavar="…", help=text)
    return parser
