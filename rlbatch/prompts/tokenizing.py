"""Makes prompts of rows: what the model reads of each, and its tokens. How files are read is in ``prompt_file``."""

from __future__ import annotations

import difflib
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlbatch.api import ConfigError, DataError, Prompt
from rlbatch.config.schema import DataConfig
from rlbatch.prompts.prompt_file import PromptRow, read_prompt_rows
from rlbatch.prompts.resource_limits import bounded

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SHOWN_ROWS = 3
BATCH_ROWS = 1024
"""Rows that are tokenised by one call; more are no faster, and take memory."""
ROW_S, BATCH_S = 5.0, 60.0
"""Seconds of processor time that a chat template may take for a row, and for ``BATCH_ROWS`` of them; usual ones take a thousandth."""
ROW_BYTES = 2 * 2**30
"""Bytes of memory that a chat template may take for a row."""
MOST_CHARACTERS = 2**26
"""Most characters of a prompt: more than the tokens of any context."""

Tokenized = tuple[str, tuple[int, ...]]
"""A row as the model reads it, and its tokens."""
Limit = tuple[int, str]
"""The longest allowed prompt and where that comes from."""


def load_prompts(
    paths: Path | Sequence[Path],
    data: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    context_tokens: int,
    max_response_tokens: int,
    vocab_size: int | None = None,
    most: int = 0,
    limit_key: str = "rollout.max_response_tokens",
    announce: Callable[[str], object] = lambda told: None,
) -> list[Prompt]:
    """Reads prompt files and tokenises them, all at once.

    Args:
        paths: See ``read_prompt_rows``.
        data: Names the columns, and says what becomes of them; ``max_prompt_tokens`` limits the prompts further.
        tokenizer: The model's tokenizer.
        context_tokens: Longest sequence of the model.
        max_response_tokens: Tokens that must remain for the response.
        vocab_size: Size of the model's vocabulary; None: token ids are not compared with it.
        most: Rows that are taken, from the top; 0: all.
        limit_key: Config key of ``max_response_tokens``.
        announce: Told of prompts that are left out.

    Returns:
        One prompt a row, in file order, but for those that are too long with ``data.too_long=drop``; ``prompt_id`` is the row's position.

    Raises:
        DataError: see ``read_prompt_rows``, ``tokenize_rows`` and ``LongPrompts.told``.
        ConfigError: the limits leave no room for a prompt.
    """
    limit = prompt_limit(data, context_tokens, max_response_tokens, limit_key)
    rows = read_prompt_rows(paths, data, most)
    tokenized = tokenize_rows(rows, tokenizer, data, vocab_size)
    long = LongPrompts(limit, data)
    pairs = [(row, one, long.add(row, len(one[1]))) for row, one in zip(rows, tokenized, strict=True)]
    if said := long.told():
        announce(said)
    return [make_prompt(position, row, one) for position, (row, one, is_long) in enumerate(pairs) if not is_long]


def make_prompt(position: int, row: PromptRow, tokenized: Tokenized) -> Prompt:
    """A row's prompt."""
    return Prompt(position, *tokenized, row.label, row.reward_name, row.metadata)


def tokenize_rows(
    rows: Sequence[PromptRow],
    tokenizer: PreTrainedTokenizerBase,
    data: DataConfig,
    vocab_size: int | None,
    *,
    with_special_tokens: bool = True,
) -> list[Tokenized]:
    """The text of each row as the model reads it, and its tokens.

    Messages go through the tokenizer's chat template, with the generation prompt. A plain string is tokenised as the tokenizer does by
    default: with a beginning-of-sequence token if the tokenizer adds one.

    Args:
        rows: Rows of prompt files.
        tokenizer: The model's tokenizer.
        data: Arguments of the template, and what is done with special tokens.
        vocab_size: Size of the model's vocabulary; None: token ids are not compared with it.
        with_special_tokens: Whether plain strings get the tokenizer's special tokens; without, their tokens are the fewest possible.

    Raises:
        DataError: a row that needs a chat template which is missing or refuses it, has no tokens, or has one outside of the vocabulary;
            a template that does not use an argument.
    """
    _check_options(tokenizer, data.template_options)
    adds = with_special_tokens and data.add_special_tokens
    spelt = None if data.special_tokens == "keep" else _special_tokens(tokenizer)
    tokenized: list[Tokenized] = []
    for start in range(0, len(rows), BATCH_ROWS):
        batch = rows[start : start + BATCH_ROWS]
        texts = _texts(batch, tokenizer, data.template_options)
        for is_plain, group in groupby(zip(batch, texts, strict=True), key=lambda pair: isinstance(pair[0].prompt, str)):
            tokenized += _encoded(list(group), tokenizer, add_special_tokens=is_plain and adds)
    if spelt:
        tokenized = [_unspelt(row, one, tokenizer, data, spelt, adds) for row, one in zip(rows, tokenized, strict=True)]
    for row, (_, token_ids) in zip(rows, tokenized, strict=True):
        if with_special_tokens and not token_ids:
            raise DataError(f"{row.place}: the prompt has no tokens. Remove the row or write a prompt.")
        if vocab_size is not None and max(token_ids, default=0) >= vocab_size:
            raise DataError(
                f"{row.place}: the prompt has token {max(token_ids)}, the model's vocabulary ends at {vocab_size - 1}. "
                "Use the tokenizer of this model, or remove what was added to it."
            )
    return tokenized


