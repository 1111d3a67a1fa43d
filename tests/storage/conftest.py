import pytest

from tests.storage.backends import BACKENDS


@pytest.fixture(params=list(BACKENDS))
def backend(request, tmp_path):
    made = BACKENDS[request.param](tmp_path)
    yield made
    made.close()


@pytest.fixture
def repository(backend):
    return backend.open()
