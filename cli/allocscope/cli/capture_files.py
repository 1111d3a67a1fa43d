"""Captures as files of their own: named for their job, written whole or not at all, and over nothing that is there."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Iterable, Mapping
from itertools import count
from pathlib import Path
from typing import Any


class FileProblem(Exception):  # noqa: N818 (it names what happened)
    """A file cannot be had; the text says what to do."""


def check_output(output: Path | None, *, several: bool) -> None:
    """Before anything is ordered: could it be written there? A folder for several is made."""
    if output is None or output.is_dir():
        return
    if several and output.suffix == ".pickle":
        raise FileProblem(f"--output {output} names one file for several captures: name a folder")
    if output.exists() or output.is_symlink():
        raise FileProblem(f"{output} is there already, and is not overwritten: name another file")
    if not output.parent.is_dir():
        raise FileProblem(f"there is no folder {output.parent}")
    if several:
        _make_folder(output)


def _make_folder(output: Path) -> None:
    try:
        output.mkdir()
    except OSError as error:
        raise FileProblem(f"folder {output} cannot be made: {error.strerror or error}") from error


def place_of(output: Path | None, about: Mapping[str, Any]) -> Path:
    """Where a capture goes: the file that was named, or in its folder a name of its own that is not there yet."""
    if output is not None and not output.is_dir():
        return output
    named = (output or Path()) / _name(about)
    others = (named.with_stem(f"{named.stem}-{number}") for number in count(2))
    return named if not named.exists() else next(other for other in others if not other.exists())


def _name(about: Mapping[str, Any]) -> str:
    """As the collector calls it, as far as that is a plain name."""
    told = str(about.get("file_name") or "")
    return told if re.fullmatch(r"[A-Za-z0-9_+][A-Za-z0-9._+-]{0,200}", told) else f"{about['capture_id']}.pickle"


def save(pieces: Iterable[bytes], path: Path, expected_bytes: int | None) -> int:
    """How many bytes it is. FileProblem; whatever breaks in between, nothing is there under its name."""
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        with part.open("xb") as file:
            written = sum(map(file.write, pieces))
        if expected_bytes is not None and written != expected_bytes:
            raise FileProblem(f"{written} bytes came of {expected_bytes}: fetch it again")
        _publish(part, path)
    except FileExistsError as error:
        raise FileProblem(f"{path} is there already, and is not overwritten: name another file") from error
    except OSError as error:
        raise FileProblem(f"{path} cannot be written: {error.strerror or error}") from error
    finally:
        part.unlink(missing_ok=True)
    return written


def _publish(part: Path, path: Path) -> None:
    """Give it its name, unless something has it: a rename would take its place."""
    try:
        os.link(part, path)
    except FileExistsError:
        raise
    except OSError:  # a file system without links
        with path.open("xb"):
            pass
        part.replace(path)
