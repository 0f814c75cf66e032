"""Reads and checks prompt files, without a tokenizer.

A prompt file is jsonl: one object a line, with ``data.prompt_key``, ``data.label_key`` and, optionally, ``reward`` (the name of this row's
reward). All other fields become ``Prompt.metadata``.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlbatch.api import DataError
from rlbatch.config.foreign import open_regular, parse_json
from rlbatch.config.schema import DataConfig

REWARD_FIELD = "reward"
"""Field of a row with the name of its reward."""

USUAL_PROMPT_FIELDS = ("prompt", "question", "problem", "input", "query", "instruction", "messages")
USUAL_LABEL_FIELDS = ("label", "ground_truth", "answer", "solution", "target", "output")
LONGEST_ROW = 16 * 2**20
"""Bytes of a line; a file without newlines is not read to its end."""
SHOWN_NAMES = 12

_FIX = "Point data.train and data.eval to jsonl files."
_TO_JSONL = "Write it as jsonl, e.g. `pandas.read_{0}(path).to_json('prompts.jsonl', orient='records', lines=True)`."
_OTHER_FORMATS: Mapping[bytes, tuple[str, str]] = {
    b"PAR1": ("a Parquet file", _TO_JSONL.format("parquet")),
    b"ARROW1": ("an Arrow file", _TO_JSONL.format("feather")),
    b"\x1f\x8b": ("compressed (gzip)", "Unpack it with gunzip."),
    b"\x28\xb5\x2f\xfd": ("compressed (zstd)", "Unpack it with unzstd."),
    b"\x04\x22\x4d\x18": ("compressed (lz4)", "Unpack it with unlz4."),
    b"\xfd7zXZ": ("compressed (xz)", "Unpack it with unxz."),
    b"BZh": ("compressed (bzip2)", "Unpack it with bunzip2."),
    b"PK\x03\x04": ("a zip archive", "Unpack it with unzip."),
    b"version https://git-lfs": ("a Git LFS pointer, the file itself was not downloaded", "Run `git lfs pull` in its repository."),
}
_HALF_CHARACTER = re.compile("[\ud800-\udfff]")
_MISSING = object()


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
        data: Names the fields. A name such as ``reward_model.ground_truth`` is a field of that name, else a field in an object.

    Returns:
        The rows in file order; never empty.

    Raises:
        DataError: the file cannot be read, has no rows, or has a malformed one (``path:line: ...``).
    """
    rows = [_parse_row(path, line, text, data) for line, text in _lines(path)]
    if not rows:
        raise DataError(f"{path}:1: no prompts, the file is empty. Write one JSON object a line.")
    return rows