def prompt_limit(data: DataConfig, context_tokens: int, max_response_tokens: int, key: str = "rollout.max_response_tokens") -> Limit:
    """The longest allowed prompt and where that comes from; raises ConfigError if the limits leave no room for one."""
    room = context_tokens - max_response_tokens
    if room < 1:
        raise ConfigError(
            f"{key}={max_response_tokens}: must be less than the model's context ({context_tokens} tokens), "
            f"to leave room for the prompt. Set it below {context_tokens}."
        )
    if data.max_prompt_tokens is not None and data.max_prompt_tokens < room:
        return data.max_prompt_tokens, f"data.max_prompt_tokens={data.max_prompt_tokens}"
    return room, f"the context of {context_tokens} less {key}={max_response_tokens}"


class LongPrompts:
    """Counts prompts that are longer than ``prompt_limit``."""

    def __init__(self, limit: Limit, data: DataConfig) -> None:
        self._limit, self._data = limit, data
        self._shown: list[str] = []
        self.seen, self.count = 0, 0

    def add(self, row: PromptRow, tokens: int) -> bool:
        """Counts a row; returns whether it is too long."""
        self.seen += 1
        is_long = tokens > self._limit[0]
        self.count += is_long
        if is_long and len(self._shown) < SHOWN_ROWS:
            self._shown.append(f"{row.place}: {tokens} tokens")
        return is_long

    def told(self, *, are_all: bool = True) -> str:
        """The message about prompts that are left out; empty if there are none.

        Args:
            are_all: Whether none is left if all that were counted are too long.

        Raises:
            DataError: there are some and ``data.too_long=refuse``, or none is left.
        """
        if not self.count:
            return ""
        shown = "; ".join(self._shown) + ("; ..." if self.count > len(self._shown) else "")
        said = f"{shown}: {self.count} of {self.seen} prompts are longer than {self._limit[0]} tokens ({self._limit[1]})"
        if self._data.too_long == "refuse" or (are_all and self.count == self.seen):
            raise DataError(f"{said}. Remove or shorten them, or change that limit.")
        return f"{said}, and are left out (data.too_long=drop)."


def _texts(batch: Sequence[PromptRow], tokenizer: PreTrainedTokenizerBase, options: Mapping[str, Any]) -> list[str]:
    """The text of each row as the model reads it."""
    texts, started = [], time.process_time()
    for row in batch:
        texts.append(_text(row, tokenizer, options))
        taken, size = time.process_time() - started, len(texts[-1])
        if size > MOST_CHARACTERS:
            raise DataError(f"{row.place}: the prompt has {size} characters, must have at most {MOST_CHARACTERS}. Shorten it.")
        if taken > BATCH_S:
            raise DataError(
                f"{tokenizer.name_or_path}: the chat template took {taken:.0f} s for {len(texts)} prompts of {row.path}, must take at most "
                f"{BATCH_S:g} s for {BATCH_ROWS}. Correct the template, or write the prompts as strings."
            )
    return texts


