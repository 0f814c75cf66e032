"""Prompt files: read and checked at submit time (no tokenizer), tokenised on the ranks, drawn in a seeded order.

A prompt file is jsonl: one object a line, with ``data.prompt_key``, ``data.label_key`` and, optionally, ``reward`` (the name of this row's
reward). All other fields become ``Prompt.metadata``.
"""

from __future__ import annotations

import difflib
import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlbatch.api import ConfigError, DataError, Prompt
from rlbatch.config.schema import DataConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

REWARD_FIELD = "reward"
"""Field of a row with the name of its reward."""

USUAL_PROMPT_FIELDS = ("prompt", "question", "problem", "input", "query", "instruction", "messages")
USUAL_LABEL_FIELDS = ("label", "answer", "solution", "target", "ground_truth", "output")
SHOWN_ROWS = 3


@dataclass(frozen=True)
class PromptRow:
    """One row of a prompt file, not yet tokenised.

    Attributes:
        line: Line in the file, from 1.
        prompt: Text, or messages ``{role, content}`` for the chat template.
        label: What the reward compares with; any JSON value.
        reward_name: Reward for this row; empty for the job's ``reward``.
        metadata: The row's remaining fields.
    """

    line: int
    prompt: str | tuple[Mapping[str, str], ...]
    label: Any
    reward_name: str
    metadata: Mapping[str, Any]


def read_prompt_rows(path: Path, data: DataConfig) -> list[PromptRow]:
    """Reads and checks a prompt file, without a tokenizer.

    Args:
        path: jsonl in UTF-8, with or without a byte order mark; blank lines are skipped.
        data: Names the fields.

    Returns:
        The rows in file order; never empty.

    Raises:
        DataError: the file cannot be read, has no rows, or has a malformed one (``path:line: ...``).
    """
    rows = [_parse_row(f"{path}:{line}", line, text, data) for line, text in _lines(path)]
    if not rows:
        raise DataError(f"{path}:1: no prompts, the file is empty. Write one JSON object a line.")
    return rows