def value_names(value: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Names, dotted, of all values in an object and its objects that are no objects themselves; the outer ones first."""
    yield from (prefix + name for name, item in value.items() if not isinstance(item, dict))
    for name, item in value.items():
        if isinstance(item, dict):
            yield from value_names(item, f"{prefix}{name}.")


def usual_names(present: Sequence[str], usual: Sequence[str]) -> list[str]:
    """Those of ``present`` that usually have such values, the likeliest first; names may be dotted."""
    found = [name for wanted in usual for name in present if name.rpartition(".")[2] == wanted]
    return sorted(found, key=lambda name: name.count("."))


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Non-blank lines with their numbers. Only newlines end a line: JSON strings may hold other separators such as U+2028."""
    with open_regular(path, _FIX) as file:
        _refuse_other_formats(path, file.read(32))
        file.seek(0)
        for line, raw in enumerate(iter(lambda: file.readline(LONGEST_ROW + 1), b""), start=1):
            if len(raw) > LONGEST_ROW:
                raise DataError(f"{path}:{line}: must be at most {LONGEST_ROW // 2**20} MiB long. Write one JSON object a line.")
            try:
                text = (raw.removeprefix(b"\xef\xbb\xbf") if line == 1 else raw).decode("utf-8").strip()
            except UnicodeDecodeError as error:
                raise DataError(f"{path}:{line}: not UTF-8 ({error.reason} at byte {error.start}). Convert the file to UTF-8.") from error
            if text:
                yield line, text


def _refuse_other_formats(path: Path, start: bytes) -> None:
    for magic, (what, fix) in _OTHER_FORMATS.items():
        if start.startswith(magic):
            raise DataError(f"{path}: must be jsonl, is {what}. {fix}")


def _parse_row(path: Path, line: int, text: str, data: DataConfig) -> PromptRow:
    place = f"{path}:{line}"
    fields = parse_json(text, str(path), "Write one JSON object a line.", line=line, pairs=_unique)
    if not isinstance(fields, dict):
        raise DataError(
            f'{place}: must be a JSON object, is {_json_type(fields)}. Write {{"{data.prompt_key}": ..., "{data.label_key}": ...}}.'
        )
    _check_values(place, fields)
    prompt = _field(place, "data.prompt_key", data.prompt_key, fields, fields, USUAL_PROMPT_FIELDS)
    others = {name: value for name, value in fields.items() if name != data.prompt_key}
    label = _field(place, "data.label_key", data.label_key, fields, others, USUAL_LABEL_FIELDS)
    reward_name = fields.get(REWARD_FIELD, "")
    if not isinstance(reward_name, str):
        raise DataError(f"{place}: `{REWARD_FIELD}` must be the name of a reward, is {_json_type(reward_name)}. Write a name or remove it.")
    metadata = {name: value for name, value in others.items() if name not in (data.label_key, REWARD_FIELD)}
    return PromptRow(line, _check_prompt(place, data.prompt_key, prompt), label, reward_name, metadata)


def _unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """An object; a name that is there twice would lose a value."""
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"`{next(name for name in names if names.count(name) > 1)}` is there twice")
    return made


def _check_values(place: str, fields: Mapping[str, Any]) -> None:
    """Refuses what Python's JSON takes, but no tokenizer, engine or JSON file."""
    for name, field in fields.items():
        waiting = [name, field]
        while waiting:
            value = waiting.pop()
            if isinstance(value, dict):
                waiting += [*value, *value.values()]
            elif isinstance(value, list):
                waiting += value
            elif isinstance(value, str) and not value.isascii() and (half := _HALF_CHARACTER.search(value)):
                raise DataError(
                    f"{place}: `{ascii(name)[1:-1]}` has half a character ({ascii(half[0])[1:-1]}), which is no text. "
                    "Correct it: text that is cut must not be cut in UTF-16."
                )
            elif isinstance(value, float) and not math.isfinite(value):
                raise DataError(f"{place}: `{name}` has {value}: must be a number within float64. Write a finite number, a text or null.")


def _field(place: str, option: str, key: str, fields: Mapping[str, Any], eligible: Mapping[str, Any], usual: tuple[str, ...]) -> Any:
    """A row's value; the message for a missing one names the field that was probably meant: a similar or a usual one."""
    value = _find(fields, key)
    if value is not _MISSING:
        return value
    present = list(value_names(eligible))
    close = difflib.get_close_matches(key, present, n=1) or usual_names(present, usual)
    has = ", ".join(f"`{name}`" for name in present[:SHOWN_NAMES]) + (", ..." if len(present) > SHOWN_NAMES else "")
    fix = f"set {option}={close[0]}" if close else f"set {option} to the field that holds it"
    raise DataError(f"{place}: no field `{key}` ({option}); has {has or 'no other field'}. Add it, or {fix}.")


def _find(value: Any, key: str) -> Any:
    """The value of a field, or of one in an object; a field whose own name has the dots wins."""
    if not isinstance(value, dict):
        return _MISSING
    if key in value:
        return value[key]
    parts = key.split(".")
    found = (_find(value.get(".".join(parts[:count])), ".".join(parts[count:])) for count in range(len(parts) - 1, 0, -1))
    return next((item for item in found if item is not _MISSING), _MISSING)


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
