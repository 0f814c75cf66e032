"""Paths are made absolute at submit: what is checked in one folder is used in others, by ranks and in containers.

Symbolic links and ``..`` stay as they were typed; ``~`` is expanded, variables are not: shells do that.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import Any, TypeVar

from rlbatch.api import ConfigError
from rlbatch.api.values import PathRule
from rlbatch.config.structured import hints_of, marks

T = TypeVar("T")

NO_PATHS = ("environment",)
"""Options of an engine in which nothing is a path: variables are passed on as they are typed."""
_VARIABLE = re.compile(r"\$\{?(\w+)")


def here() -> str:
    """The current folder, by the name under which the shell has it: the physical one may be another on other machines."""
    physical, logical = os.getcwd(), os.environ.get("PWD", "")
    return logical if os.path.isabs(logical) and os.path.exists(logical) and os.path.samefile(logical, physical) else physical


def absolute(text: str, rule: PathRule | None = None) -> str:
    """A path from the root; what is none by its rule, and what begins with a variable, as it is."""
    rule = rule or PathRule()
    if not text or text in rule.words or text.startswith("$") or not text.endswith(rule.suffix):
        return text
    expanded = os.path.expanduser(text)
    if rule.is_guess and not (expanded.startswith(("/", "./", "../")) or is_there(expanded)):
        return text
    return str(PurePath(here(), expanded))


def is_there(text: str) -> bool:
    """Whether a text names something below the current folder, and looks like a path: has a ``/`` or a ``.``."""
    return bool(text.strip("./")) and bool({"/", "."} & set(text)) and os.path.exists(text)


def with_absolute_paths(value: T) -> T:
    """A config or options dataclass with all its paths absolute."""
    hints = hints_of(type(value))
    changed: dict[str, Any] = {}
    for field in dataclasses.fields(value):  # type: ignore[arg-type]
        item = getattr(value, field.name)
        rule = _rule(hints[field.name])
        if dataclasses.is_dataclass(item):
            changed[field.name] = with_absolute_paths(item)
        elif _is_group(item):
            changed[field.name] = {name: with_absolute_paths(part) for name, part in item.items()}
        elif rule and isinstance(item, str):
            changed[field.name] = absolute(item, rule)
        elif rule and isinstance(item, (list, tuple)):
            changed[field.name] = type(item)(absolute(text, rule) for text in item)
    return dataclasses.replace(value, **changed)  # type: ignore[type-var]


def paths_of(value: Any, prefix: str = "") -> Iterator[tuple[str, str, PathRule]]:
    """Key, path and rule of every path in a config or options dataclass."""
    hints = hints_of(type(value))
    for field in dataclasses.fields(value):
        item, rule = getattr(value, field.name), _rule(hints[field.name])
        if dataclasses.is_dataclass(item):
            yield from paths_of(item, f"{prefix}{field.name}.")
        elif _is_group(item):
            for name, part in item.items():
                yield from paths_of(part, f"{prefix}{field.name}.{name}.")
        elif rule and item is not None:
            for text in [item] if isinstance(item, str) else item:
                if text and text not in rule.words and text.endswith(rule.suffix):
                    yield prefix + field.name, text, rule


def with_paths_there(options: Any, known: tuple[str, ...] = ()) -> Any:
    """Free options with those texts absolute that name something from the current folder, whatever they are called; ``known`` are paths
    also if they are not there.
    """
    if isinstance(options, Mapping):
        return {name: item if name in NO_PATHS else with_paths_there(item, known) for name, item in options.items()}
    if isinstance(options, (list, tuple)):
        return [with_paths_there(item, known) for item in options]
    if isinstance(options, str):
        return absolute(options, PathRule(is_guess=options not in known))
    return options


def files_there(options: Any, key: str) -> Iterator[tuple[str, str]]:
    """Key and path of those free options that are the absolute path of a file here."""
    if isinstance(options, Mapping):
        for name, item in options.items():
            yield from files_there(item, f"{key}.{name}") if name not in NO_PATHS else ()
    elif isinstance(options, (list, tuple)):
        for item in options:
            yield from files_there(item, key)
    elif isinstance(options, str) and os.path.isabs(options) and os.path.isfile(options):
        yield key, options


def check_variable(key: str, text: str) -> None:
    """Refuses, with ConfigError, a path that begins with a variable, set or not: nobody expanded it."""
    found = _VARIABLE.match(text)
    if found and found[1] in os.environ:
        raise ConfigError(
            f"{key}={text}: variables are not expanded here. Let the shell do it, without single quotes, or write "
            f"${{oc.env:{found[1]}}} in a yaml file."
        )
    if found:
        raise ConfigError(f"{key}={text}: the environment variable {found[1]} is not set. Set it, or give {key}=<path>.")


def _is_group(value: Any) -> bool:
    """Whether a type is a mapping from names to dataclasses."""
    return isinstance(value, Mapping) and any(dataclasses.is_dataclass(part) for part in value.values())


def _rule(hint: Any) -> PathRule | None:
    return next((mark for mark in marks(hint) if isinstance(mark, PathRule)), None)
