"""Every test here has the rig, made by `./dev setup --gpuless`; where it is not, they are left out, and said to be."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests import needs
from tests.gpuless.rig import Rig


@pytest.fixture(scope="session", autouse=True)
def gpuless() -> Path:
    """The rig's Python."""
    return needs.gpuless_python()


@pytest.fixture
def make_rig(tmp_path: Path) -> Callable[..., Rig]:
    """`make_rig(devices=2)`: pretend devices, as Rig has them."""
    return lambda *args, **options: Rig(tmp_path, *args, **options)


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    """One pretend device of 24 GiB."""
    return Rig(tmp_path)
