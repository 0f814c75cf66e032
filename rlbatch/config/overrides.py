"""Reads the arguments of the command line: by Hydra's grammar, but text keys keep what was typed, as in a shell."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import yaml  # type: ignore[import-untyped]

from rlbatch.api import ConfigError
from rlbatch.config.check_cluster import check_variable
from rlbatch.config.check_correction import check_band
from rlbatch.config.choices import AUTO
from rlbatch.config.foreign_keys import answer
from rlbatch.config.schema import Config
from rlbatch.config.sources import CLUSTER
from rlbatch.config.structured import did_you_mean, key_docs, unknown_key
from rlbatch.config.text_keys import in_text_map, is_list, is_text, quoted

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override

PLUGIN_GROUPS = ("rollout", "reward", "offload")
"""Groups whose choices are plugins: any registered name is a choice, with or without a yaml file."""

_OF_ALGORITHMS = ("algorithm.advantage_options.", "algorithm.loss_options.", "sampling.filter_options.")
_OPTIONS = (
    *(f"{group}.options." for group in PLUGIN_GROUPS),
    *_OF_ALGORITHMS,
    "tracker_options.",
)
_SETS = ("data.sets.", "eval.sets.")
"""Groups of keys below any name."""
_ANY_KEY = ("cluster.environment.", "rollout.engine.", "train.allocator.", "data.template_options.", *_SETS, *_OPTIONS)
"""Mappings: what begins so is a key."""
_LITERAL = re.compile(
    r"""("(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*')|(?<![^\[{,:\s])([-+]?[0-9.][-+\w.]*|true|false|null|nan|inf)(?=\s*[,\]}])""", re.IGNORECASE
)
"""Parts of a list or mapping: a quoted text, or what Hydra would make a number, a truth value or null of."""


@dataclass
class Arguments:
    """What the arguments ask for.

    Attributes:
        choices: Config group -> name of its choice.
        lines: The other keys, for Hydra.
    """

    choices: dict[str, str] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)


def parse_arguments(texts: Sequence[str], groups: Mapping[str, Sequence[str]], text_options: Collection[str] = ()) -> Arguments:
    """Reads and checks arguments; values are checked later, by their key's type. ``text_options`` are plugins' options that hold text.

    Raises:
        ConfigError: not of the form key=value, an unknown key or choice.
    """
    found, keys = Arguments(), [doc.name for doc in key_docs(Config)]
    if foreign := [f"{text}: {said}" for text in texts if (said := _foreign(text, keys))]:
        raise ConfigError("\n".join(foreign))  # a whole script's at once
    for text in texts:
        name, equals, value = text.partition("=")
        key = name.strip().lstrip("+")
        if equals and key in groups:
            found.choices[key] = _choice(key, value, groups[key])
        elif equals and (is_text(key) or _is_any_of(key, text_options)) and not name.startswith("~"):
            found.lines.append(_text_line(key, value))
        elif equals and key.startswith((*_SETS, *_OPTIONS)) and not _is_value(text):
            found.lines.append(f"++{key}={quoted(value.strip())}")  # what no grammar knows can only be text
        else:
            found.lines.append(_line(text, keys, groups))
    return found


def _foreign(text: str, keys: Sequence[str]) -> str:
    """A hint about a key that is another program's; empty if it is not."""
    typed = text.partition("=")[0].strip().lstrip("+~")
    return answer(typed) if typed not in keys else ""


def text_value(texts: Sequence[str], key: str) -> str:
    """What the arguments say of one text key; the last counts. Empty: nothing."""
    values = [text.partition("=")[2] for text in texts if text.partition("=")[0].lstrip("+") == key]
    return _typed(key, values[-1]) if values else ""


def _parse(text: str) -> Override:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        return OverridesParser.create().parse_override(text)
    except (HydraException, ValueError, RecursionError) as error:  # a number of thousands of digits
        raise ConfigError(f"`{text}`: not of the form key=value. {_how_to_write(text)}") from error


def _is_any_of(key: str, options: Collection[str]) -> bool:
    return key in options or any(key.startswith(f"{option}.") for option in options)


