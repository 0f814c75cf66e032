"""Finds what is wrong with prompt files, as far as it shows before ranks start.

Imports no torch, unless a prompt is about as long as is allowed, or no class of transformers reads the tokenizer without it.
"""

from __future__ import annotations

import heapq
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlbatch import reward_parts
from rlbatch.api import ConfigError, DataError, ModelFamily
from rlbatch.config.bounded_files import LARGE_BYTES, read_json
from rlbatch.config.hf_config import read_config
from rlbatch.config.schema import Config
from rlbatch.datasets.jsonl import json_type
from rlbatch.prompts.model_folder import TOKENIZER, TOKENIZER_CONFIG, end_tokens, load_tokenizer, unseen_end
from rlbatch.prompts.prompt_file import USUAL_LABEL_FIELDS, PromptRow, find_value, usual_names, value_names
from rlbatch.prompts.prompt_order import round_size
from rlbatch.prompts.prompt_sets import PromptSet
from rlbatch.prompts.tokenizing import LongPrompts, prompt_limit, tokenize_rows
from rlbatch.registry import Registry

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

READ_S = 3.0
"""Seconds of processor time for which rows are read at submit."""
MOST_TOKENIZED = 4096
"""Most rows of a file that are tokenised; they take about a second."""
MOST_SPECIAL = 8
"""Tokens by which the model's own tokenizer class may make a plain text longer: added ones, or words that it splits otherwise."""


class RowChecks:
    """Checks rows against their rewards: each must exist, take the row's label, and get labels of one type."""

    def __init__(self, config: Config, registry: Registry) -> None:
        self._config, self._registry = config, registry
        self._kinds: dict[str, tuple[str, str]] = {}
        own = config.reward

        def asked(name: str) -> tuple[Callable[[Any], None], bool]:
            options = own.options if name == own.name else {}
            return reward_parts.label_check(registry.rewards, name, options), reward_parts.needs_label(registry.rewards, name, options)

        self._asked = cache(asked)

    def check(self, row: PromptRow, one: PromptSet) -> None:
        """Raises DataError with the row's place, and what its reward says."""
        known, name = self._registry.rewards, row.reward_name or self._config.reward.name
        if row.reward_name and row.reward_name not in known:
            raise DataError(
                f"{row.place}: reward `{row.reward_name}` is unknown. Known: {', '.join(sorted(known))}; others need plugins=[...]."
            )
        takes, needs_label = self._asked(name)
        if row.no_label and needs_label:
            raise DataError(f"{row.place}: reward={name}: {row.no_label}{_none_needed(one, takes)}")
        try:
            takes(row.label)
        except DataError as error:
            raise DataError(f"{row.place}: {error}{_inner_label(one, row.label, takes)}") from error
        if not needs_label:
            return
        kind, place = self._kinds.setdefault(name, (json_type(row.label), row.place))
        if kind != json_type(row.label):
            raise DataError(
                f"{row.place}: the label is {json_type(row.label)}, and {kind} at {place}, both for reward={name}. Write all labels of a "
                "reward as one type, e.g. as strings."
            )


@dataclass(frozen=True)
class CheckedRows:
    """The rows of a data set that were looked at.

    Attributes:
        rows: The rows to tokenise: all, or of many those that are likeliest to be refused, in file order.
        count: How many were read.
        is_whole: Whether these are all that there are.
    """

    rows: Sequence[PromptRow]
    count: int
    is_whole: bool


def check_rows(config: Config, registry: Registry, one: PromptSet) -> CheckedRows:
    """Reads a data set: all of it, or of a large one what a few seconds allow; raises as ``RowReader.read``, and as ``RowChecks.check``: of
    several rows that cannot be used the first, and how many they are.
    """
    checks, likeliest, started = RowChecks(config, registry), _Likeliest(), time.thread_time()
    first, unusable, is_whole = "", 0, True
    for count, row in enumerate(islice(one.reader().read(one.paths), one.most or None), start=1):
        try:
            checks.check(row, one)
        except DataError as error:
            first, unusable = first or str(error), unusable + 1
        likeliest.add(row)
        if count % 1024 == 0 and time.thread_time() - started > READ_S:
            is_whole = False
            break
    if unusable > 1:
        read = "rows" if is_whole else "rows that were read"
        first += f" {unusable} of {count} {read} cannot be used: `python -m rlbatch.data` tells all reasons."
    if unusable:
        raise DataError(first)
    return CheckedRows(likeliest.rows(), count, is_whole)


