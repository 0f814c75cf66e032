"""Turns plain mappings into frozen dataclasses and back, with strict types: what does not fit is refused by its key."""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from rlbatch.api import ConfigError
from rlbatch.api.values import INT64, Range

T = TypeVar("T")

MISSING_VALUE = "???"
"""How a yaml file says that the user must give a value (OmegaConf's convention)."""

_NO_TEXT = re.compile("[\0\ud800-\udfff]")
"""Pattern of NUL, which no path may hold, and of bytes of the command line that are not UTF-8."""

NAME = "<name>"
"""What documented keys have for a name that the user chooses: ``eval.sets.<name>.file``."""

MOST_LISTED = 20
"""Keys that a message lists."""
MOST_SHOWN = 200
"""Characters of a value in a message."""

_TYPE_WORDS: Mapping[Any, str] = {int: "an integer", float: "a number", bool: "true or false", str: "text", type(None): "null"}


_HINTS: dict[type, Mapping[str, Any]] = {}


def hints_of(cls: type) -> Mapping[str, Any]:
    """The types of a dataclass's fields, with what is annotated; the search completes hundreds of configs of the same few classes."""
    if cls not in _HINTS:
        _HINTS[cls] = get_type_hints(cls, include_extras=True)
    return _HINTS[cls]


@dataclasses.dataclass(frozen=True)
class KeyDoc:
    """One config key.

    Attributes:
        name: Dotted, e.g. ``train.steps``.
        type: The type in words, e.g. ``an integer or null``.
        default: Its default value.
        doc: What it means, with its unit.
        marks: What its type says beyond Python's, e.g. a ``Range``.
        is_text: Whether it is text, a choice of words, or several of these.
    """

    name: str
    type: str
    default: Any
    doc: str
    marks: tuple[Any, ...] = ()
    is_text: bool = False


def key_docs(cls: Any, prefix: str = "") -> Iterator[KeyDoc]:
    """Every key of a (nested) config or options dataclass, in order."""
    hints = hints_of(cls)
    for field in dataclasses.fields(cls):
        hint = hints[field.name]
        if dataclasses.is_dataclass(hint):
            yield from key_docs(hint, f"{prefix}{field.name}.")
        else:
            said = field.metadata.get("doc", "")
            yield KeyDoc(prefix + field.name, _words(hint), _default(field), said, tuple(marks(hint)), _is_text(hint))
            if is_group_of_groups(hint):
                yield from key_docs(get_args(hint)[1], f"{prefix}{field.name}.{NAME}.")


def is_group_of_groups(hint: Any) -> bool:
    """Whether it is a mapping from names of the user's to dataclasses."""
    return get_origin(hint) in (dict, Mapping) and dataclasses.is_dataclass(get_args(hint)[1])


def documented(key: str, known: Iterable[str]) -> str:
    """A key as it is documented: with ``NAME`` where the user chose a name."""
    for prefix in {name.partition(NAME)[0] for name in known if NAME in name}:
        if key.startswith(prefix):
            return f"{prefix}{NAME}.{key.removeprefix(prefix).partition('.')[2]}"
    return key


def closest(name: str, known: Iterable[str]) -> list[str]:
    """The names of ``known`` that ``name`` may have meant, at most three, the likeliest first."""
    names = list(known)
    section, _, last = name.rpartition(".")
    beside = {other.rpartition(".")[2]: other for other in names if other.rpartition(".")[0] == section}
    # With the section right, comparing whole names would call all its keys similar.
    similar = [beside[match] for match in difflib.get_close_matches(last, beside)] if beside else difflib.get_close_matches(name, names)
    same = [other for other in names if other.lower() == name.lower()]
    same_end = [other for other in names if other.endswith(f".{last}")]
    words = set(last.split("_"))
    longer = [other for other in (beside.values() if section else names) if words < set(other.rpartition(".")[2].split("_"))]
    return list(dict.fromkeys(same + same_end + longer + similar))[:3]


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """``Did you mean `a` or `b`?``; empty: nothing is close."""
    meant = " or ".join(f"`{match}`" for match in closest(name, known))
    return f"Did you mean {meant}?" if meant else ""


