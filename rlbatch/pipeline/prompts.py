"""Tokenises prompts on the ranks and draws them in a seeded order. How files are read is in ``prompt_file``."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlbatch.api import ConfigError, DataError, Prompt
from rlbatch.config.schema import DataConfig
from rlbatch.pipeline.prompt_file import PromptRow, read_prompt_rows
from rlbatch.pipeline.resource_limits import bounded

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SHOWN_ROWS = 3
BATCH_ROWS = 1024
"""Rows that are tokenised by one call; more are no faster, and take memory."""
ROW_S, BATCH_S = 5.0, 60.0
"""Of computing, in which a chat template must have written a row, and ``BATCH_ROWS`` of them: thousands of times what usual ones take."""
ROW_BYTES = 2 * 2**30
"""Of memory that it may take for a row."""
MOST_CHARACTERS = 2**26
"""Of a prompt: more than the tokens of any context."""


def load_prompts(
    path: Path,
    data: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    context_tokens: int,
    max_response_tokens: int,
    vocab_size: int | None = None,
) -> list[Prompt]:
    """Reads a prompt file and tokenises it.

    Args:
        path: See ``read_prompt_rows``.
        data: Names the fields; ``max_prompt_tokens`` limits the prompts further.
        tokenizer: Of the model.
        context_tokens: Longest sequence of the model.
        max_response_tokens: Tokens that must remain for the response.
        vocab_size: Of the model; None: token ids are not compared with it.

    Returns:
        One prompt a row, in file order; ``prompt_id`` is the position.

    Raises:
        DataError: see ``read_prompt_rows`` and ``tokenize_rows``.
        ConfigError: the limits leave no room for a prompt.
    """
    limit = prompt_limit(data, context_tokens, max_response_tokens)
    rows = read_prompt_rows(path, data)
    tokenized = tokenize_rows(path, rows, tokenizer, limit, vocab_size)
    return [
        Prompt(position, text, token_ids, row.label, row.reward_name, row.metadata)
        for position, (row, (text, token_ids)) in enumerate(zip(rows, tokenized, strict=True))
    ]


def tokenize_rows(
    path: Path,
    rows: Sequence[PromptRow],
    tokenizer: PreTrainedTokenizerBase,
    limit: tuple[int, str],
    vocab_size: int | None,
    *,
    with_special_tokens: bool = True,
) -> list[tuple[str, tuple[int, ...]]]:
    """The text of each row as the model reads it, and its tokens.

    Messages go through the tokenizer's chat template, with the generation prompt. A plain string is tokenised as the tokenizer does by
    default: with a beginning-of-sequence token if the tokenizer adds one.

    Args:
        path: The rows' file, for messages.
        rows: Of a prompt file.
        tokenizer: Of the model.
        limit: Longest allowed prompt and where that comes from, see ``prompt_limit``.
        vocab_size: Of the model; None: token ids are not compared with it.
        with_special_tokens: Of plain strings; false: what they have at least.

    Raises:
        DataError: a row that needs a chat template which is missing or refuses it, has no tokens, or has one outside of the vocabulary;
            prompts that are longer than the limit.
    """
    tokenized: list[tuple[str, tuple[int, ...]]] = []
    for start in range(0, len(rows), BATCH_ROWS):
        batch = rows[start : start + BATCH_ROWS]
        texts = _texts(path, batch, tokenizer)
        for is_plain, group in groupby(zip(batch, texts, strict=True), key=lambda pair: isinstance(pair[0].prompt, str)):
            tokenized += _encoded(path, list(group), tokenizer, add_special_tokens=is_plain and with_special_tokens)
    for row, (_, token_ids) in zip(rows, tokenized, strict=True):
        if with_special_tokens and not token_ids:
            raise DataError(f"{path}:{row.line}: the prompt has no tokens. Remove the row or write a prompt.")
        if vocab_size is not None and max(token_ids, default=0) >= vocab_size:
            raise DataError(
                f"{path}:{row.line}: the prompt has token {max(token_ids)}, the model's vocabulary ends at {vocab_size - 1}. "
                "Use the tokenizer of this model, or remove what was added to it."
            )
    _refuse_long(path, rows, [len(token_ids) for _, token_ids in tokenized], *limit)
    return tokenized


def prompt_limit(data: DataConfig, context_tokens: int, max_response_tokens: int) -> tuple[int, str]:
    """The longest allowed prompt and where that comes from.

    Raises:
        ConfigError: the limits leave no room for a prompt.
    """
    room = context_tokens - max_response_tokens
    if room < 1:
        raise ConfigError(
            f"rollout.max_response_tokens={max_response_tokens}: must be less than the model's context ({context_tokens} tokens), "
            f"to leave room for the prompt. Set it below {context_tokens}."
        )
    if data.max_prompt_tokens is not None and data.max_prompt_tokens < room:
        return data.max_prompt_tokens, f"data.max_prompt_tokens={data.max_prompt_tokens}"
    return room, f"the context of {context_tokens} less rollout.max_response_tokens={max_response_tokens}"


class PromptOrder:
    """An endless order of prompts: one seeded permutation of all of them an epoch.

    A step never holds a prompt twice (its samples would be the same ones again): if less than a step is left of an epoch, those prompts
    wait, and the next epoch begins. ``cursor`` is all of its state.
    """

    def __init__(self, num_prompts: int, seed: int) -> None:
        """Starts at the beginning of epoch 0."""
        self._num_prompts = num_prompts
        self._seed = seed
        self._epoch = 0
        self._position = 0
        self._permutation = self._permute(0)

    @property
    def cursor(self) -> tuple[int, int]:
        """(epoch, position in it): store it with a checkpoint, set it to go on from there."""
        return self._epoch, self._position

    @cursor.setter
    def cursor(self, cursor: tuple[int, int]) -> None:
        self._epoch, self._position = cursor
        self._permutation = self._permute(self._epoch)

    def take(self, count: int) -> list[int]:
        """The next ``count`` prompts, as positions in the prompt file, all different.

        Raises:
            ConfigError: there are fewer prompts.
        """
        if count > self._num_prompts:
            raise ConfigError(
                f"train.prompts_per_step={count}: must be at most the number of prompts of data.train ({self._num_prompts}). "
                f"Set train.prompts_per_step={self._num_prompts} or less, or add prompts."
            )
        if self._position + count > self._num_prompts:
            self.cursor = (self._epoch + 1, 0)
        start, self._position = self._position, self._position + count
        return self._permutation[start : self._position]

    def _permute(self, epoch: int) -> list[int]:
        order = list(range(self._num_prompts))
        random.Random(f"prompt order {self._seed} {epoch}").shuffle(order)
        return order


def _texts(path: Path, batch: Sequence[PromptRow], tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """What the model reads of each row."""
    texts, started = [], time.process_time()
    for row in batch:
        texts.append(_text(f"{path}:{row.line}", row, tokenizer))
        taken, size = time.process_time() - started, len(texts[-1])
        if size > MOST_CHARACTERS:
            raise DataError(f"{path}:{row.line}: the prompt has {size} characters, must have at most {MOST_CHARACTERS}. Shorten it.")
        if taken > BATCH_S:
            raise DataError(
                f"{tokenizer.name_or_path}: the chat template took {taken:.0f} s for {len(texts)} prompts of {path}, must take at most "
                f"{BATCH_S:g} s for {BATCH_ROWS}. Correct the template, or write the prompts as strings."
            )
    return texts


def _text(place: str, row: PromptRow, tokenizer: PreTrainedTokenizerBase) -> str:
    """What the model reads."""
    if isinstance(row.prompt, str):
        return row.prompt
    if tokenizer.chat_template is None:
        raise DataError(f"{place}: the prompt is a list of messages, but the tokenizer has no chat template. Write the prompt as a string.")
    if isinstance(tokenizer.chat_template, dict) and "default" not in tokenizer.chat_template:
        named = ", ".join(sorted(tokenizer.chat_template))
        raise DataError(
            f"{tokenizer.name_or_path}: has chat templates for {named} only, and the prompts need the one named default. "
            "Write it to chat_template.jinja, or write the prompts as strings."
        )
    try:
        with bounded(ROW_S, ROW_BYTES):
            return str(tokenizer.apply_chat_template([dict(m) for m in row.prompt], tokenize=False, add_generation_prompt=True))
    except TimeoutError as error:
        raise DataError(f"{tokenizer.name_or_path}: the chat template does not end ({place}: {error}). Correct the template.") from error
    except MemoryError as error:
        limit = f"more than {ROW_BYTES / 2**30:g} GiB"
        raise DataError(f"{tokenizer.name_or_path}: the chat template takes too much memory ({place}: {limit}). Correct it.") from error
    except Exception as error:  # a template is a program: whatever it raises must name the row
        line = getattr(error, "lineno", None)
        if line is not None:  # Jinja's own, of its syntax
            raise DataError(f"{tokenizer.name_or_path}: the chat template is no Jinja ({error}, line {line}). Correct it.") from error
        raise DataError(f"{place}: the chat template refuses this row ({error}). Correct the row, or change the template.") from error


def _encoded(
    path: Path, batch: Sequence[tuple[PromptRow, str]], tokenizer: PreTrainedTokenizerBase, *, add_special_tokens: bool
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Text and tokens of each row."""

    def encode(texts: list[str]) -> Any:
        return tokenizer(texts, add_special_tokens=add_special_tokens, return_attention_mask=False, verbose=False)["input_ids"]

    try:
        encoded = encode([text for _, text in batch])
    except Exception as error:  # the tokenizer does not say at which
        if len(batch) > 1:
            for pair in batch:
                list(_encoded(path, [pair], tokenizer, add_special_tokens=add_special_tokens))
        place = f"{path}:{batch[0][0].line}"
        raise DataError(f"{place}: the tokenizer refuses this prompt ({type(error).__name__}: {error}). Correct the row.") from error
    return ((text, tuple(token_ids)) for (_, text), token_ids in zip(batch, encoded, strict=True))


def _refuse_long(path: Path, rows: Sequence[PromptRow], lengths: Sequence[int], limit: int, reason: str) -> None:
    too_long = [f"{path}:{row.line}: {length} tokens" for row, length in zip(rows, lengths, strict=True) if length > limit]
    if too_long:
        shown = "; ".join(too_long[:SHOWN_ROWS]) + ("; ..." if len(too_long) > SHOWN_ROWS else "")
        raise DataError(
            f"{shown}: {len(too_long)} of {len(rows)} prompts are longer than {limit} tokens ({reason}). "
            "Remove or shorten them, or change that limit."
        )
