"""The core names no plugin: what it must know of one, the plugin declares."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import rlbatch
from rlbatch.registry import DISTRIBUTION, load_plugins

PACKAGE = Path(rlbatch.__file__).parent
WORDS = {
    "none",
    "number",
    "sequence",
    "clip",
    "gradients",
    "transformers",
    "optimizer_state",
    "weights",
    "length",
    "accuracy",
    "jsonl",
    "math",
}
"""Names that also mean something else: only `<key>=<name>` is one of a plugin."""
EXEMPT = {
    "config/schema.py": "defaults of keys",
    "config/foreign_keys.py": "what keys of other frameworks are called here",
    "launch/preflight/node_facts.py": "distributions whose versions change numbers",
}
HELP = {"USAGE", "INTRODUCTION"}
"""Texts with examples."""


def texts(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and value of every text that is no docstring and no help."""
    passed = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            passed.add(node.value)
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id in HELP:
            passed |= {part for part in ast.walk(node.value) if isinstance(part, ast.Constant)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in passed:
            yield node.lineno, node.value


def named(text: str, choices: set[tuple[str, str]]) -> list[str]:
    """The choices that a text names."""
    words = text.replace("`", " ").replace(",", " ").replace(".", " ").split()
    return [f"{key}={name}" for key, name in choices if (text == name and name not in WORDS) or f"{key}={name}".rpartition(".")[2] in words]


def test_no_module_names_a_choice_of_a_built_in_plugin() -> None:
    """Neither whole, as code compares it, nor as the advice of a message."""
    tables = load_plugins().tables
    choices = {(table.key, entry.name) for table in tables for entry in table.values() if entry.supplier.distribution == DISTRIBUTION}
    assert named("vllm", choices) == named("Use rollout=vllm.", choices) == ["rollout=vllm"]
    assert {"grpo", "vllm", "cpu_adam", "number", "clip"} <= {name for _, name in choices}
    found = [
        f"{path.relative_to(PACKAGE)}:{line}: {name}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if str(path.relative_to(PACKAGE)) not in EXEMPT
        for line, text in texts(ast.parse(path.read_text(encoding="utf-8")))
        for name in named(text, choices)
    ]
    assert not found, found
