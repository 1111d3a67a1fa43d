import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.processes import Machine


@pytest.fixture
def machine() -> Iterator[Machine]:
    """Where this test's processes run. Not in tmp_path: a socket's path is short or impossible."""
    with tempfile.TemporaryDirectory(prefix="as-") as folder:
        there = Machine(Path(folder))
        try:
            yield there
        finally:
            there.close()
            there.show_logs()
