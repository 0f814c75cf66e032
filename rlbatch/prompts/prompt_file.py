"""Makes prompts' rows of what data files hold, without a tokenizer.

Which columns are the prompt, the label and, optionally, the name of the row's reward is said by ``data.format`` and ``data.*_key``. All
other columns become ``Prompt.metadata``.
"""

from __future__ import annotations

import difflib
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import islice
from pathlib import Path
from typing import Any

from rlbatch.api import DataError
from rlbatch.config.schema import DataConfig
from rlbatch.datasets.jsonl import json_type
from rlbatch.datasets.kinds import empty
from rlbatch.datasets.records import read_records

USUAL_PROMPT_FIELDS = ("prompt", "question", "problem", "input", "query", "instruction", "messages")
USUAL_LABEL_FIELDS = ("label", "ground_truth", "answer", "solution", "target", "output")
SHOWN_NAMES = 12
FLOAT64_MAX = int(sys.float_info.max)
FORMATS: Mapping[str, tuple[str, str]] = {
    "plain": ("prompt", "label"),
    "verl": ("prompt", "reward_model.ground_truth"),
    "slime": ("prompt", "label"),
    "openrlhf": ("input", "label"),
}
"""Columns of prompt and label. ``auto`` is the first of these that a row has; without labels, the first whose prompt it has."""
_HALF_CHARACTER = re.compile("[\ud800-\udfff]")
_MISSING = object()
Names = Callable[[], tuple[str, ...]]
"""A function that gives the dotted names of a row's values; only messages need them."""


@dataclass(frozen=True)
class PromptRow:
    """One row of a prompt file, not yet tokenised.

    Attributes:
        path: The file.
        line: Line in it, from 1; of a parquet file the row, from 1.
        prompt: Text, or messages ``{role, content}`` for the chat template.
        label: What the reward compares with; any JSON value.
        reward_name: Reward for this row; empty for the job's ``reward``.
        metadata: The row's remaining fields.
        no_label: Why it has none, for a reward that needs one; empty: it has one, or ``data.label_key`` says that there is none.
    """

    path: Path
    line: int
    prompt: str | tuple[Mapping[str, str], ...]
    label: Any
    reward_name: str
    metadata: Mapping[str, Any]
    no_label: str = ""

    @property
    def place(self) -> str:
        """The row's ``path:line``, for messages."""
        return f"{self.path}:{self.line}"


