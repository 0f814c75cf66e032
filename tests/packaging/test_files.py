"""Rules that every source file keeps."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

FOLDERS = ("rlbatch", "plugins", "configs", "tests", "examples", "benchmarks")
SKIPPING = {"skip", "skipif", "xfail", "importorskip"}
MAY_SKIP = "tests/cluster/processes.py"
"""Tests that need root or Debian's packages are skipped where those are missing, by one function; never with CI=true."""


def sources(repository: Path, *folders: str) -> Iterator[Path]:
    for folder in folders:
        yield from (path for path in (repository / folder).rglob("*.py") if "build" not in path.parts)


def test_files_stay_short(repository: Path) -> None:
    """Every file has at most 500 lines; the step, which reads top to bottom, fewer than 200."""
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in sources(repository, *FOLDERS)}
    assert {str(path): length for path, length in lengths.items() if length > 500} == {}
    assert lengths[repository / "rlbatch/pipeline/step.py"] < 200


def test_no_catch_all_module_names(repository: Path) -> None:
    """No module or folder is named after nothing."""
    stems = {part for path in sources(repository, "rlbatch", "plugins") for part in path.relative_to(repository).with_suffix("").parts}
    assert not stems & {"utils", "util", "manager", "helper", "helpers", "common", "misc"}


def test_every_test_says_its_promise_and_runs(repository: Path) -> None:
    """Each test has a docstring, and none is skipped or expected to fail; but see ``MAY_SKIP``."""
    for path in sources(repository, "tests", "examples"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name.startswith("test_"):
                assert ast.get_docstring(node), f"{path}:{node.lineno}: {node.name} has no docstring"
            if isinstance(node, ast.Attribute) and path != repository / MAY_SKIP:
                assert not (node.attr in SKIPPING and ast.unparse(node).startswith("pytest.")), f"{path}:{node.lineno}"