def _how_to_write(text: str) -> str:
    """A hint how to write as a key and its value what was typed as an option, a file or a word."""
    typed, equals, _ = text.partition("=")
    key = typed.strip("-").replace("-", "_")
    if text.endswith(".py") and not equals:
        return f"Python files are given as plugins=[{text}]."
    if equals and not typed.startswith("-"):
        return "Quote values with special characters: 'key=\"value\"'."
    return (
        f"Write {key}=<value>." if key in {doc.name for doc in key_docs(Config)} else "Keys have no dashes before them; --help lists them."
    )


def _is_value(text: str) -> bool:
    with suppress(ConfigError):
        return not _parse(text).is_sweep_override()
    return False


def _text_line(key: str, value: str) -> str:
    if in_text_map(key):
        check_variable(key)
    if value.strip().lower() == "null" and not in_text_map(key):
        return f"++{key}=null"
    if value.lstrip()[:1] in ("[", "{"):
        with suppress(ConfigError):
            line = f"{key}={_LITERAL.sub(lambda found: found[1] or quoted(found[2]), value)}"
            _parse(line)
            return f"++{line}"
        if is_list(key):
            return f"++{key}=[{','.join(quoted(item) for item in _yaml_list(key, value))}]"
    return f"++{key}={quoted(_typed(key, value))}"


def _yaml_list(key: str, value: str) -> list[str]:
    """Reads the items of a list that Hydra's grammar does not know, e.g. because of a `=` in it."""
    with suppress(yaml.YAMLError):
        items = yaml.load(value, yaml.BaseLoader)
        if isinstance(items, list) and all(isinstance(item, str) for item in items):
            return items
    raise ConfigError(f"{key}={value}: is no list. Quote values with special characters: '{key}=[\"value\"]'.")


def _typed(key: str, value: str) -> str:
    """The text of a value that is no list: without quotes around it and backslashes in it, if the grammar knows these; else as it is."""
    value = value.strip()
    is_quoted = value[:1] in ("'", '"')
    if is_quoted or "\\" in value:
        with nullcontext() if is_quoted else suppress(ConfigError):
            parsed = _parse(f"{key}={value}")
            return value if parsed.is_sweep_override() else str(parsed.value())
    return value


def _line(text: str, keys: Sequence[str], groups: Mapping[str, Sequence[str]]) -> str:
    """Writes an override of a key that is not text as Hydra reads it."""
    typed, _, value = text.partition("=")
    if (name := typed.strip().lstrip("+")) in keys or name.startswith(_OF_ALGORITHMS):
        check_band(name, value)
    override = _parse(text)
    if override.is_sweep_override():
        raise ConfigError(f"{text}: has several values. Give one; a list is written [a,b].")
    if override.is_delete():
        raise ConfigError(f"{text}: keys cannot be removed. Set the value that you want instead.")
    key = override.key_or_group
    if override.package is not None or not (key in keys or key.startswith(_ANY_KEY)):
        sections = {name.partition(".")[0] for name in keys if "." in name}
        if key in sections:
            raise ConfigError(
                f"{text}: `{key}` is a group of keys. Set one of {', '.join(name for name in keys if name.startswith(f'{key}.'))}."
            )
        raise unknown_key(key, [*keys, *groups])
    # An options key may be absent from the composed tree: force-add it, it is checked against the plugin's options later.
    return "++" + text.lstrip("+")


def _choice(group: str, value: str, with_file: Sequence[str]) -> str:
    name = _typed(group, value)
    if name in with_file or (group, name) == ("layout", AUTO):
        return name
    if not name or name[0] in "[{":
        raise ConfigError(f"{group}={value}: must be one name. Choose {' or '.join(with_file)}.")
    if group not in PLUGIN_GROUPS:
        known = f"{did_you_mean(name, with_file)} Known: {', '.join(with_file)}.".lstrip()
        own = " Files of your own are found with cluster_dir=<folder>." if group == CLUSTER else ""
        raise ConfigError(f"{group}={name}: unknown. {known}{own}")
    return name
