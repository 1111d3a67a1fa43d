import pytest

from tests.collector.harness import collector


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    """One collector for a module's tests; each of them is a node of its own."""
    with collector(tmp_path_factory.mktemp("collector")) as process:
        yield process
    assert [line for line in process.said if "Traceback" in line or "[error" in line] == []
