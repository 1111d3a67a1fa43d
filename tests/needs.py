"""What some tests need beyond Python packages, found or left out, never silently.

A test asks for what it needs (`promtool()`, `torch_python()`); where it is not there the test is
skipped with a reason that starts with `left out:`, the end of the run lists all of these, and with
`REQUIRE_ALL=1` (as in CI) the run fails.
"""

import os
import shutil
from pathlib import Path
from typing import NoReturn

import pytest

from tests.gpuless import install

REPO = Path(__file__).resolve().parent.parent
LEFT_OUT = "left out: "

SERVICES = "./dev setup --services"


def left_out(what: str, how: str) -> NoReturn:
    """Skip this test for want of `what`; `how` says how to get it."""
    pytest.skip(f"{LEFT_OUT}no {what} here ({how})", allow_module_level=True)


def needs(what: str, found: Path | None, how: str) -> Path:
    """`found`, or skip this test for want of it."""
    return found or left_out(what, how)


def binary(*names: str, how: str, variable: str | None = None) -> Path:
    """The first of these programs that is there: named by `variable`, on the PATH, or unpacked by ./dev."""
    named = os.environ.get(variable) if variable else None
    return needs(names[0], Path(named) if named else _program(names), how)


def _program(names: tuple[str, ...]) -> Path | None:
    unpacked = REPO / ".cache" / "services" / "usr" / "bin"
    for name in names:
        path = shutil.which(name) or shutil.which(name, path=os.fspath(unpacked))
        if path:
            return Path(path)
    return None


def _python(venv: str, variable: str) -> Path | None:
    path = Path(os.environ.get(variable) or REPO / venv / "bin" / "python")
    return path if os.access(path, os.X_OK) else None


def torch_python() -> Path:
    """A Python that has PyTorch, grpcio, protobuf and the working tree's Allocscope."""
    found = _python(".venv-torch", "ALLOCSCOPE_TEST_TORCH_PYTHON")
    return needs("Python with PyTorch", found, "./dev setup --torch")


def oldest_python() -> Path:
    """A Python that has the oldest grpcio and protobuf promised, and the working tree's Allocscope."""
    found = _python(".venv-oldest", "ALLOCSCOPE_TEST_OLDEST_PYTHON")
    return needs("Python with the oldest grpcio and protobuf", found, "./dev setup --oldest")


def gpuless_python() -> Path:
    """The Python of the rig that runs PyTorch's real CUDA allocator with no GPU (tests/gpuless)."""
    found = install.python() if install.is_complete() else None
    return needs("rig for the real CUDA allocator", found, "./dev setup --gpuless")


def prometheus() -> Path:
    """The Prometheus server."""
    return binary("prometheus", how=SERVICES)


def promtool() -> Path:
    """Prometheus's checker of rules and configurations."""
    return binary("promtool", how=SERVICES)


def alertmanager() -> Path:
    """The Alertmanager server."""
    return binary("prometheus-alertmanager", "alertmanager", how=SERVICES)


def amtool() -> Path:
    """Alertmanager's checker of configurations."""
    return binary("amtool", how=SERVICES)
