"""The folders that the daemon writes to: its spool, and where jobs leave captures."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from allocscope.cli.doctor_findings import Finding, State
from allocscope.model.figures import duration, size

LEAST_FREE_BYTES = 64 << 20
MOST_FILES = 100_000
"""That are looked at; a folder with more is told of as it is up to there."""


@dataclass(frozen=True, slots=True)
class FolderSight:
    """A folder."""

    path: Path
    problem: str | None = None
    """Why it cannot be looked at; None: it can."""
    is_there: bool = True
    files: int = 0
    bytes: int = 0
    oldest_s: float | None = None
    """Age of the oldest file that is not empty."""
    free_bytes: int | None = None
    """On its disk; None: not known."""


def look_at_folder(path: Path) -> FolderSight:
    """Its files, and what its disk has free. May wait for a disk."""
    files = used = 0
    oldest_s: float | None = None
    try:
        os.scandir(path).close()  # os.walk tells of no error
        for at, _, names in os.walk(path):
            for name in names:
                try:
                    found = Path(at, name).lstat()
                except FileNotFoundError:  # it is the daemon's to take it away meanwhile
                    continue
                files, used = files + 1, used + found.st_size
                if found.st_size:
                    oldest_s = max(oldest_s or 0.0, time.time() - found.st_mtime)
            if files > MOST_FILES:
                break
    except FileNotFoundError:
        return FolderSight(path, is_there=False, free_bytes=_free_bytes(path))
    except OSError as error:
        return FolderSight(path, error.strerror or str(error), free_bytes=_free_bytes(path))
    return FolderSight(path, None, True, files, used, oldest_s, _free_bytes(path))


def folder_findings(about: str, seen: FolderSight, *, limit_bytes: int, daemon_runs: bool) -> Iterator[Finding]:
    """What waits there, and whether there is room."""
    facts = {
        "folder": os.fspath(seen.path),
        "bytes": seen.bytes,
        "limit_bytes": limit_bytes,
        "free_bytes": seen.free_bytes,
    }
    if seen.problem:
        yield Finding(
            about, State.NOTE, f"{seen.path} cannot be looked into: {seen.problem}", "ask as the daemon's user", facts
        )
    elif not seen.is_there:
        state = State.WRONG if daemon_runs else State.NOTE
        remedy = "the daemon makes it at its start; it must be able to write there" if daemon_runs else None
        yield Finding(about, state, f"{seen.path} is not there", remedy, facts)
    else:
        age = f", the oldest of {duration(seen.oldest_s)} ago" if seen.oldest_s is not None else ""
        state = State.NOTE if seen.bytes > limit_bytes * 0.9 else State.WELL
        remedy = (
            "the oldest are about to be dropped: see why the collector does not take them"
            if state is State.NOTE
            else None
        )
        text = f"{seen.path}: {size(seen.bytes)} of {size(limit_bytes)} in {seen.files} files{age}"
        yield Finding(about, state, text, remedy, facts)
    if seen.free_bytes is not None and seen.free_bytes < LEAST_FREE_BYTES:
        text = f"the disk of {seen.path} has {size(seen.free_bytes)} free"
        yield Finding(about, State.WRONG, text, "make room, or name a folder on another disk", facts)


def _free_bytes(path: Path) -> int | None:
    """Of the disk that it is, or would be, on."""
    for place in (path, *path.parents):
        try:
            return shutil.disk_usage(place).free
        except FileNotFoundError:
            continue
        except OSError:
            return None
    return None
