"""Whatever a run leaves out, it says; and where nothing may be left out, it fails."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.needs import REPO

WITHOUT = [
    option for plugin in ("cacheprovider", "hypothesispytest", "pytest_cov") for option in ("-p", f"no:{plugin}")
]

PASSES = "def test_passes(): pass\n"
LEAVES_OUT = PASSES + "from tests.needs import binary\ndef test_server(): binary('no-such-server', how='./dev setup')\n"
LEAVES_OUT_ALL = "from tests.needs import binary\nbinary('no-such-server', how='./dev setup')\n" + PASSES
SKIPS = PASSES + "import pytest\n@pytest.mark.skip(reason='some day')\ndef test_other(): pass\n"

LEFT_OUT_LINE = "1 × no no-such-server here (./dev setup)"


@pytest.mark.parametrize(
    ("options", "tests", "require_all", "exit_status", "line"),
    [
        pytest.param(["-n", "1"], PASSES, "1", 0, None, id="all ran, with xdist"),
        pytest.param([], LEAVES_OUT, "", 0, LEFT_OUT_LINE, id="left out, and may be"),
        pytest.param([], LEAVES_OUT, "1", 1, LEFT_OUT_LINE, id="left out, and may not be"),
        pytest.param(["-n", "1"], LEAVES_OUT, "1", 1, LEFT_OUT_LINE, id="left out, and may not be, with xdist"),
        pytest.param([], LEAVES_OUT_ALL, "1", 1, LEFT_OUT_LINE, id="a whole file left out"),
        pytest.param([], SKIPS, "", 0, None, id="skipped for another reason"),
        pytest.param([], SKIPS, "1", 1, "1 × some day", id="skipped for another reason where nothing may be"),
    ],
)
def test_what_is_left_out_is_said(
    tmp_path: Path, options: list[str], tests: str, require_all: str, exit_status: int, line: str | None
):
    (tmp_path / "test_it.py").write_text(tests)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", *WITHOUT, *options, "."]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    environment |= {"PYTHONPATH": os.fspath(REPO), "REQUIRE_ALL": require_all}
    run = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert run.returncode == exit_status, run.stdout + run.stderr
    if line is None:
        assert "LEFT OUT" not in run.stdout
    else:
        assert line in run.stdout
