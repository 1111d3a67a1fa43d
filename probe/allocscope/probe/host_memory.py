"""How much of the machine's memory a job may still take: a snapshot with a long history is large, and must not get its job killed."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")


def available_bytes(root: Path = ROOT) -> int | None:
    """What the machine, and each control group of this process, has left; None: not known. From procfs and cgroupfs (v2, v1)."""
    free = _figure(_text(root / "proc/meminfo"), "MemAvailable")
    left = [free * 1024] if free is not None else []
    left += _left_in_groups(root)
    return max(min(left), 0) if left else None


def anonymous_bytes(root: Path = ROOT) -> int | None:
    """What this process itself has in memory, files left out; None: not known."""
    held = _figure(_text(root / "proc/self/status"), "RssAnon")
    return held * 1024 if held is not None else None


def _left_in_groups(root: Path) -> Iterator[int]:
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0":
            yield from _left_upwards(root / "sys/fs/cgroup", path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            yield from _left_upwards(root / "sys/fs/cgroup/memory", path, *names)


def _left_upwards(mount: Path, path: str, limit: str, used: str, droppable: str) -> Iterator[int]:
    """Of a group and those that it is in, as far as they are limited. In a container the group is its mount's root."""
    folder = Path(os.path.normpath(mount / path.lstrip("/")))
    for group in (folder, *folder.parents):
        if group != mount and mount not in group.parents:
            return
        most, now = _number(group / limit), _number(group / used)
        if most is not None and now is not None:
            yield most - now + (_figure(_text(group / "memory.stat"), droppable) or 0)


def _number(path: Path) -> int | None:
    """Also None for "max"."""
    text = _text(path).strip()
    return int(text) if text.isdigit() else None


def _figure(text: str, name: str) -> int | None:
    match = re.search(rf"^{name}:?\s+([0-9]+)", text, re.MULTILINE)
    return int(match[1]) if match else None


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, ValueError):
        return ""