def load_prompts(
    path: Path, data: DataConfig, tokenizer: PreTrainedTokenizerBase, *, context_tokens: int, max_response_tokens: int
) -> list[Prompt]:
    """Reads a prompt file and tokenises it.

    Messages go through the tokenizer's chat template, with the generation prompt. A plain string is tokenised as the tokenizer does by
    default: with a beginning-of-sequence token if the tokenizer adds one.

    Args:
        path: See ``read_prompt_rows``.
        data: Names the fields; ``max_prompt_tokens`` limits the prompts further.
        tokenizer: Of the model.
        context_tokens: Longest sequence of the model.
        max_response_tokens: Tokens that must remain for the response.

    Returns:
        One prompt a row, in file order; ``prompt_id`` is the position.

    Raises:
        DataError: see ``read_prompt_rows``; or prompts are longer than the limit, have no tokens, or need a missing chat template.
        ConfigError: the limits leave no room for a prompt.
    """
    limit, reason = _prompt_limit(data, context_tokens, max_response_tokens)
    prompts: list[Prompt] = []
    too_long: list[str] = []
    for row in read_prompt_rows(path, data):
        text, token_ids = _tokenize(f"{path}:{row.line}", row, tokenizer)
        if len(token_ids) > limit:
            too_long.append(f"{path}:{row.line}: {len(token_ids)} tokens")
        prompts.append(Prompt(len(prompts), text, token_ids, row.label, row.reward_name, row.metadata))
    if too_long:
        shown = "; ".join(too_long[:SHOWN_ROWS]) + ("; ..." if len(too_long) > SHOWN_ROWS else "")
        raise DataError(
            f"{shown}: {len(too_long)} of {len(prompts)} prompts are longer than {limit} tokens ({reason}). "
            "Remove or shorten them, or change that limit."
        )
    return prompts


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


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Non-blank lines with their numbers. Only newlines end a line: JSON strings may hold other separators such as U+2028."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}). Point data.train and data.eval to jsonl files.") from error
    for line, raw in enumerate(content.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        try:
            text = raw.decode("utf-8").strip()
        except UnicodeDecodeError as error:
            raise DataError(f"{path}:{line}: not UTF-8 ({error.reason} at byte {error.start}). Convert the file to UTF-8.") from error
        if text:
            yield line, text


def _parse_row(place: str, line: int, text: str, data: DataConfig) -> PromptRow:
    try:
        fields = json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(f"{place}: not JSON ({error.msg} at column {error.colno}). Write one JSON object a line.") from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, lists a thousand deep
        raise DataError(f"{place}: cannot be read ({error}). Write plain values.") from error
    if not isinstance(fields, dict):
        raise DataError(
            f'{place}: must be a JSON object, is {_json_type(fields)}. Write {{"{data.prompt_key}": ..., "{data.label_key}": ...}}.'
        )
    for option, key, usual in (
        ("data.prompt_key", data.prompt_key, USUAL_PROMPT_FIELDS),
        ("data.label_key", data.label_key, USUAL_LABEL_FIELDS),
    ):
        if key not in fields:
            raise DataError(_missing_field(place, option, key, [name for name in fields if name != data.prompt_key], usual))
    reward_name = fields.get(REWARD_FIELD, "")
    if not isinstance(reward_name, str):
        raise DataError(f"{place}: `{REWARD_FIELD}` must be the name of a reward, is {_json_type(reward_name)}. Write a name or remove it.")
    metadata = {name: value for name, value in fields.items() if name not in (data.prompt_key, data.label_key, REWARD_FIELD)}
    prompt = _check_prompt(place, data.prompt_key, fields[data.prompt_key])
    return PromptRow(line, prompt, fields[data.label_key], reward_name, metadata)


def _missing_field(place: str, option: str, key: str, present: list[str], usual: tuple[str, ...]) -> str:
    """Names the field that was probably meant: a similar one, else one that such files usually have."""
    close = difflib.get_close_matches(key, present, n=1) or [name for name in usual if name in present]
    has = ", ".join(f"`{name}`" for name in present) or "no other field"
    fix = f"set {option}={close[0]}" if close else f"set {option} to the field that holds it"
    return f"{place}: no field `{key}` ({option}); has {has}. Add it, or {fix}."


def _check_prompt(place: str, key: str, prompt: Any) -> str | tuple[Mapping[str, str], ...]:
    if isinstance(prompt, str):
        if not prompt.strip():
            raise DataError(f"{place}: `{key}` is empty. Remove the row or write a prompt.")
        return prompt
    if not isinstance(prompt, list):
        raise DataError(f"{place}: `{key}` must be a string or a list of {{role, content}}, is {_json_type(prompt)}. Write one of the two.")
    for index, message in enumerate(prompt):
        if not (isinstance(message, dict) and isinstance(message.get("role"), str) and isinstance(message.get("content"), str)):
            raise DataError(f'{place}: message {index} of `{key}` must be {{"role": string, "content": string}}. Correct it.')
    if not any(message["content"].strip() for message in prompt):
        raise DataError(f"{place}: `{key}` is empty. Remove the row or write a message.")
    return tuple(prompt)


def _json_type(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    return names.get(type(value), "null")


def _prompt_limit(data: DataConfig, context_tokens: int, max_response_tokens: int) -> tuple[int, str]:
    """The longest allowed prompt and where that comes from."""
    room = context_tokens - max_response_tokens
    if room < 1:
        raise ConfigError(
            f"rollout.max_response_tokens={max_response_tokens}: must be less than the model's context ({context_tokens} tokens), "
            f"to leave room for the prompt. Set it below {context_tokens}."
        )
    if data.max_prompt_tokens is not None and data.max_prompt_tokens < room:
        return data.max_prompt_tokens, f"data.max_prompt_tokens={data.max_prompt_tokens}"
    return room, f"the context of {context_tokens} less rollout.max_response_tokens={max_response_tokens}"


def _tokenize(place: str, row: PromptRow, tokenizer: PreTrainedTokenizerBase) -> tuple[str, tuple[int, ...]]:
    if isinstance(row.prompt, str):
        text, from_template = row.prompt, False
    elif tokenizer.chat_template is None:
        raise DataError(f"{place}: the prompt is a list of messages, but the tokenizer has no chat template. Write the prompt as a string.")
    else:
        text = str(tokenizer.apply_chat_template([dict(m) for m in row.prompt], tokenize=False, add_generation_prompt=True))
        from_template = True
    token_ids = tuple(tokenizer(text, add_special_tokens=not from_template)["input_ids"])
    if not token_ids:
        raise DataError(f"{place}: the prompt has no tokens. Remove the row or write a prompt.")
    return text, token_ids
