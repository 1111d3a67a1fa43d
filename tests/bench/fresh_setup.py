"""`./dev setup` as a new user has it: a fresh clone in a clean folder with an empty HOME; once to download, once more to measure."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.bench.figures import Figure
from tests.needs import REPO

ROUNDS = 2


def figures() -> Iterator[Figure]:
    """Seconds."""
    with tempfile.TemporaryDirectory(prefix="as-") as folder:
        first, *later = [_set_up(Path(folder), turn) for turn in range(1 + ROUNDS)]
    yield Figure("with downloads", [first], "s")
    yield Figure("packages in pip's and uv's cache", later, "s", "under 60")


def _set_up(folder: Path, turn: int) -> float:
    """One set-up; what is downloaded stays in a cache of this bench's."""
    clone, home = folder / f"clone-{turn}", folder / f"home-{turn}"
    home.mkdir()
    subprocess.run(["git", "clone", "-q", str(REPO), str(clone)], check=True)
    caches = {"PIP_CACHE_DIR": str(folder / "pip"), "UV_CACHE_DIR": str(folder / "uv")}
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("ALLOCSCOPE_", "VIRTUAL_ENV", "XDG_"))
    }
    began = time.perf_counter()
    subprocess.run(
        ["./dev", "setup"], cwd=clone, env={**kept, **caches, "HOME": str(home)}, check=True, capture_output=True
    )
    return time.perf_counter() - began
