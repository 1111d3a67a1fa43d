"""The script for machines that have a GPU runs from its beginning to its end here too."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_all_that_it_asks_holds_on_pretended_devices(rig):
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu_smoke", "--python", rig.python, "--rounds", "0"],
        env=dict(os.environ) | rig.settings | {"PYTHONPATH": os.fspath(ROOT)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert set(json.loads(done.stdout.splitlines()[-1])["truth"].values()) == {"holds"}
