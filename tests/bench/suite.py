"""How long `./dev test` takes, everything set up."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator

from tests.bench.figures import Figure
from tests.needs import REPO


def figures() -> Iterator[Figure]:
    """Seconds."""
    subprocess.run(["./dev", "setup"], cwd=REPO, check=True)
    began = time.perf_counter()
    done = subprocess.run(["./dev", "test", "-q"], cwd=REPO, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - began
    closing = done.stdout.strip().splitlines()[-1] if done.stdout.strip() else "it said nothing"
    yield Figure(f"./dev test ({closing})", [seconds], "s", "under 300")
