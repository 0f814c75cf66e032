"""Finds the files that a path of ``data.*`` means: a file, those of a folder, or those that a pattern matches."""

from __future__ import annotations

import dataclasses
import glob
import os
from collections.abc import Sequence
from pathlib import Path

from rlbatch.api import DataError
from rlbatch.config.schema import DataConfig, EvalConfig

SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")
"""Endings of the names that data files in a folder have."""
_WORDS = ", ".join(f"*{suffix}" for suffix in SUFFIXES)


def with_files(data: DataConfig) -> DataConfig:
    """A config that names each file, so that what a folder holds at submit is what every rank reads, also when the run is resumed.

    Raises:
        DataError: a folder or pattern without files.
    """
    return dataclasses.replace(
        data,
        train=_named("data.train", data.train),
        eval=_named("data.eval", data.eval),
        sets={name: dataclasses.replace(one, path=_named(f"data.sets.{name}.path", one.path)) for name, one in data.sets.items()},
    )


def with_set_files(held_out: EvalConfig) -> EvalConfig:
    """The same as ``with_files``, for ``eval.sets``."""
    sets = {name: dataclasses.replace(one, file=_named(f"eval.sets.{name}.file", one.file)) for name, one in held_out.sets.items()}
    return dataclasses.replace(held_out, sets=sets)


def paths_in(value: str | Sequence[str]) -> list[Path]:
    """The files that a key of ``data.*`` names, as paths; none if it is empty."""
    return [Path(text) for text in ([value] if isinstance(value, str) else value) if text]


def _named(key: str, value: str | tuple[str, ...]) -> str | tuple[str, ...]:
    texts = [value] if isinstance(value, str) else list(value)
    files = [file for text in texts for file in ([text] if _is_one(text) else _found(key, text))]
    if twice := next((file for file in files if files.count(file) > 1), ""):
        raise DataError(f"{key}: {twice} is named twice, so that its rows would be. Leave one out.")
    return value if files == [value] else tuple(files)


def _is_one(text: str) -> bool:
    """Whether a text names one file and neither a folder nor a pattern; if there is no such file, reading it says so."""
    is_several = os.path.isdir(text) or (glob.has_magic(text) and not os.path.exists(text))
    return not is_several or os.path.isfile(text)


def _found(key: str, text: str) -> list[str]:
    if not os.path.isdir(text):
        matched = sorted(file for file in glob.glob(text, recursive=True) if os.path.isfile(file))
        if not matched:
            raise DataError(f"{key}={text}: must match a file, matches none. Correct the pattern, and quote it: the shell must not see it.")
        return matched
    try:
        names = sorted(name for name in os.listdir(text) if name.endswith(SUFFIXES) and not name.startswith("."))
    except OSError as error:
        raise DataError(f"{key}={text}: cannot be read ({error.strerror}). Name a folder that can.") from error
    files = [file for name in names if os.path.isfile(file := os.path.join(text, name))]
    if not files:
        raise DataError(f"{key}={text}: must be a file, or a folder with {_WORDS}; has none of these. Name the folder that holds them.")
    return files
