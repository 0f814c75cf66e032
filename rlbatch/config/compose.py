"""From command-line overrides to a checked ``Config`` (Hydra), and from a run folder's config.yaml back to it (no Hydra).

Only the login node composes; ranks read the resolved config.yaml.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from rlbatch.api import ConfigError
from rlbatch.config.check import check_config
from rlbatch.config.choices import AUTO, CONFIG_PACKAGE, complete_choices, group_choices
from rlbatch.config.convert import closest, from_mapping, key_docs, to_plain, unknown_key
from rlbatch.config.schema import Config

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override

PLUGIN_GROUPS = ("rollout", "reward", "offload")
"""Groups whose choices are plugins: any registered name is a choice, with or without a yaml file."""

_ANY_KEY = ("cluster.environment.", "rollout.engine.", "train.allocator.", *(f"{group}.options." for group in PLUGIN_GROUPS))
"""Mappings: what begins so is a key."""


def compose(overrides: Sequence[str]) -> Config:
    """Composes ``configs/`` with overrides such as ``train.steps=20``, ``reward=sequence`` or ``plugins=[my_reward.py]``.

    Plugin names and their options are checked by the registry, which needs this config's ``plugins`` first.

    Raises:
        ConfigError: an override that does not parse, an unknown key or choice, a value that cannot be right.
    """
    from hydra import compose as hydra_compose
    from hydra import initialize_config_module
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    def tree(lines: Sequence[str]) -> Mapping[str, Any]:
        try:
            with initialize_config_module(CONFIG_PACKAGE, version_base="1.3"):
                return cast(Mapping[str, Any], OmegaConf.to_container(hydra_compose("config", overrides=list(lines)), resolve=True))
        except (HydraException, OmegaConfBaseException) as error:
            raise ConfigError(f"overrides {' '.join(overrides)}: {error}") from error

    return _config(tree(complete_choices(*_checked_overrides(overrides), tree)))


def load_config(path: Path | str) -> Config:
    """Reads a resolved config.yaml.

    Raises:
        ConfigError: the file cannot be read, or as ``compose``.
    """
    from omegaconf import OmegaConf
    from yaml import YAMLError  # type: ignore[import-untyped]

    try:
        tree = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read ({error.strerror}). Start runs with `python -m rlbatch.submit`, which writes it."
        ) from error
    except YAMLError as error:
        raise ConfigError(f"{path}: not yaml ({' '.join(str(error).split())}). Correct it.") from error
    return _config(tree)


def save_config(config: Config, path: Path | str) -> None:
    """Writes every key and value; ``load_config`` reads back an equal config."""
    from omegaconf import OmegaConf

    Path(path).write_text(OmegaConf.to_yaml(OmegaConf.create(to_plain(config))), encoding="utf-8")


def _config(tree: Any) -> Config:
    if not isinstance(tree, Mapping):
        raise ConfigError("config.yaml: must be a mapping of keys to values.")
    config = from_mapping(Config, tree)
    check_config(config)
    return config


def _checked_overrides(overrides: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Choices of groups, and the lines of the other keys."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    parser = OverridesParser.create()
    choices, lines = {}, []
    for text in overrides:
        try:
            override = parser.parse_override(text)
        except HydraException as error:
            raise ConfigError(f"`{text}`: not of the form key=value. Quote values with special characters: 'key=\"value\"'.") from error
        if override.is_sweep_override():
            raise ConfigError(f"{text}: has several values. Give one; a list is written [a,b].")
        if override.is_delete():
            raise ConfigError(f"{text}: keys cannot be removed. Set the value that you want instead.")
        key, groups = override.key_or_group, group_choices()
        if key in groups and override.package is None:
            _check_choice(key, override.value(), groups[key])
            choices[key] = str(override.value())
        else:
            lines.append(_checked_override(override, groups))
    return choices, lines


def _checked_override(override: Override, groups: Mapping[str, Sequence[str]]) -> str:
    text, key = str(override.input_line), override.key_or_group
    keys = [doc.name for doc in key_docs(Config)]
    if override.package is not None or not (key in keys or key.startswith(_ANY_KEY)):
        sections = {name.partition(".")[0] for name in keys if "." in name}
        if key in sections:
            raise ConfigError(
                f"{text}: `{key}` is a group of keys. Set one of {', '.join(name for name in keys if name.startswith(f'{key}.'))}."
            )
        raise unknown_key(key, [*keys, *groups])
    # An options key may be absent from the composed tree: force-add it, it is checked against the plugin's options later.
    return "++" + text.lstrip("+")


def _check_choice(group: str, choice: Any, with_file: Sequence[str]) -> None:
    if choice in with_file or (group, choice) == ("layout", AUTO):
        return
    if not isinstance(choice, str) or not choice:
        raise ConfigError(f"{group}={choice}: must be one name. Choose {' or '.join(with_file)}.")
    if group not in PLUGIN_GROUPS:
        meant = " or ".join(f"`{name}`" for name in closest(choice, with_file))
        raise ConfigError(f"{group}={choice}: unknown. {f'Did you mean {meant}? ' if meant else ''}Known: {', '.join(with_file)}.")
    from hydra.core.config_store import ConfigStore

    ConfigStore.instance().store(group=group, name=choice, node={"name": choice}, provider="rlbatch")
