"""From command-line overrides to a checked ``Config`` (Hydra), and from a run folder's config.yaml back to it (no Hydra).

Only the login node composes; ranks read the resolved config.yaml.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlbatch.api import ConfigError
from rlbatch.config.check import check_config
from rlbatch.config.convert import closest, from_mapping, key_docs, to_plain, unknown_key
from rlbatch.config.schema import Config

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override

CONFIG_PACKAGE = "rlbatch_configs"
PLUGIN_GROUPS = ("rollout", "reward", "offload")
"""Groups whose choices are plugins: any registered name is a choice, with or without a yaml file."""

_HAS_OPTIONS = tuple(f"{group}.options." for group in PLUGIN_GROUPS)


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

    lines = _checked_overrides(overrides)
    try:
        with initialize_config_module(CONFIG_PACKAGE, version_base="1.3"):
            tree = OmegaConf.to_container(hydra_compose("config", overrides=lines), resolve=True)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(f"overrides {' '.join(overrides)}: {error}") from error
    return _config(tree)


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


def group_choices() -> Mapping[str, tuple[str, ...]]:
    """Config groups and the choices that have a yaml file.

    Raises:
        ConfigError: the package is not installed.
    """
    try:
        root = resources.files(CONFIG_PACKAGE)
    except ModuleNotFoundError as error:
        raise ConfigError("rlbatch_configs: not found, so rlbatch is not installed here. Run `pip install -e .` in its folder.") from error
    groups = {folder.name: folder for folder in root.iterdir() if folder.is_dir() and not folder.name.startswith("_")}
    return {
        name: tuple(sorted(file.name.removesuffix(".yaml") for file in groups[name].iterdir() if file.name.endswith(".yaml")))
        for name in sorted(groups)
    }


def choice_values(group: str, name: str) -> Mapping[str, Any]:
    """What a choice's yaml file sets: keys as written below its package, dotted -> value."""
    from yaml import safe_load

    def flat(tree: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
        for key, value in tree.items():
            if isinstance(value, Mapping):
                yield from flat(value, f"{prefix}{key}.")
            else:
                yield prefix + key, value

    text = resources.files(CONFIG_PACKAGE).joinpath(group).joinpath(f"{name}.yaml").read_text(encoding="utf-8")
    return dict(flat(safe_load(text), ""))


def _config(tree: Any) -> Config:
    if not isinstance(tree, Mapping):
        raise ConfigError("config.yaml: must be a mapping of keys to values.")
    config = from_mapping(Config, tree)
    check_config(config)
    return config


def _checked_overrides(overrides: Sequence[str]) -> list[str]:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    parser = OverridesParser.create()
    lines = []
    for text in overrides:
        try:
            override = parser.parse_override(text)
        except HydraException as error:
            raise ConfigError(f"`{text}`: not of the form key=value. Quote values with special characters: 'key=\"value\"'.") from error
        if override.is_sweep_override():
            raise ConfigError(f"{text}: has several values. Give one; a list is written [a,b].")
        if override.is_delete():
            raise ConfigError(f"{text}: keys cannot be removed. Set the value that you want instead.")
        lines.append(_checked_override(override))
    return lines


def _checked_override(override: Override) -> str:
    text, key, groups = str(override.input_line), override.key_or_group, group_choices()
    if key in groups and override.package is None:
        _check_choice(key, override.value(), groups[key])
        return text
    keys = [doc.name for doc in key_docs(Config)]
    if override.package is not None or not (key in keys or key.startswith(_HAS_OPTIONS)):
        sections = {name.partition(".")[0] for name in keys if "." in name}
        if key in sections:
            raise ConfigError(
                f"{text}: `{key}` is a group of keys. Set one of {', '.join(name for name in keys if name.startswith(f'{key}.'))}."
            )
        raise unknown_key(key, [*keys, *groups])
    # An options key may be absent from the composed tree: force-add it, it is checked against the plugin's options later.
    return "++" + text.lstrip("+")


def _check_choice(group: str, choice: Any, with_file: Sequence[str]) -> None:
    if choice in with_file:
        return
    if not isinstance(choice, str) or not choice:
        raise ConfigError(f"{group}={choice}: must be one name. Choose {' or '.join(with_file)}.")
    if group not in PLUGIN_GROUPS:
        meant = " or ".join(f"`{name}`" for name in closest(choice, with_file))
        raise ConfigError(f"{group}={choice}: unknown. {f'Did you mean {meant}? ' if meant else ''}Known: {', '.join(with_file)}.")
    from hydra.core.config_store import ConfigStore

    ConfigStore.instance().store(group=group, name=choice, node={"name": choice}, provider="rlbatch")
