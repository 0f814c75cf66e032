"""The training prompts of a job, however many: rows are read and tokenised when a step takes them.

The first rank makes an index of the files in the run folder (``datasets.stored``), looks at as many rows as a few seconds allow, and
tells the others where it is.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from rlbatch.api import ModelFamily, Prompt
from rlbatch.checkpoint.identity import prompts_identity
from rlbatch.config.schema import Config
from rlbatch.datasets.records import read_records
from rlbatch.datasets.stored import StoredFile, StoredRows, store_files
from rlbatch.first_rank import on_first_rank
from rlbatch.prompts.prompt_check import RowChecks
from rlbatch.prompts.prompt_file import Curriculum, top_columns
from rlbatch.prompts.prompt_order import PromptOrder, SetOrder
from rlbatch.prompts.prompt_sets import PromptSet, training_sets
from rlbatch.prompts.tokenizing import BATCH_ROWS, LongPrompts, make_prompt, prompt_limit, tokenize_rows
from rlbatch.registry import Registry

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FOLDER = "data"
"""Subfolder of the run folder for the prompt files' indexes, and for copies of compressed ones."""
CHECK_S = 10.0
"""Seconds for which the first rank looks at rows before the first step."""
KEPT_TOKENS = 2**21
"""Tokens of prompts that stay in memory, about 80 MB."""
IDENTITY_ROWS = 4096
"""Most rows that are compared with another run's one by one; of larger data the files are compared, and some rows."""
SHOWN_ROWS = 64


@dataclass
class OpenSet:
    """A set whose rows can be read.

    Attributes:
        one: What it is.
        files: Its files.
        first: Position of its first row among those of all sets.
    """

    one: PromptSet
    files: Sequence[StoredRows]
    first: int

    def __post_init__(self) -> None:
        self.ends = np.cumsum([len(rows) for rows in self.files])
        self.reader = self.one.reader()
        self.reader.row(self.files[0].path, *self.files[0].fields(0))  # the first row decides what the columns are

    def __len__(self) -> int:
        return int(self.ends[-1])

    def row(self, position: int) -> Any:
        """A row, by its position among the rows of all sets."""
        number = position - self.first
        index = int(np.searchsorted(self.ends, number, side="right"))
        rows = self.files[index]
        return self.reader.row(rows.path, *rows.fields(number - int(self.ends[index]) + len(rows)))


class Prompts(Sequence[Prompt]):
    """All prompts of all sets, by their positions, which are their ids; ``announce`` is told of those that are left out."""

    def __init__(
        self,
        sets: Sequence[OpenSet],
        config: Config,
        family: ModelFamily,
        tokenizer: PreTrainedTokenizerBase,
        registry: Registry,
        announce: Callable[[str], object],
    ) -> None:
        self.sets = sets
        self._tokenizer, self._vocab_size, self._announce = tokenizer, family.vocab_size, announce
        self._checks = RowChecks(config, registry)
        self._limits = [prompt_limit(one.one.data, family.max_sequence_length, config.rollout.max_response_tokens) for one in sets]
        self.long = [LongPrompts(limit, one.one.data) for limit, one in zip(self._limits, sets, strict=True)]
        self._known: OrderedDict[int, Prompt] = OrderedDict()
        self._tokens = 0
        self._is_counted = np.zeros(len(self), np.bool_)

    def __len__(self) -> int:
        return sum(len(one) for one in self.sets)

    @overload
    def __getitem__(self, position: int) -> Prompt: ...
    @overload
    def __getitem__(self, position: slice) -> list[Prompt]: ...
    def __getitem__(self, position: int | slice) -> Prompt | list[Prompt]:
        """A prompt, also one that is too long to be trained on.

        Raises:
            DataError: see ``RowReader.row``, ``RowChecks.check`` and ``tokenize_rows``.
        """
        if isinstance(position, slice):
            return [self[number] for number in range(*position.indices(len(self)))]
        if not 0 <= position < len(self):
            raise IndexError(position)
        return self.load([position])[0]

    def load(self, positions: Sequence[int]) -> list[Prompt]:
        """Several prompts; those that are not in memory are tokenised together."""
        missing = [position for position in dict.fromkeys(positions) if position not in self._known]
        made: dict[int, Prompt] = {}
        for number, one in enumerate(self.sets):
            own = [position for position in missing if one.first <= position < one.first + len(one)]
            rows = [one.row(position) for position in own]
            for row in rows:
                self._checks.check(row, one.one)
            tokenized = tokenize_rows(rows, self._tokenizer, one.one.data, self._vocab_size) if rows else []
            for position, row, tokens in zip(own, rows, tokenized, strict=True):
                made[position] = make_prompt(position, row, tokens)
                if not self._is_counted[position]:
                    self._is_counted[position] = True
                    self.long[number].add(row, len(tokens[1]))
        found = [made.get(position) or self._known[position] for position in positions]
        for prompt in found:
            self._keep(prompt)
        return found

    def usable(self, positions: Sequence[int]) -> list[bool]:
        """Whether each prompt is short enough; with ``data.too_long=refuse`` one that is not raises DataError."""
        before = [one.count for one in self.long]
        prompts = self.load(positions)
        for long, count in zip(self.long, before, strict=True):
            if len(str(long.count)) > len(str(count)) or (long.count and not count):  # the first, tenth, hundredth, ...
                self._announce(long.told(are_all=False))
            elif long.count > count:
                long.told(are_all=False)
        return [len(prompt.token_ids) <= self._limits[self._set_of(prompt.prompt_id)][0] for prompt in prompts]

    def look_at(self, seconds: float) -> str:
        """Loads rows in file order, as many as the time allows, and returns what is told of those that are too long.

        Raises:
            DataError: a row that cannot be used; too long ones, if they are refused.
        """
        started = time.monotonic()
        for start in range(0, len(self), BATCH_ROWS):
            self.load(range(start, min(start + BATCH_ROWS, len(self))))
            if time.monotonic() - started > seconds:
                break
        return " ".join(filter(None, (long.told() for long in self.long)))

    def identity(self) -> Mapping[str, Any]:
        """Values that tell these prompts from another run's."""
        if len(self) <= IDENTITY_ROWS:
            return prompts_identity(self)
        shown = [self[one.first : one.first + SHOWN_ROWS] for one in self.sets]
        rows = [[prompt.text, prompt.label, prompt.reward_name] for prompts in shown for prompt in prompts]
        digests = [[rows_.digest for rows_ in one.files] for one in self.sets]
        content = json.dumps([digests, rows], sort_keys=True, default=str)
        return {"prompts": len(self), "files_sha256": hashlib.sha256(content.encode()).hexdigest()}

    def _set_of(self, position: int) -> int:
        return next(number for number, one in enumerate(self.sets) if position < one.first + len(one))

    def _keep(self, prompt: Prompt) -> None:
        if prompt.prompt_id in self._known:
            self._known.move_to_end(prompt.prompt_id)
            return
        self._known[prompt.prompt_id] = prompt
        self._tokens += len(prompt.token_ids)
        while self._tokens > KEPT_TOKENS and len(self._known) > 1:
            self._tokens -= len(self._known.popitem(last=False)[1].token_ids)


