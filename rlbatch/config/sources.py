"""Finds and reads the choices of config groups: yaml files of the package, and a folder with the user's clusters."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from rlbatch.api import ConfigError
from rlbatch.config.bounded_files import read_json, read_text
from rlbatch.config.yaml_files import CORRECT, read_yaml

CONFIG_PACKAGE = "rlbatch_configs"
ROOT = "config"
CLUSTER = "cluster"
_HEADER = re.compile(r"^#\s*@package\s+(\S+)\s*$", re.MULTILINE)
_GLOBAL = "_global_"


def group_files(cluster_dir: str = "") -> Mapping[str, Mapping[str, Path]]:
    """Config groups, and the file of each choice. Clusters in ``cluster_dir`` (empty: none) win over the package's of the same name.

    Raises:
        ConfigError: the package is not installed, or there is no such folder.
    """
    if not cluster_dir:
        return _shipped()
    folder = Path(cluster_dir).expanduser()
    try:
        own = _choices(folder)
    except OSError as error:
        raise ConfigError(f"cluster_dir={cluster_dir}: cannot be read ({error.strerror}). Name a folder of yaml files.") from None
    return {**_shipped(), CLUSTER: dict(sorted({**_shipped()[CLUSTER], **own}.items()))}


def published_config(model: str) -> Mapping[str, Any] | None:
    """The config.json of a model that layouts are shipped for (``model.name``), as published; None: another model."""
    found = [file for file in (_folder() / "model").glob("*.json") if file.stem == model]
    return read_json(found[0], CORRECT) if found else None


def choice_tree(group: str, name: str) -> Mapping[str, Any]:
    """What the file of a shipped choice says, ``defaults`` included."""
    return read_choice(group, _shipped()[group][name])[0]


def root_tree() -> Mapping[str, Any]:
    """The package's config that is composed, with the defaults of the groups."""
    return read_yaml(_folder() / f"{ROOT}.yaml")


def read_choice(group: str, file: Path) -> tuple[Mapping[str, Any], str | None]:
    """A choice's tree, and where it belongs: None: below its group, as in Hydra's files without a header.

    Raises:
        ConfigError: its file is not yaml, or says twice where it belongs.
    """
    header = _HEADER.search(read_text(file, CORRECT))
    package = header[1] if header else None
    tree = read_yaml(file, group if package is None else package.replace(_GLOBAL, ""))
    if package is None and group in tree:
        raise ConfigError(f"{file}:1: has a section `{group}`, so its keys are whole. Begin the file with the line `# @package {_GLOBAL}`.")
    return tree, package


@cache
def _shipped() -> Mapping[str, Mapping[str, Path]]:
    folders = sorted(folder for folder in _folder().iterdir() if folder.is_dir() and not folder.name.startswith("_"))
    return {folder.name: _choices(folder) for folder in folders}


def _folder() -> Path:
    try:
        return Path(str(resources.files(CONFIG_PACKAGE).joinpath("")))
    except ModuleNotFoundError as error:
        raise ConfigError("rlbatch_configs: not found, so rlbatch is not installed here. Run `pip install -e .` in its folder.") from error


def _choices(folder: Path) -> Mapping[str, Path]:
    return {file.stem: file for file in sorted(folder.iterdir()) if file.suffix == ".yaml" and not file.name.startswith(".")}