def unknown_key(key: str, known: Iterable[str]) -> ConfigError:
    """The error for a key that does not exist."""
    names = list(known)
    if meant := did_you_mean(key, names):
        return ConfigError(f"{key}: unknown key. {meant}")
    parent = key.rpartition(".")[0]
    beside = [name for name in names if name.startswith(f"{parent}.")] if parent else names
    if not beside or (not parent and len(names) > MOST_LISTED):
        groups = list(dict.fromkeys(name.partition(".")[0] for name in names))
        return ConfigError(f"{key}: unknown key. Known: {', '.join(groups) or 'none'}; --help lists all.")
    more = f" and {len(beside) - MOST_LISTED} more; --help lists all" if len(beside) > MOST_LISTED else ""
    return ConfigError(f"{key}: unknown key. Known: {', '.join(beside[:MOST_LISTED])}{more}.")


def from_mapping(cls: type[T], values: Mapping[Any, Any], prefix: str = "") -> T:
    """Builds a dataclass, whose fields all have defaults, from a mapping; ``prefix`` stands before keys in messages, e.g.
    ``reward.options.``.

    Raises:
        ConfigError: an unknown key, or a value that is not of its key's type or range.
    """
    hints = hints_of(cls)
    defaults = {field.name: _default(field) for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for name in values:
        if name not in defaults:
            raise unknown_key(f"{prefix}{name}", [prefix + known for known in defaults])
    checked = {name: _checked(hints[name], value, prefix + name, defaults[name]) for name, value in values.items()}
    for name, value in checked.items():
        _check_range(hints[name], value, prefix + name, defaults[name])
    return cls(**checked)


def to_plain(value: Any) -> Any:
    """A dataclass as nested dicts and lists, ready for yaml."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {name: to_plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(item) for item in value]
    return value


def show_value(value: Any) -> str:
    """A value as one would type it on the command line."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, (list, tuple)):
        return f"[{','.join(show_value(item) for item in value)}]"
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{name}:{show_value(item)}' for name, item in value.items())}}}"
    return str(value)


def _is_text(hint: Any) -> bool:
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _is_text(parts[0])
    if origin is Literal:
        return all(isinstance(part, str) for part in parts)
    if origin is not None:  # null stays null, and so does `...` of a tuple
        return all(_is_text(part) for part in parts if part not in (type(None), Ellipsis))
    return hint is str


def marks(hint: Any) -> Iterator[Any]:
    """Annotations of a type, and of its parts."""
    if get_origin(hint) is Annotated:
        yield from hint.__metadata__
    for part in get_args(hint):
        yield from marks(part)


def _check_range(hint: Any, value: Any, key: str, default: Any) -> None:
    """Every number in a value of this key; a type without a range of its own has that of 64 bits."""
    if isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            _check_range(hint, item, f"{key}[{index}]", None)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        ranges = [mark for mark in marks(hint) if isinstance(mark, Range)]
        for limits in ranges or [Range(-INT64 - 1, INT64) if isinstance(value, int) else Range()]:
            if violated := limits.violated(value):
                raise ConfigError(f"{key}={show_value(value)}: {violated}. Use e.g. {show_value(_example(limits, default))}.")


def _example(limits: Range, default: Any) -> Any:
    """A number that a message can offer."""
    if isinstance(default, (int, float)) and not limits.violated(default):
        return default
    return next(
        number for number in (1, 0, 2, limits.least, limits.most, limits.above / 2 + limits.below / 2) if not limits.violated(number)
    )


def _checked(hint: Any, value: Any, key: str, default: Any = None) -> Any:
    hint = _plain(hint)
    if isinstance(value, str) and _NO_TEXT.search(value):
        raise ConfigError(f"{key}={value!a}: must be text in UTF-8, without NUL. Rename what it names.")
    if value == MISSING_VALUE:
        raise ConfigError(f"{key}: has no value. Give one: {key}=<{_words(hint)}>.")
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        if not isinstance(value, Mapping):
            raise ConfigError(
                f"{key}={value}: is a group of keys. Set one of {', '.join(f'`{doc.name}`' for doc in key_docs(hint, f'{key}.'))}."
            )
        return from_mapping(hint, value, f"{key}.")
    if get_origin(hint) in (Union, types.UnionType):
        return _checked_union(hint, value, key, default)
    if not _fits(hint, value):
        raise ConfigError(f"{key}={_told(value)}: must be {_words(hint)}, not {_kind(value)}.{_fix(hint, key, value, default)}")
    if hint is float:
        try:
            return float(value)
        except OverflowError:  # of an integer
            return math.inf
    if get_origin(hint) in (tuple, list, Sequence):
        container = list if get_origin(hint) is list else tuple
        return container(_checked(get_args(hint)[0], item, f"{key}[{index}]") for index, item in enumerate(value))
    if get_origin(hint) in (dict, Mapping):
        return {name: _checked(get_args(hint)[1], item, f"{key}.{name}") for name, item in value.items()}
    return value


def _checked_union(hint: Any, value: Any, key: str, default: Any) -> Any:
    for member in get_args(hint):
        if dataclasses.is_dataclass(member) or _fits(member, value):
            return _checked(member, value, key, default)
    number = next((member for member in map(_plain, get_args(hint)) if member in (int, float)), None)
    raise ConfigError(f"{key}={_told(value)}: must be {_words(hint)}, not {_kind(value)}.{_fix(number, key, value, default)}")


def _plain(hint: Any) -> Any:
    return get_args(hint)[0] if get_origin(hint) is Annotated else hint


def _fits(hint: Any, value: Any) -> bool:
    if hint is Any:
        return True
    origin = get_origin(hint)
    if origin is Annotated:
        return _fits(get_args(hint)[0], value)
    if origin is Literal:
        return any(value == choice and type(value) is type(choice) for choice in get_args(hint))
    if origin in (tuple, list, Sequence):
        return isinstance(value, (list, tuple))
    if origin is not None:
        return isinstance(value, origin)
    if hint is None:
        return value is None
    if isinstance(value, bool) and hint is not bool:
        return False
    return isinstance(value, (int, float) if hint is float else hint)


def _words(hint: Any) -> str:
    origin = get_origin(hint)
    if origin is Annotated:
        return _words(get_args(hint)[0])
    if origin in (Union, types.UnionType):
        return " or ".join(_words(member) for member in get_args(hint))
    if origin is Literal:
        return (
            ", ".join(f"`{choice}`" for choice in get_args(hint)[:-1])
            + f"{' or ' if len(get_args(hint)) > 1 else ''}`{get_args(hint)[-1]}`"
        )
    if origin in (tuple, list, Sequence):
        return "a list"
    if origin is not None and issubclass(origin, Mapping):
        return "a mapping"
    return _TYPE_WORDS.get(hint, getattr(hint, "__name__", str(hint)))


def _kind(value: Any) -> str:
    if isinstance(value, str):
        return f"`{_told(value)}`"
    return _TYPE_WORDS.get(type(value)) or ("a list" if isinstance(value, (list, tuple)) else "a mapping")


def _told(value: Any) -> str:
    """A value as a message shows it, shortened if it is long."""
    shown = show_value(value)
    return shown if len(shown) <= MOST_SHOWN else f"{shown[:MOST_SHOWN]}..."


def _fix(hint: Any, key: str, value: Any, default: Any) -> str:
    """A hint what was rather meant: the number in a text, the quotation of what is no text, or a value that is right."""
    if hint in (int, float):
        pattern = r"-?[0-9]+" if hint is int else r"-?[0-9]*\.?[0-9]+(?:[eE][-+]?[0-9]+)?"
        if isinstance(value, str) and (found := re.search(pattern, value)):
            return f" Use one number, e.g. {found[0][:MOST_SHOWN]}."
        return f" Use e.g. {default}." if isinstance(default, (int, float)) else ""
    if get_origin(hint) is tuple and _plain(get_args(hint)[0]) is str and isinstance(value, str) and value:
        return f" Use {key}=[{_told(value)}]."
    is_typed = isinstance(value, (int, float, bool, list, Mapping))
    return f""" Quote it: '{key}="{show_value(value)}"'.""" if hint is str and is_typed and "[" not in key else ""


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
