"""Reads files that others wrote, within bounds: never waiting for a writer, never more than so many bytes.

A FIFO, a device, a file of gigabytes or a hundred thousand brackets is one message with the path, as any other mistake.
"""

from __future__ import annotations

import gzip
import json
import os
import stat
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import IO, Any, cast

from rlbatch.api import DataError

SMALL_BYTES = 16 * 2**20
"""Most bytes of a config or a template; published ones have less than a hundredth."""
LARGE_BYTES = 128 * 2**20
"""Most bytes of a tokenizer, or of the names of a checkpoint's tensors."""
MAX_DEPTH = 64
"""Deepest nesting of lists and objects."""
Pairs = Callable[[Sequence[tuple[str, Any]]], dict[str, Any]]
"""A function that makes an object of its names and values; ``object_pairs_hook`` of ``json.loads``."""
_KINDS = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}


class MissingFileError(DataError):
    """A file that does not exist."""


@contextmanager
def open_regular(path: Path, fix: str) -> Iterator[IO[bytes]]:
    """A regular file, open for reading; ``fix`` is a sentence, what to do if it cannot be read.

    Raises:
        MissingFileError: there is none.
        DataError: it is a folder, FIFO, socket or device, or cannot be read, now or within the context.
    """
    try:
        kind = _KINDS.get(stat.S_IFMT(os.stat(path).st_mode))
        if kind is not None:
            raise DataError(f"{path}: must be a regular file, is {kind}. {fix}")
        with open(path, "rb") as file:
            yield file
    except OSError as error:
        is_missing = isinstance(error, (FileNotFoundError, NotADirectoryError))
        raise (MissingFileError if is_missing else DataError)(f"{path}: cannot be read ({error.strerror}). {fix}") from error


def read_text(path: Path, fix: str, limit: int = SMALL_BYTES) -> str:
    """A file's text in UTF-8, of at most ``limit`` bytes, without a byte order mark; of a file in gzip's format, what it holds.

    Raises:
        DataError: see ``open_regular``; or it is larger, or not text.
    """
    with open_regular(path, fix) as file:
        is_packed = file.read(2) == b"\x1f\x8b"
        file.seek(0)
        try:
            content = (gzip.GzipFile(fileobj=file) if is_packed else file).read(limit + 1)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise DataError(f"{path}: cannot be read ({error}). {fix}") from None
    if len(content) > limit:
        raise DataError(f"{path}: must have at most {limit // 2**20} MiB. {fix}")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise DataError(f"{path}: not text in UTF-8. {fix}") from None


def read_json(path: Path, fix: str, limit: int = SMALL_BYTES) -> dict[str, Any]:
    """A file's JSON object; as ``read_text``.

    Raises:
        DataError: see ``read_text`` and ``parse_json``; or it is no object.
    """
    parsed = parse_json(read_text(path, fix, limit), str(path), fix)
    if not isinstance(parsed, dict):
        raise DataError(f"{path}:1: not a JSON object. {fix}")
    return parsed


def read_own(path: Path) -> dict[str, Any]:
    """The JSON object of a file that a run wrote, in whose place anything may be by now.

    Raises:
        OSError: it is missing, or cannot be read.
        ValueError: it is something else.
    """
    try:
        content = json.loads(read_text(path, "Remove it."))
    except DataError as error:
        raise error.__cause__ if isinstance(error.__cause__, OSError) else ValueError(str(error)) from None
    except RecursionError as error:
        raise ValueError(f"{path}: not JSON of a run") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path}: not a JSON object")
    return content


def parse_json(text: str, path: str, fix: str, *, line: int = 1, pairs: Pairs | None = None) -> Any:
    """A JSON value of the file at ``path``, whose line ``line`` the text begins with; ``pairs`` makes its objects (None: dicts).

    Raises:
        DataError: it is not JSON, too deep, or has a number of thousands of digits.
    """
    try:
        value = _decoder(cast(Any, pairs)).decode(text)
    except json.JSONDecodeError as error:
        place = f"{path}:{line + error.lineno - 1}"
        raise DataError(f"{place}: not JSON ({error.msg} at column {error.colno}). {fix}") from None
    except RecursionError:
        raise DataError(f"{path}:{line}: must not have lists and objects more than {MAX_DEPTH} deep. {fix}") from None
    except ValueError as error:  # a number of thousands of digits
        raise DataError(f"{path}:{line}: cannot be read ({error}). {fix}") from None
    if text.count("[") + text.count("{") > MAX_DEPTH and _is_deep(value):
        raise DataError(f"{path}:{line}: must not have lists and objects more than {MAX_DEPTH} deep. {fix}")
    return value


@cache
def _decoder(pairs: Any) -> json.JSONDecoder:
    """A decoder for objects that ``pairs`` makes; it is kept, as making one takes as long as reading a short line."""
    return json.JSONDecoder(object_pairs_hook=pairs)


def _is_deep(value: Any) -> bool:
    """Whether a value is nested deeper than ``MAX_DEPTH``, so that code which recurses into it could fail."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        below = (item.values() if isinstance(item, dict) else item for item in level if isinstance(item, (dict, list)))
        level = [child for children in below for child in children]
        if not level:
            return False
    return True
