"""Which data sets a job trains on and is evaluated on, and how each is read. Imports no torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlbatch.config.data_files import paths_in
from rlbatch.config.evaluation import eval_sets, key_of, limit_key
from rlbatch.config.keys import EMBEDDED
from rlbatch.config.schema import Config, DataConfig, DataSetConfig, RewardConfig, RowsConfig
from rlbatch.prompts.prompt_file import RowReader


@dataclass(frozen=True)
class PromptSet:
    """One data set.

    Attributes:
        key: Config key of its path, for messages.
        name: Name of one of several sets; empty: it is the only one.
        source: Value of the key.
        paths: Its files.
        data: ``data.*`` as it is for this set.
        reward: Reward of its rows that name none; empty: the job's.
        weight: Share of the prompts; None: its number of rows.
        most: Rows that are taken, from the top; 0: all.
        limit_key: Config key of the longest response.
    """

    key: str
    name: str
    source: str | tuple[str, ...]
    paths: Sequence[Path]
    data: DataConfig
    reward: str = ""
    weight: float | None = None
    most: int = 0
    limit_key: str = "rollout.max_response_tokens"

    @property
    def keys(self) -> str:
        """Beginning of the keys that name the set's columns: ``data``, or that of the set's own keys."""
        return self.key.rpartition(".")[0]

    def reader(self) -> RowReader:
        """A reader of the set's rows."""
        return RowReader(self.data, self.reward, self.keys)

    @property
    def told(self) -> str:
        """The set's files in words, for messages."""
        return str(self.paths[0]) + (f" and {len(self.paths) - 1} more files" if len(self.paths) > 1 else "")


def training_sets(config: Config, run_dir: Path) -> list[PromptSet]:
    """The sets of ``data.sets``, else the only one: ``data.train``."""
    data = config.data
    if data.sets:
        return [_named_set(data, name, one, run_dir) for name, one in data.sets.items()]
    return [PromptSet("data.train", "", data.train, files_of(data.train, run_dir, "train"), data)]


def held_out_sets(config: Config, run_dir: Path) -> Iterator[tuple[PromptSet, Config]]:
    """Each evaluation set, with the config whose reward and longest response are the set's."""
    data = dataclasses.replace(config.data, curriculum="")
    for name, each in eval_sets(config).items():
        reward = RewardConfig(each.reward, options=each.reward_options) if each.reward else config.reward
        rollout = dataclasses.replace(config.rollout, max_response_tokens=each.max_response_tokens or 0)
        paths = files_of(each.file, run_dir, "eval")
        own = _with_own(data, each)
        one = PromptSet(key_of(name, "file"), "", each.file, paths, own, most=each.prompts, limit_key=limit_key(config, name))
        yield one, dataclasses.replace(config, reward=reward, rollout=rollout)


def files_of(source: str | tuple[str, ...], run_dir: Path, name: str) -> list[Path]:
    """Files of a key; those of the embedded task are in the run folder."""
    return [run_dir / EMBEDDED / f"{name}.jsonl"] if source == EMBEDDED else paths_in(source)


def _named_set(data: DataConfig, name: str, one: DataSetConfig, run_dir: Path) -> PromptSet:
    files = files_of(one.path, run_dir, "train")
    return PromptSet(f"data.sets.{name}.path", name, one.path, files, _with_own(data, one), one.reward, one.weight)


def _with_own(data: DataConfig, one: RowsConfig) -> DataConfig:
    """``data.*`` with a set's own values in the place of those of all sets."""
    own = {field.name: getattr(one, field.name) for field in dataclasses.fields(RowsConfig)}
    return dataclasses.replace(data, **{key: value for key, value in own.items() if value is not None})
