"""Reads yaml: what the schema calls text stays the text that was typed, whatever YAML would make of it.

To YAML 1.1 ``on``, ``007``, ``0.10``, ``1e3``, ``12:30:00`` and ``2026-01-01`` are a truth value, numbers and a date.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from rlbatch.api import ConfigError
from rlbatch.config.bounded_files import read_text
from rlbatch.config.text_keys import in_text_map, is_text

CORRECT = "Correct it."
MOST_VALUES = 100_000
"""Most values of a file. Those behind aliases count wherever they are used: a dozen lines of aliases may stand for more than any memory."""
DEEPEST = 32
"""Deepest nesting of mappings and lists."""
_PLAIN = frozenset(f"tag:yaml.org,2002:{name}" for name in ("str", "null", "bool", "int", "float", "merge", "map", "seq"))
_TEXT, _NULL, _MERGE, _DATE = (f"tag:yaml.org,2002:{name}" for name in ("str", "null", "merge", "timestamp"))


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """PyYAML's loader, to which ``1e-6`` is a number and a date is text."""

    yaml_implicit_resolvers = {  # noqa: RUF012 - as in its base
        first: [(tag, pattern) for tag, pattern in resolvers if tag != _DATE]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]
    """Quotes the texts that ``_Loader`` would make numbers of."""


for _side in (_Loader, _Dumper):
    _side.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789"))


def write_yaml(tree: Mapping[str, Any]) -> str:
    """A mapping as yaml; ``read_yaml`` reads back an equal one."""
    return str(yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True))


def read_yaml(path: Path, section: str = "", fix: str = CORRECT) -> Mapping[str, Any]:
    """A yaml file's mapping, whose keys are those of a section (empty: they are whole), e.g. ``reward``; ``fix``: see ``open_regular``.

    Raises:
        ConfigError: it is not yaml, no mapping, or says a key twice.
        DataError: it cannot be read.
    """
    loader = _Loader(read_text(path, fix))
    try:
        node = loader.get_single_node()
        if not isinstance(node, yaml.MappingNode):
            raise ConfigError(f"{path}: must be a mapping of keys to values. {CORRECT}")
        if _values(node, {}, path) > MOST_VALUES:
            raise ConfigError(
                f"{path}: must have at most {MOST_VALUES} values, aliases (`*name`) counted each time, {DEEPEST} deep. {CORRECT}"
            )
        _keep_text(node, section, path)
        tree: Mapping[str, Any] = loader.construct_document(node)
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # an int of thousands of digits, brackets without end
        mark = getattr(error, "problem_mark", None)
        place, what = f"{path}:{mark.line + 1}" if mark else str(path), getattr(error, "problem", None) or str(error)
        raise ConfigError(f"{place}: not yaml ({' '.join(what.split())}). {CORRECT}") from None
    finally:
        loader.dispose()
    return tree


def _values(node: yaml.Node, known: dict[int, float], path: Path, depth: int = 0) -> float:
    """How many values a node stands for; infinity: it is a part of itself, or too deep. Refuses types that a config has not."""
    if depth > DEEPEST:
        return math.inf
    if node.tag not in _PLAIN:
        kind = node.tag.replace("tag:yaml.org,2002:", "!!")
        raise ConfigError(f"{path}:{node.start_mark.line + 1}: {kind} is no type of a config's values. Write it without.")
    if id(node) not in known:
        known[id(node)] = math.inf
        items = node.value if isinstance(node, yaml.CollectionNode) else ()
        parts = [part for item in items for part in (item if isinstance(item, tuple) else (item,))]
        known[id(node)] = 1 + sum(_values(part, known, path, depth + 1) for part in parts)
    return known[id(node)]


def _keep_text(node: yaml.MappingNode, section: str, path: Path) -> None:
    names = set()
    for key_node, value in node.value:
        if key_node.tag == _MERGE:
            continue
        if not isinstance(key_node, yaml.ScalarNode):
            raise ConfigError(f"{path}:{key_node.start_mark.line + 1}: a key must be a word. {CORRECT}")
        key_node.tag = _TEXT
        if key_node.value in names:
            raise ConfigError(f"{path}:{key_node.start_mark.line + 1}: `{key_node.value}` is given twice. Leave one out.")
        names.add(key_node.value)
        key = f"{section}.{key_node.value}".lstrip(".")
        if isinstance(value, yaml.MappingNode):
            _keep_text(value, key, path)
        elif is_text(key):
            for item in value.value if isinstance(value, yaml.SequenceNode) else [value]:
                is_null = item.tag == _NULL and item.value and not in_text_map(key)
                if isinstance(item, yaml.ScalarNode) and not is_null:
                    item.tag = _TEXT
