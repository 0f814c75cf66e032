"""Finds what is wrong with prompt files, as far as it shows before ranks start.

Imports no torch, unless a prompt is about as long as is allowed, or no class of transformers reads the tokenizer without it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlbatch.api import ConfigError, DataError, ModelFamily
from rlbatch.config.foreign import LARGE_BYTES, read_json
from rlbatch.config.hf_config import read_config
from rlbatch.config.schema import Config
from rlbatch.pipeline.acceptance import round_size
from rlbatch.pipeline.model_folder import TOKENIZER, TOKENIZER_CONFIG, end_tokens, load_tokenizer, unseen_end
from rlbatch.pipeline.prompt_file import USUAL_LABEL_FIELDS, PromptRow, read_prompt_rows, usual_names, value_names
from rlbatch.pipeline.prompts import prompt_limit, tokenize_rows
from rlbatch.registry import Registry

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MOST_TOKENIZED = 4096
"""Rows of a file; they take about a second."""
MOST_SPECIAL = 8
"""Tokens that the model's own tokenizer class may add to a plain text, or cut otherwise."""


def check_rows(config: Config, registry: Registry, path: Path) -> list[PromptRow]:
    """Reads a prompt file; every row's reward must exist and take its label.

    Raises:
        DataError: see ``read_prompt_rows``; or ``path:line``, and what the reward says.
    """
    rows = read_prompt_rows(path, config.data)

    @cache
    def label_check(name: str) -> Callable[[Any], None]:
        return registry.label_check(name, config.reward.options if name == config.reward.name else {})

    for row in rows:
        if row.reward_name and row.reward_name not in registry.rewards:
            raise DataError(
                f"{path}:{row.line}: reward `{row.reward_name}` is unknown. "
                f"Known: {', '.join(sorted(registry.rewards))}; others need plugins=[...]."
            )
        try:
            label_check(row.reward_name or config.reward.name)(row.label)
        except DataError as error:
            raise DataError(f"{path}:{row.line}: {error}{_inner_label(config.data.label_key, row.label)}") from error
    return rows


def check_count(config: Config, rows: Sequence[PromptRow]) -> None:
    """Refuses steps that are larger than the training prompts.

    Raises:
        ConfigError: both numbers.
    """
    wanted, factor = config.train.prompts_per_step, config.sampling.oversampling
    first_round = round_size(wanted, factor)
    if wanted <= len(rows) < first_round:
        raise ConfigError(
            f"sampling.oversampling={factor:g}: a round of train.prompts_per_step={wanted} has {first_round} prompts, data.train has "
            f"{len(rows)}. Use sampling.oversampling={int(1000 * len(rows) / wanted) / 1000:g} or less, or add prompts."
        )
    if len(rows) < config.train.prompts_per_step:
        raise ConfigError(
            f"train.prompts_per_step={config.train.prompts_per_step}: must be at most the prompts of data.train ({len(rows)}). "
            f"Use {len(rows)} or less, or add prompts."
        )


def check_tokens(config: Config, family: ModelFamily, model_folder: Path, path: Path, rows: Sequence[PromptRow]) -> None:
    """Tokenises rows as the ranks will: all of a file, or of a large one those that are likeliest to be refused. A line on stderr says how
    many, if not all.

    Raises:
        DataError: see ``tokenize_rows`` and ``load_tokenizer``.
        ConfigError: the limits leave no room for a prompt.
    """
    limit = prompt_limit(config.data, family.max_sequence_length, config.rollout.max_response_tokens)
    chosen = _likeliest(rows)
    tokenizer = _light_tokenizer(model_folder)
    if tokenizer is not None:
        # Which special tokens a plain text gets is for the model's own class to say: transformers imports torch to find it.
        unlimited = (sys.maxsize, "")
        tokenized = tokenize_rows(path, chosen, tokenizer, unlimited, family.vocab_size, with_special_tokens=False)
        is_clear = all(0 < len(token_ids) <= limit[0] - MOST_SPECIAL for _, token_ids in tokenized)
        _check_end(tokenizer, family, model_folder)
    if tokenizer is None or not is_clear:
        tokenizer = _own_tokenizer(model_folder, may_lack_packages=config.cluster.container != "none")
        if tokenizer is None:
            return
        tokenize_rows(path, chosen, tokenizer, limit, family.vocab_size)
        _check_end(tokenizer, family, model_folder)
    if any(not isinstance(row.prompt, str) for row in chosen) and (warning := unseen_end(tokenizer, model_folder, family.vocab_size)):
        print(warning, file=sys.stderr)
    if len(chosen) < len(rows):
        which = f"{len(chosen)} of {len(rows)} prompts (each form of messages, the longest, the first)"
        print(f"{path}: {which} were tokenised to check them; all are when the ranks start.", file=sys.stderr)


def _likeliest(rows: Sequence[PromptRow]) -> list[PromptRow]:
    """Picks at most ``MOST_TOKENIZED`` rows, in file order: a chat template refuses by roles and fields, a limit by length."""
    if len(rows) <= MOST_TOKENIZED:
        return list(rows)
    forms: dict[Any, int] = {}
    for number, row in enumerate(rows):
        forms.setdefault(_form(row), number)
    longest = sorted(range(len(rows)), key=lambda number: -_characters(rows[number]))[: MOST_TOKENIZED // 4]
    chosen = dict.fromkeys([*list(forms.values())[: MOST_TOKENIZED // 2], *longest, *range(MOST_TOKENIZED)])
    return [rows[number] for number in sorted(list(chosen)[:MOST_TOKENIZED])]


def _form(row: PromptRow) -> Any:
    return None if isinstance(row.prompt, str) else tuple((message["role"], *sorted(message)) for message in row.prompt)


def _characters(row: PromptRow) -> int:
    return len(row.prompt) if isinstance(row.prompt, str) else sum(len(message["content"]) for message in row.prompt)


def _inner_label(key: str, label: Any) -> str:
    """A hint for labels that lie in an object."""
    names = usual_names(list(value_names(label, f"{key}.")), USUAL_LABEL_FIELDS) if isinstance(label, Mapping) else []
    return f" Or set data.label_key={names[0]}." if names else ""


def _check_end(tokenizer: PreTrainedTokenizerBase, family: ModelFamily, folder: Path) -> None:
    """A token that no file has is one of the tokenizer's nevertheless: transformers adds it behind the others."""
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


def _light_tokenizer(folder: Path) -> PreTrainedTokenizerBase | None:
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