class RowReader:
    """Makes rows of one data set; those that name no reward have ``reward`` (empty: the job's). A name such as
    ``reward_model.ground_truth`` in ``data`` is a column of that name, else a field in an object. ``keys`` is where messages say that
    columns are named: ``data``, or a set's own keys.
    """

    def __init__(self, data: DataConfig, reward: str = "", keys: str = "data") -> None:
        self._data, self._reward, self._curriculum, self._at = data, reward, Curriculum(data.curriculum), keys
        self._keys: tuple[str, str] | None = None
        self._all_columns: dict[Path, Mapping[str, Any]] = {}

    @property
    def wanted(self) -> Sequence[str] | None:
        """Columns that are needed; None: all."""
        data = self._data
        if data.metadata_keys is None:
            return None
        own = (data.prompt_key, data.label_key, data.reward_key, data.curriculum, *data.metadata_keys)
        return top_columns([*own, *(key for pair in FORMATS.values() for key in pair)])

    def read(self, paths: Sequence[Path]) -> Iterator[PromptRow]:
        """The rows of files, in order.

        Raises:
            DataError: a file cannot be read or has no rows, or a row is malformed (``path:line: ...``).
        """
        for path in paths:
            row = None
            for line, fields in read_records(path, self.wanted):
                row = self.row(path, line, fields)
                yield row
            if row is None:
                raise empty(path)

    def row(self, path: Path, line: int, fields: Mapping[str, Any]) -> PromptRow:
        """What a row of a file means; the first one decides which format ``data.format=auto`` is. Raises DataError if it is malformed."""
        data, place = self._data, f"{path}:{line}"
        self._keys = self._keys or _keys(data, fields)
        prompt_key, label_key = self._keys
        _check_values(place, fields)
        names = partial(self._names, path, fields)
        prompt = _field(place, f"{self._at}.prompt_key", prompt_key, fields, names, USUAL_PROMPT_FIELDS)
        others = {name: value for name, value in fields.items() if name != prompt_key}
        label, no_label = self._label(place, label_key, fields, partial(names, prompt_key))
        named = find_value(fields, data.reward_key) if data.reward_key else ""
        reward_name = "" if named in (None, _MISSING) else named
        if not isinstance(reward_name, str):
            raise DataError(
                f"{place}: `{data.reward_key}` must be the name of a reward, is {json_type(reward_name)}. Write a name or remove it; "
                f"{self._at}.reward_key= leaves that column to the metadata."
            )
        kept = data.metadata_keys
        metadata = {
            name: value for name, value in others.items() if name not in (label_key, data.reward_key) and (kept is None or name in kept)
        }
        checked = _with_roles(place, self._at, data, _check_prompt(place, prompt_key, prompt))
        if data.curriculum:
            self._curriculum.value(place, fields, names)
        if data.format == "slime" and path.suffix != ".parquet" and json_type(label) == "a number":
            label = str(label)  # as slime reads jsonl
        return PromptRow(path, line, checked, label, reward_name or self._reward, metadata, no_label)

    def _names(self, path: Path, fields: Mapping[str, Any], without: str = "") -> tuple[str, ...]:
        """Dotted names of a row's values, for messages; where only some columns of a file are read, also those of its whole first row."""
        if self.wanted is not None:
            if path not in self._all_columns:
                self._all_columns[path] = next(read_records(path))[1]
            fields = {**self._all_columns[path], **fields}
        return tuple(value_names({name: value for name, value in fields.items() if name != without}))

    def _label(self, place: str, key: str, fields: Mapping[str, Any], names: Names) -> tuple[Any, str]:
        """A row's label, or null and why it has none; a column that was named must be there."""
        value = find_value(fields, key) if key else None
        if value is not _MISSING:
            return value, ""
        why = _no_field(f"{self._at}.label_key", key, names(), USUAL_LABEL_FIELDS)
        if self._data.label_key:
            raise DataError(f"{place}: {why}")
        return None, why


def read_prompt_rows(paths: Path | Sequence[Path], data: DataConfig, most: int = 0) -> list[PromptRow]:
    """The rows of prompt files (``most``, from the top; 0: all) as ``RowReader.read``, in file order, without a tokenizer; never none."""
    return list(islice(RowReader(data).read([paths] if isinstance(paths, Path) else paths), most or None))


class Curriculum:
    """The column by which a set is ordered: numbers in all rows, or texts."""

    def __init__(self, column: str) -> None:
        self._column, self._kind, self._first = column, "", ""

    def value(self, place: str, fields: Mapping[str, Any], names: Names | None = None) -> int | float | str:
        """The curriculum value of a row; ``names`` tells what the row has, if that is more than ``fields``.

        Raises:
            DataError: the row has none, or one of another type than the rows before.
        """
        value: int | float | str = _field(place, "data.curriculum", self._column, fields, names or (lambda: tuple(fields)), ())
        kind = json_type(value)
        if kind not in ("a number", "a string") or self._kind not in ("", kind):
            raise DataError(
                f"{place}: `{self._column}` (data.curriculum) is {kind}: must be a number in all rows, or a string in all rows"
                f"{f', as at {self._first}' if self._first else ''}. Correct it, or choose another column."
            )
        if isinstance(value, int) and abs(value) > FLOAT64_MAX:
            raise DataError(f"{place}: `{self._column}` (data.curriculum) must be within float64 (1.8e308). Write a smaller number.")
        self._kind, self._first = kind, self._first or place
        return value


def top_columns(keys: Iterable[str | None]) -> tuple[str, ...]:
    """Columns to read for these keys: a key with dots may be a column's whole name, or begin with it."""
    parts = [key.split(".") for key in keys if key]
    return tuple(dict.fromkeys(".".join(names[:count]) for names in parts for count in range(1, len(names) + 1)))


def _keys(data: DataConfig, fields: Mapping[str, Any]) -> tuple[str, str]:
    """Columns of prompt and label."""
    names = list(FORMATS) if data.format == "auto" else [data.format]
    pairs = [(data.prompt_key or FORMATS[name][0], FORMATS[name][1] if data.label_key is None else data.label_key) for name in names]

    def has(*keys: str) -> bool:
        return all(find_value(fields, key) is not _MISSING for key in keys if key)

    return next(filter(lambda pair: has(*pair), pairs), None) or next(filter(lambda pair: has(pair[0]), pairs), pairs[0])


