"""What import-linter cannot say of the packages; the table of who may import whom is in pyproject.toml."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.needs import REPO

IN_JOBS = sorted(
    path.relative_to(REPO)
    for folder in ("probe/allocscope/probe", "proto/allocscope/model", "proto/allocscope/proto")
    for path in (REPO / folder).rglob("*.py")
)
NOTHING_ELSE = {"allocscope", "google", "grpc"}


def _parse(path: Path) -> ast.Module:
    return ast.parse((REPO / path).read_text(), filename=str(path), feature_version=(3, 10))


def _imports(nodes: Iterator[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module.partition(".")[0]


@pytest.mark.parametrize("path", IN_JOBS, ids=str)
def test_what_runs_in_jobs_needs_only_the_standard_library_grpcio_and_protobuf(path: Path):
    """Not even torch: it is looked up in sys.modules, so that a job without it never pays for it."""
    assert set(_imports(ast.walk(_parse(path)))) - NOTHING_ELSE - sys.stdlib_module_names == set()


@pytest.mark.parametrize("path", IN_JOBS, ids=str)
def test_what_runs_in_jobs_is_written_in_the_grammar_of_python_3_10(path: Path):
    _parse(path)
