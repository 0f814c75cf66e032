"""Arguments of commands that compose no job: ``key=value`` for the keys of one dataclass."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, TypeVar

import yaml  # type: ignore[import-untyped]

from rlbatch.api import ConfigError
from rlbatch.config.structured import from_mapping, key_docs, show_value, unknown_key

T = TypeVar("T")
_NUMBER = re.compile(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+")
"""A number that is text to YAML 1.1."""


def parse_keys(cls: type[T], arguments: Sequence[str], others: Sequence[str] = ()) -> tuple[T, set[str]]:
    """The options, and the keys that were given; ``others`` are keys that messages name beside those of ``cls``.

    Raises:
        ConfigError: an argument that is no key=value, an unknown key, one that is given twice, or a wrong value.
    """
    known = {doc.name: doc for doc in key_docs(cls)}
    values: dict[str, Any] = {}
    given: set[str] = set()
    for argument in arguments:
        name, equals, text = argument.partition("=")
        if not equals:
            raise ConfigError(f"`{argument}`: not of the form key=value. See --help.")
        if name not in known:
            raise unknown_key(name, [*known, *others])
        if name in given:
            raise ConfigError(f"{argument}: `{name}` is given twice. Leave one out.")
        given.add(name)
        section, _, last = name.rpartition(".")
        into = values.setdefault(section, {}) if section else values
        into[last] = text if isinstance(known[name].default, str) else _value(argument, text)
    return from_mapping(cls, values), given


def key_table(cls: type) -> str:
    """A line for each key: its default, and what it means."""
    return "\n".join(f"  {f'{doc.name}={show_value(doc.default)}':<32} {doc.doc}" for doc in key_docs(cls))


def _value(argument: str, text: str) -> Any:
    try:
        value = yaml.safe_load(text)
        return float(text) if isinstance(value, str) and _NUMBER.fullmatch(text) else value
    except yaml.YAMLError:
        raise ConfigError(f"{argument}: the value cannot be read. Write a number, true, false, null or [a,b].") from None
