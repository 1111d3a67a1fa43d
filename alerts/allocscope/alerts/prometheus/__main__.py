"""Makes the shipped files: `python -m allocscope.alerts.prometheus`; with --check it says whether they are what it would make."""

from __future__ import annotations

import sys
from pathlib import Path

from allocscope.alerts.prometheus.shipped import FILES, text


def main(arguments: list[str]) -> int:
    """Exit status 0: done, or as they should be; 1: some are not; 2: a wrong call."""
    if arguments not in ([], ["--check"]):
        sys.stderr.write("usage: python -m allocscope.alerts.prometheus [--check]\n")
        return 2
    differ = [name for name in FILES if _is_not(_path(name), text(name))]
    if not arguments:
        for name in differ:
            _path(name).write_text(text(name), encoding="utf-8")
        return 0
    for name in differ:
        sys.stderr.write(f"{_path(name)} is not what the rules make: run ./dev rules, and commit what it makes\n")
    return 1 if differ else 0


def _path(name: str) -> Path:
    return Path(__file__).with_name(name)


def _is_not(path: Path, wanted: str) -> bool:
    return not path.exists() or path.read_text(encoding="utf-8") != wanted


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
