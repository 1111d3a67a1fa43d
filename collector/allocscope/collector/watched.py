"""Files that may be exchanged while we run: certificates that are renewed, tokens that are added."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

import structlog

from allocscope.collector.errors import CredentialsError
from allocscope.model.file_rights import too_open

log = structlog.get_logger(__name__)

_Made = TypeVar("_Made")


class Watched(Generic[_Made]):
    """What is made of some files; files that cannot be used leave what was, and are told of once."""

    def __init__(self, make: Callable[[], _Made], *paths: Path) -> None:
        """CredentialsError: they cannot be used from the beginning."""
        self._make, self._paths = make, paths
        self._seen = self._look()
        self.made = make()

    def renewed(self) -> _Made | None:
        """What is made of them now; None: they are as they were, or cannot be used."""
        seen = self._look()
        if seen == self._seen:
            return None
        self._seen = seen
        try:
            self.made = self._make()
        except CredentialsError as error:
            log.error("what was exchanged cannot be used; what was before goes on", why=str(error))
            return None
        log.info("exchanged while running", files=[os.fspath(path) for path in self._paths])
        return self.made

    def _look(self) -> tuple[tuple[int, int, int] | None, ...]:
        return tuple(map(_version, self._paths))


def _version(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def read(name: str, path: Path) -> bytes:
    """A file that a setting names; CredentialsError."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise CredentialsError(f"cannot read {name} {path}: {error.strerror or error}") from error


def warn_if_open(name: str, path: Path | None) -> None:
    """Say in the log that a secret is open to others."""
    wrong = too_open(path.stat().st_mode) if path is not None else None
    if wrong:
        log.warning("a secret is open to others", file=f"{name} {path}: {wrong}")
