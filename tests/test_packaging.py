"""One distribution, one top-level name, eight source roots that never hide one another."""

import importlib
import json
import re
import subprocess
import sys
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.needs import REPO, oldest_python, torch_python

ROOTS = ("proto", "allocator", "probe", "daemon", "alerts", "storage", "collector", "cli")
PACKAGES = ("proto", "model", "allocator", "probe", "daemon", "alerts", "storage", "collector", "cli")
LOCKS = sorted((REPO / "requirements").glob("*.txt"))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=REPO, check=True, capture_output=True, text=True, timeout=60)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


@pytest.fixture(scope="module")
def requires(wheel: Path) -> list[Requirement]:
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        headers = Parser().parsestr(archive.read(metadata).decode())
    return [Requirement(text) for text in headers.get_all("Requires-Dist", [])]


@pytest.mark.parametrize("root", ROOTS)
def test_no_init_hides_a_sibling(root: str):
    assert not (REPO / root / "__init__.py").exists()
    assert [p.name for p in (REPO / root / "allocscope").iterdir() if p.is_file()] == []


def test_no_two_roots_hold_the_same_package():
    held = [p.name for root in ROOTS for p in (REPO / root / "allocscope").iterdir() if p.name != "__pycache__"]
    assert sorted(held) == sorted(PACKAGES)


@pytest.mark.parametrize("package", PACKAGES)
def test_every_package_says_what_it_is_for(package: str):
    assert importlib.import_module(f"allocscope.{package}").__doc__


def test_wheel_owns_one_top_level_name(names: set[str]):
    tops = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    assert tops == {"allocscope"}


@pytest.mark.parametrize("package", PACKAGES)
def test_wheel_has_every_package_with_its_types(names: set[str], package: str):
    assert {f"allocscope/{package}/__init__.py", f"allocscope/{package}/py.typed"} <= names


def test_wheel_has_every_file_of_the_packages(names: set[str]):
    """Data too: the .proto files, the page, the migrations, the recordings."""
    list_files = ["git", "ls-files", "-z", "--", *(f"{root}/allocscope" for root in ROOTS)]
    listed = subprocess.run(list_files, cwd=REPO, check=True, capture_output=True, text=True, timeout=60)
    tracked = {path.partition("/")[2] for path in listed.stdout.split("\0") if path and (REPO / path).exists()}
    assert "allocscope/proto/v1/sample.proto" in tracked
    assert tracked - names == set()


def test_wheel_has_nothing_that_git_ignores(names: set[str]):
    assert [name for name in names if "__pycache__" in name or name.endswith((".pyc", ".db", ".sqlite3"))] == []


def test_probe_asks_for_nothing_but_protobuf(requires: list[Requirement]):
    assert {r.name for r in requires if r.marker is None} == {"protobuf"}


def test_torch_is_never_required(requires: list[Requirement]):
    assert [r for r in requires if canonicalize_name(r.name) == "torch"] == []


@pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: lock.name)
def test_locks_name_no_place(lock: Path):
    text = lock.read_text()
    assert "://" not in text
    assert re.findall(r"^\s*--(?!hash=sha256:)\S+", text, re.MULTILINE) == []


@pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: lock.name)
def test_locks_pin_and_hash_everything(lock: Path):
    entries = lock.read_text().replace("\\\n", " ").splitlines()
    pinned = re.compile(r"^[a-z0-9-]+(\[[a-z0-9,-]+\])?==\S+( ; [^#]+?)?(\s+--hash=sha256:[0-9a-f]{64})+$")
    assert [entry for entry in entries if not pinned.match(entry)] == []
    assert [entry for entry in entries if entry.startswith("torch==")] == []


def test_lock_has_all_that_the_project_asks_for():
    """Or `./dev lock` was forgotten."""
    project = tomllib.loads((REPO / "pyproject.toml").read_text())
    asked = [*project["project"]["dependencies"], *project["dependency-groups"]["dev"]]
    for extra in project["project"]["optional-dependencies"].values():
        asked += extra
    lock = (REPO / "requirements" / "dev.txt").read_text()
    pins = dict(re.findall(r"^([a-z0-9-]+)==([^ ;]+)", lock, re.MULTILINE))
    for requirement in map(Requirement, asked):
        if requirement.name != "allocscope":
            assert pins[canonicalize_name(requirement.name)] in requirement.specifier, requirement


IMPORT_ALL = """
import importlib, json, pkgutil, sys
import grpc, google.protobuf
import allocscope.probe, allocscope.model, allocscope.proto.v1 as v1
for package in (allocscope.probe, allocscope.model, v1):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
print(json.dumps([grpc.__version__, google.protobuf.__version__, "torch" in sys.modules]))
"""


def test_probe_imports_on_the_oldest_grpcio_and_protobuf_it_promises():
    assert _import_all(oldest_python()) == ["1.66.2", "5.29.0", False]


def test_probe_does_not_import_torch_by_itself():
    *_, torch_came_along = _import_all(torch_python())
    assert torch_came_along is False


def _import_all(python: Path) -> list[object]:
    run = subprocess.run(
        [python, "-W", "error", "-c", IMPORT_ALL], cwd="/", capture_output=True, text=True, timeout=60, check=False
    )
    assert run.returncode == 0, run.stderr
    answer = json.loads(run.stdout)
    assert isinstance(answer, list)
    return answer