@dataclass(frozen=True)
class Training:
    """The prompts that a job trains on.

    Attributes:
        prompts: All prompts of the training sets.
        order: The order in which they are drawn.
        identity: Tells the prompts from another run's.
        rewards: Names of rewards that rows or sets name.
    """

    prompts: Prompts
    order: PromptOrder
    identity: Mapping[str, Any]
    rewards: Sequence[str]


def open_training(
    config: Config,
    run_dir: Path,
    family: ModelFamily,
    tokenizer: PreTrainedTokenizerBase,
    registry: Registry,
    announce: Callable[[str], object],
) -> Training:
    """The prompts of a job; a collective. ``announce`` is told of those that are left out.

    Raises:
        DataError: what is wrong with files or rows, as far as it is seen before the first step.
        ConfigError: limits that leave no room for a prompt.
    """
    sets = training_sets(config, run_dir)

    def opened(stored: Iterable[Iterable[Mapping[str, Any]]]) -> Prompts:
        made: list[OpenSet] = []
        for one, files in zip(sets, stored, strict=True):
            rows = [StoredRows(StoredFile(**file)) for file in files]
            made.append(OpenSet(one, rows, sum(len(other) for other in made)))
        return Prompts(made, config, family, tokenizer, registry, announce)

    def prepare() -> dict[str, Any]:
        folder = run_dir / FOLDER
        files = [store_files(one.paths, folder, one.data.reward_key, one.reader().wanted) for one in sets]
        names = _reward_names(config, registry, sets, files)
        values = [_save_values(one, folder / f"curriculum_{one.name or 'train'}.npy") for one in sets]
        stored = [[asdict(file) for file in own] for own in files]
        prompts = opened(stored)
        told = prompts.look_at(CHECK_S)
        return {"files": stored, "values": values, "names": names, "told": told, "identity": dict(prompts.identity())}

    ready = on_first_rank(prepare)
    if ready["told"]:
        announce(ready["told"])
    prompts = opened(ready["files"])
    orders = [
        SetOrder(len(one), f"{config.seed} {one.one.name}".strip(), np.load(values) if values else None, one.first)
        for one, values in zip(prompts.sets, ready["values"], strict=True)
    ]
    weights = [one.one.weight or float(len(one)) for one in prompts.sets]
    return Training(prompts, PromptOrder(orders, weights, prompts.usable), ready["identity"], ready["names"])


def _reward_names(config: Config, registry: Registry, sets: Sequence[PromptSet], files: Sequence[Sequence[StoredFile]]) -> list[str]:
    """Rewards that rows or sets name; what looks like the name of an unknown one is looked at."""
    names: set[str] = set()
    for one, own in zip(sets, files, strict=True):
        found = {name for file in own for name in file.names} | ({one.reward} if one.reward else set())
        if found - set(registry.rewards):
            checks = RowChecks(config, registry)
            for row in one.reader().read(one.paths):
                checks.check(row, one)
        names |= found & set(registry.rewards)
    return sorted(names)


def _save_values(one: PromptSet, path: Path) -> str:
    """Writes what a set is ordered by, values of one type in every row; empty: it is shuffled."""
    column = one.data.curriculum
    if not column:
        return ""
    curriculum, values = Curriculum(column), list[Any]()
    for source in one.paths:
        for line, fields in read_records(source, top_columns([column])):
            values.append(curriculum.value(f"{source}:{line}", fields))
    array = np.unique(np.array(values), return_inverse=True)[1] if isinstance(values[0], str) else np.array(values, np.float64)
    with path.open("wb") as file:
        np.save(file, array)
    return str(path)