def _with_roles(
    place: str, keys: str, data: DataConfig, prompt: str | tuple[Mapping[str, str], ...]
) -> str | tuple[Mapping[str, str], ...]:
    """The messages for the chat template, as ``data.*`` wants them."""
    messages = ({"role": "user", "content": prompt},) if isinstance(prompt, str) and data.text_as_user else prompt
    if not data.system_prompt or (not isinstance(messages, str) and messages[0]["role"] == "system"):
        return messages
    if isinstance(messages, str):
        raise DataError(
            f"{place}: {keys}.system_prompt is a message, but this prompt is a text, which no chat template sees. Set "
            f"{keys}.text_as_user=true or leave the system prompt out."
        )
    return ({"role": "system", "content": data.system_prompt}, *messages)


def value_names(value: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Names, dotted, of all values in an object and its objects that are no objects themselves; the outer ones first."""
    yield from (prefix + name for name, item in value.items() if not isinstance(item, dict))
    for name, item in value.items():
        if isinstance(item, dict):
            yield from value_names(item, f"{prefix}{name}.")


def usual_names(present: Sequence[str], usual: Sequence[str]) -> list[str]:
    """The names of ``present`` whose last part is in ``usual``, the likeliest first; names may be dotted."""
    found = [name for wanted in usual for name in present if name.rpartition(".")[2] == wanted]
    return sorted(found, key=lambda name: name.count("."))


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


def _field(place: str, option: str, key: str, fields: Mapping[str, Any], names: Names, usual: tuple[str, ...]) -> Any:
    """A row's value; raises DataError if it has none."""
    value = find_value(fields, key)
    if value is _MISSING:
        raise DataError(f"{place}: {_no_field(option, key, names(), usual)}")
    return value


@lru_cache(maxsize=64)  # a file may have the same to say of each of its rows
def _no_field(option: str, key: str, names: tuple[str, ...], usual: tuple[str, ...]) -> str:
    """The message for a missing field: it names the one that was probably meant, a similar or a usual one."""
    close = difflib.get_close_matches(key, names, n=1) or usual_names(names, usual)
    present = sorted(names, key=lambda name: (name not in close, -difflib.SequenceMatcher(None, key, name).ratio()))
    has = ", ".join(f"`{name}`" for name in present[:SHOWN_NAMES]) + (", ..." if len(present) > SHOWN_NAMES else "")
    fix = f"set {option}={close[0]}" if close else f"set {option} to the field that holds it"
    return f"no field `{key}` ({option}); has {has or 'no other field'}. Add it, or {fix}."


def find_value(value: Any, key: str) -> Any:
    """The value of a field, or of one in an object; a field whose own name has the dots wins. ``_MISSING``: there is none."""
    if not isinstance(value, dict):
        return _MISSING
    if key in value:
        return value[key]
    parts = key.split(".")
    found = (find_value(value.get(".".join(parts[:count])), ".".join(parts[count:])) for count in range(len(parts) - 1, 0, -1))
    return next((item for item in found if item is not _MISSING), _MISSING)


def _check_prompt(place: str, key: str, prompt: Any) -> str | tuple[Mapping[str, str], ...]:
    if isinstance(prompt, str):
        if not prompt.strip():
            raise DataError(f"{place}: `{key}` is empty. Remove the row or write a prompt.")
        return prompt
    if not isinstance(prompt, list):
        raise DataError(f"{place}: `{key}` must be a string or a list of {{role, content}}, is {json_type(prompt)}. Write one of the two.")
    for index, message in enumerate(prompt):
        if not (isinstance(message, dict) and isinstance(message.get("role"), str) and isinstance(message.get("content"), str)):
            raise DataError(f'{place}: message {index} of `{key}` must be {{"role": string, "content": string}}. Correct it.')
    if not any(message["content"].strip() for message in prompt):
        raise DataError(f"{place}: `{key}` is empty. Remove the row or write a message.")
    return tuple({name: value for name, value in message.items() if value is not None} for message in prompt)
