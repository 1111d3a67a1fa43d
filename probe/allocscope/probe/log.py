"""What the probe says of itself, by the job's own logging; a handler or a filter of the job's that raises is none of the probe's affair."""

from __future__ import annotations

import logging
from contextlib import suppress

_LOGGER = logging.getLogger("allocscope.probe")
CALLERS = 3
"""Frames between a record and who said so."""


class Log:
    """As a Logger; nothing is raised."""

    def debug(self, text: str, *args: object) -> None:
        self._say(logging.DEBUG, text, args)

    def info(self, text: str, *args: object) -> None:
        self._say(logging.INFO, text, args)

    def log(self, level: int, text: str, *args: object) -> None:
        self._say(level, text, args)

    def _say(self, level: int, text: str, args: tuple[object, ...]) -> None:
        with suppress(Exception):
            _LOGGER.log(level, text, *args, stacklevel=CALLERS)


log = Log()
