"""What the real allocator did, as far as it lies here, and more where ALLOCSCOPE_TEST_TRUTH names a folder of more.

data/truth: sequences of requests and all that came of them, torch 2.14.1; data/golden: an address and figures for each
request, torch 2.11.0 to 2.14.1. Such a folder has a truth/ and a golden/ in it too.
"""

import gzip
import json
import os
from pathlib import Path

HERE = Path(__file__).resolve().parent / "data"
_MORE = os.environ.get("ALLOCSCOPE_TEST_TRUTH")
FOLDERS = [HERE, *([Path(_MORE)] if _MORE else [])]


def files(kind: str) -> list[Path]:
    found = {path.name: path for folder in FOLDERS for path in sorted((folder / kind).glob("*.gz"))}
    return [found[name] for name in sorted(found)]


def read_case(path: Path) -> dict:
    told: dict = json.loads(gzip.decompress(path.read_bytes()))
    return told


def read_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]