def check_count(config: Config, sets: Sequence[PromptSet], checked: Sequence[CheckedRows]) -> None:
    """Refuses steps that are larger than the training prompts, with ConfigError."""
    count, weights = sum(one.count for one in checked), [one.weight or 0.0 for one in sets]
    wanted, factor = config.train.prompts_per_step, config.sampling.oversampling
    first_round, is_whole = round_size(wanted, factor), all(one.is_whole for one in checked)
    for weight, one, rows in zip(weights, sets, checked, strict=True):
        share = math.ceil(first_round * weight / (sum(weights) or 1.0) - 1e-9)
        if rows.is_whole and rows.count < share:
            raise ConfigError(
                f"data.sets.{one.name}.weight={weight:g}: with it {share} of the {first_round} prompts that a step takes are of this set, "
                f"which has {rows.count}, and none may be twice in a step. Use a smaller weight, or add prompts."
            )
    if is_whole and wanted <= count < first_round:
        raise ConfigError(
            f"sampling.oversampling={factor:g}: a round of train.prompts_per_step={wanted} has {first_round} prompts, data.train has "
            f"{count}. Use sampling.oversampling={int(1000 * count / wanted) / 1000:g} or less, or add prompts."
        )
    if is_whole and count < wanted:
        raise ConfigError(
            f"train.prompts_per_step={config.train.prompts_per_step}: must be at most the prompts of data.train ({count}). "
            f"Use {count} or less, or add prompts."
        )


def check_tokens(config: Config, family: ModelFamily, model_folder: Path, one: PromptSet, checked: CheckedRows) -> None:
    """Tokenises rows as the ranks will. Lines on stderr say how many, if not all, and which are too long.

    Raises:
        DataError: see ``tokenize_rows``, ``LongPrompts.told`` and ``load_tokenizer``.
        ConfigError: the limits leave no room for a prompt.
    """
    data, rows = one.data, checked.rows
    limit = prompt_limit(data, family.max_sequence_length, config.rollout.max_response_tokens, one.limit_key)
    tokenizer = light_tokenizer(model_folder)
    if tokenizer is not None:
        # Which special tokens a plain text gets is for the model's own class to say: transformers imports torch to find it.
        tokenized = tokenize_rows(rows, tokenizer, data, family.vocab_size, with_special_tokens=False)
        is_clear = all(0 < len(token_ids) <= limit[0] - MOST_SPECIAL for _, token_ids in tokenized)
        _check_end(tokenizer, family, model_folder)
    if tokenizer is None or not is_clear:
        tokenizer = _own_tokenizer(model_folder, may_lack_packages=config.cluster.container != "none")
        if tokenizer is None:
            return
        tokenized = tokenize_rows(rows, tokenizer, data, family.vocab_size)
        long = LongPrompts(limit, data)
        for row, (_, token_ids) in zip(rows, tokenized, strict=True):
            long.add(row, len(token_ids))
        if said := long.told():
            print(said, file=sys.stderr)
        _check_end(tokenizer, family, model_folder)
    if any(not isinstance(row.prompt, str) for row in rows) and (warning := unseen_end(tokenizer, model_folder, family.vocab_size)):
        print(warning, file=sys.stderr)
    if len(rows) < checked.count or not checked.is_whole:
        which = f"{len(rows)} of {checked.count} prompts (each form of messages, the longest, the first)"
        all_read = "" if checked.is_whole else f" Of the file {checked.count} rows were read."
        print(f"{one.told}: {which} were tokenised to check them.{all_read} `python -m rlbatch.data` looks at all.", file=sys.stderr)


