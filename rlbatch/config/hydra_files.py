"""Gives Hydra the choices of config groups, each read when it is asked for. Imports Hydra, which takes a while."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf

from rlbatch.config.sources import CONFIG_PACKAGE, ROOT, read_choice, root_tree

SCHEME = "rlbatch"
_UNUSED = ("output", "launcher", "sweeper", "help", "hydra_help", "hydra_logging", "job_logging", "env")
"""Hydra's own groups, for programs that it runs: a composition is the same without, and takes two thirds of the time."""


class ConfigFiles(ConfigSource):
    """The root config, and the files of all groups.

    Attributes:
        files: Groups, and the file of each choice.
        plugins: Groups, and a plugin of each that has no file.
    """

    files: ClassVar[Mapping[str, Mapping[str, Path]]] = {}
    plugins: ClassVar[Mapping[str, str]] = {}

    @staticmethod
    def scheme() -> str:
        """The scheme by which Hydra's search path names this source."""
        return SCHEME

    def load_config(self, config_path: str) -> ConfigResult:
        """Reads a choice; raises ConfigError if it is not yaml."""
        group, name = _parts(config_path)
        tree: Mapping[str, Any]
        if not group:
            root = root_tree()
            tree, package = {**root, "defaults": [*root["defaults"], *({f"override hydra/{name}": None} for name in _UNUSED)]}, None
        elif name in self.files[group]:
            tree, package = read_choice(group, self.files[group][name])
        else:
            tree, package = {"name": name}, None
        return ConfigResult(CONFIG_PACKAGE, self.full_path(), OmegaConf.create(dict(tree)), {"package": package})

    def is_group(self, config_path: str) -> bool:
        """Whether a path is a config group."""
        return config_path.rstrip("/") in ("", *self.files)

    def is_config(self, config_path: str) -> bool:
        """Whether a path is a choice of a group, or the root config."""
        group, name = _parts(config_path)
        return name in self.files.get(group, {}) or (group in self.plugins and self.plugins[group] == name) or (group, name) == ("", ROOT)

    def available(self) -> bool:
        """Always True: there is no folder that could be missing."""
        return True

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        """The choices of a group, or the groups."""
        found = {"": self.files, **self.files}.get(config_path.rstrip("/"), {})
        return sorted(name for name in found if results_filter != (ObjectType.CONFIG if found is self.files else ObjectType.GROUP))


class _Path(SearchPathPlugin):
    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        search_path.append(CONFIG_PACKAGE, f"{SCHEME}://files")


def give_to_hydra(files: Mapping[str, Mapping[str, Path]], plugins: Mapping[str, str]) -> None:
    """Sets what Hydra's next composition may choose from; see ``ConfigFiles``."""
    for each in (ConfigFiles, _Path):
        Plugins.instance().register(each)
    ConfigFiles.files, ConfigFiles.plugins = files, plugins


def _parts(config_path: str) -> tuple[str, str]:
    """A path's config group and name."""
    group, _, name = config_path.rstrip("/").rpartition("/")
    return group, name.removesuffix(".yaml")