def _text(row: PromptRow, tokenizer: PreTrainedTokenizerBase, options: Mapping[str, Any]) -> str:
    """The text of a row as the model reads it."""
    place = row.place
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
            messages = [dict(message) for message in row.prompt]
            return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **options))
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
    batch: Sequence[tuple[PromptRow, str]], tokenizer: PreTrainedTokenizerBase, *, add_special_tokens: bool
) -> Iterator[Tokenized]:
    """Text and tokens of each row."""

    def encode(texts: list[str]) -> Any:
        return tokenizer(texts, add_special_tokens=add_special_tokens, return_attention_mask=False, verbose=False)["input_ids"]

    try:
        encoded = encode([text for _, text in batch])
    except Exception as error:  # the tokenizer does not say at which
        if len(batch) > 1:
            for pair in batch:
                list(_encoded([pair], tokenizer, add_special_tokens=add_special_tokens))
        place = batch[0][0].place
        raise DataError(f"{place}: the tokenizer refuses this prompt ({type(error).__name__}: {error}). Correct the row.") from error
    begin = [tokenizer.bos_token_id] if add_special_tokens and tokenizer.bos_token_id is not None else []
    for (_, text), token_ids in zip(batch, encoded, strict=True):
        is_doubled = begin and token_ids[:2] == begin * 2 and text.startswith(str(tokenizer.bos_token))  # the row has one of its own
        yield text, tuple(token_ids[1:] if is_doubled else token_ids)


def _check_options(tokenizer: PreTrainedTokenizerBase, options: Mapping[str, Any]) -> None:
    """Refuses arguments that the chat template does not use: a misspelt one would change nothing, without a word."""
    template = tokenizer.chat_template
    source = template.get("default", "") if isinstance(template, dict) else template or ""
    words = set(re.findall(r"[A-Za-z_]\w*", source))
    for name in options:
        if not source:
            raise DataError(f"data.template_options.{name}: {tokenizer.name_or_path} has no chat template that could use it. Leave it out.")
        if name not in words:
            close = difflib.get_close_matches(name, words, n=1)
            hint = f"Did you mean `{close[0]}`?" if close else "Leave it out."
            raise DataError(f"data.template_options.{name}: the chat template of {tokenizer.name_or_path} does not use it. {hint}")


def _special_tokens(tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str] | None:
    """A pattern that finds the special tokens in a text; None if the tokenizer has none."""
    contents = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    return re.compile("|".join(map(re.escape, sorted(contents, key=len, reverse=True)))) if contents else None


def _unspelt(
    row: PromptRow, tokenized: Tokenized, tokenizer: PreTrainedTokenizerBase, data: DataConfig, spelt: re.Pattern[str], adds: bool
) -> Tokenized:
    """A row's tokens without the special ones that its own text spells: they are tokenised as letters.

    Raises:
        DataError: it has some, and ``data.special_tokens=refuse``; or the template changes what they are replaced with to find them.
    """
    own = [row.prompt] if isinstance(row.prompt, str) else [message["content"] for message in row.prompt]
    found = next((match for text in own if (match := spelt.search(text))), None)
    if found is None:
        return tokenized
    if data.special_tokens == "refuse":
        raise DataError(
            f"{row.place}: the prompt spells the special token {found[0]}. Remove it; data.special_tokens=text keeps its letters."
        )

    def letters(text: str, *, add_special_tokens: bool = False) -> list[int]:
        return list(tokenizer(text, add_special_tokens=add_special_tokens, split_special_tokens=True, verbose=False)["input_ids"])

    text = tokenized[0]
    if isinstance(row.prompt, str):
        return text, tuple(letters(text, add_special_tokens=adds))
    # Each is replaced with characters that nobody uses, to be found again in what the template has made.
    marked: list[str] = []

    def mark(match: re.Match[str]) -> str:
        marked.append(match[0])
        return f"\ue0f0{len(marked) - 1}\ue0f1"

    messages = tuple({**message, "content": spelt.sub(mark, message["content"])} for message in row.prompt)
    parts = re.split("\ue0f0([0-9]+)\ue0f1", _text(PromptRow(row.path, row.line, messages, None, "", {}), tokenizer, data.template_options))
    parts[1::2] = [marked[int(number)] for number in parts[1::2]]
    if "".join(parts) != text:
        raise DataError(
            f"{row.place}: the prompt spells the special token {found[0]}, which the chat template changes. Remove it from the row."
        )
    pieces = [letters(part) if index % 2 else tokenizer(part, add_special_tokens=False)["input_ids"] for index, part in enumerate(parts)]
    return text, tuple(token for piece in pieces for token in piece)