class _Likeliest:
    """The rows, at most ``MOST_TOKENIZED``, that are likeliest refused: chat templates refuse roles and fields, limits refuse lengths."""

    def __init__(self) -> None:
        self._count = 0
        self._first: list[tuple[int, PromptRow]] = []
        self._forms: dict[Any, tuple[int, PromptRow]] = {}
        self._longest: list[tuple[int, int, PromptRow]] = []

    def add(self, row: PromptRow) -> None:
        number, self._count = self._count, self._count + 1
        if number < MOST_TOKENIZED:
            self._first.append((number, row))
        if len(self._forms) < MOST_TOKENIZED // 2:
            self._forms.setdefault(_form(row), (number, row))
        entry = (_characters(row), -number, row)
        if len(self._longest) < MOST_TOKENIZED // 4:
            heapq.heappush(self._longest, entry)
        else:
            heapq.heappushpop(self._longest, entry)

    def rows(self) -> list[PromptRow]:
        """The chosen rows, in file order."""
        longest = [(-number, row) for _, number, row in sorted(self._longest, key=lambda entry: entry[:2], reverse=True)]
        chosen = dict([*self._forms.values(), *longest, *self._first])
        return [row for _, row in sorted(list(chosen.items())[:MOST_TOKENIZED], key=lambda pair: pair[0])]


def _form(row: PromptRow) -> Any:
    return None if isinstance(row.prompt, str) else tuple((message["role"], *sorted(message)) for message in row.prompt)


def _characters(row: PromptRow) -> int:
    return len(row.prompt) if isinstance(row.prompt, str) else sum(len(message["content"]) for message in row.prompt)


def _inner_label(one: PromptSet, label: Any, takes: Callable[[Any], None]) -> str:
    """A hint for labels that lie in an object: the first of the usual fields that the reward would take."""
    for name in usual_names(list(value_names(label)), USUAL_LABEL_FIELDS) if isinstance(label, Mapping) else []:
        with suppress(DataError):
            takes(find_value(label, name))
            return f" Or set {one.keys}.label_key={one.data.label_key or 'label'}.{name}."
    return ""


def _none_needed(one: PromptSet, takes: Callable[[Any], None]) -> str:
    """A hint for rewards that do not say whether they read labels, and would take none."""
    with suppress(DataError):
        takes(None)
        return f" If this reward reads no label, set {one.keys}.label_key= (empty)."
    return ""


def _check_end(tokenizer: PreTrainedTokenizerBase, family: ModelFamily, folder: Path) -> None:
    """Refuses an end token that the model lacks: transformers may add one to a tokenizer, with an id beyond the vocabulary."""
    if tokenizer.eos_token_id is not None:
        end_tokens(folder, read_config(folder), family.vocab_size, tokenizer.eos_token_id)


def _own_tokenizer(folder: Path, *, may_lack_packages: bool) -> PreTrainedTokenizerBase | None:
    """The tokenizer as the ranks will have it; None: only they can read it."""
    try:
        return load_tokenizer(folder, folder)
    except DataError as error:
        if may_lack_packages or isinstance(error.__cause__, ModuleNotFoundError):
            return None
        raise
    except ImportError:  # no transformers here
        return None


def light_tokenizer(folder: Path) -> PreTrainedTokenizerBase | None:
    """The tokenizer, by the class that needs no torch; None: there is none that it can read."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    described = folder / TOKENIZER_CONFIG
    # Without a class it is the model's own, which may have special tokens of its own.
    has_class = described.is_file() and isinstance(read_json(described, "Correct it.", LARGE_BYTES).get("tokenizer_class"), str)
    if not has_class or not (folder / TOKENIZER).is_file():
        return None
    try:
        from transformers import PreTrainedTokenizerFast

        loaded: PreTrainedTokenizerBase = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
    except Exception:  # no transformers here, or whatever it raises
        return None
    return loaded
