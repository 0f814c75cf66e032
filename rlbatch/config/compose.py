"""Turns command-line overrides into a checked ``Config`` (Hydra), and reads one back from a run folder's config.yaml (no Hydra).

Only the login node composes; ranks read the resolved config.yaml.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from rlbatch.api import ConfigError
from rlbatch.config.calibration import with_calibration
from rlbatch.config.check import check_config
from rlbatch.config.choices import complete_choices
from rlbatch.config.data_files import with_files, with_set_files
from rlbatch.config.evaluation import without_training
from rlbatch.config.overrides import PLUGIN_GROUPS, parse_arguments, text_value
from rlbatch.config.paths import with_absolute_paths
from rlbatch.config.schema import Config
from rlbatch.config.sources import ROOT, group_files
from rlbatch.config.structured import from_mapping, to_plain
from rlbatch.config.yaml_files import read_yaml, write_yaml

CONFIG_FILE = "config.yaml"
"""The resolved config, in the run folder."""


def compose(overrides: Sequence[str], text_options: Collection[str] = ()) -> Config:
    """Composes ``configs/`` with overrides such as ``train.steps=20``, ``reward=sequence`` or ``plugins=[my_reward.py]``.

    Plugin names and their options are checked by the registry, which needs this config's ``plugins`` first.

    Raises:
        ConfigError: an override that does not parse, an unknown key or choice, a value that cannot be right.
    """
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    from rlbatch.config.hydra_files import give_to_hydra

    def tree(lines: Sequence[str]) -> Mapping[str, Any]:
        try:
            # A folder without yaml: `initialize` would look through the stack for one, which takes a fifth of a composition.
            with initialize_config_dir(str(Path(__file__).parent), version_base="1.3"):
                return cast(Mapping[str, Any], OmegaConf.to_container(hydra_compose(ROOT, overrides=list(lines)), resolve=True))
        except (HydraException, OmegaConfBaseException, ValueError) as error:  # a ValueError: of a defaults list
            raise ConfigError(f"overrides {' '.join(overrides)}: {error}") from error

    files = group_files(text_value(overrides, "cluster_dir"))
    asked = parse_arguments(overrides, {group: list(names) for group, names in files.items()}, text_options)
    plugins = {group: name for group, name in asked.choices.items() if group in PLUGIN_GROUPS and name not in files[group]}
    give_to_hydra(files, plugins)
    composed = tree(complete_choices(asked.choices, asked.lines, tree))
    config = with_absolute_paths(from_mapping(Config, composed))
    config = with_calibration(config, composed.get("plan", {}).get("assume", {}))
    if config.mode == "eval":
        config = without_training(config)
    check_config(config)
    return dataclasses.replace(config, data=with_files(config.data), eval=with_set_files(config.eval))


def load_config(path: Path | str) -> Config:
    """Reads a resolved config.yaml.

    Raises:
        ConfigError: as ``compose``.
        DataError: the file cannot be read.
    """
    config = from_mapping(Config, read_yaml(Path(path), fix="Start runs with `python -m rlbatch.submit`, which writes it."))
    check_config(config)
    return config


def save_config(config: Config, path: Path | str) -> None:
    """Writes every key and value; ``load_config`` reads back an equal config."""
    draft = Path(f"{path}.part")
    draft.unlink(missing_ok=True)
    draft.write_text(write_yaml(to_plain(config)), encoding="utf-8")
    draft.replace(path)  # a link there is replaced, not followed
