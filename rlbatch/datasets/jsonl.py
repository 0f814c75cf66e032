"""Reads jsonl, as it is or compressed: one JSON object a line."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from rlbatch.api import DataError
from rlbatch.config.bounded_files import open_regular, parse_json
from rlbatch.datasets.kinds import FIX, START_BYTES, Kind, check_unpacked

LONGEST_ROW = 16 * 2**20
"""Bytes of a line; a file without newlines is not read to its end."""
FORM = "Write one JSON object a line."
BOM = b"\xef\xbb\xbf"
BLOCK_BYTES = 2**20


def read_jsonl(path: Path, kind: Kind) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line, from 1, and object of each line that is not blank.

    Raises:
        DataError: a malformed line, or a compressed file that is damaged or ends early.
    """
    for line, text in _lines(path, kind):
        yield line, parse_line(path, line, text)


def parse_line(path: Path, line: int, text: str) -> dict[str, Any]:
    """A line's object; raises DataError if it is none, or has a name twice."""
    fields = parse_json(text, str(path), FORM, line=line, pairs=_unique)
    if not isinstance(fields, dict):
        raise DataError(f'{path}:{line}: must be a JSON object, is {json_type(fields)}. Write {{"prompt": ..., "label": ...}}.')
    return fields


def decode_line(path: Path, line: int, raw: bytes) -> str:
    """A line's text, without blanks around it; raises DataError if it is not UTF-8."""
    try:
        return (raw.removeprefix(BOM) if line == 1 else raw).decode("utf-8").strip()
    except UnicodeDecodeError as error:
        raise DataError(f"{path}:{line}: not UTF-8 ({error.reason} at byte {error.start}). Convert the file to UTF-8.") from error


def blocks(path: Path, kind: Kind, size: int = BLOCK_BYTES) -> Iterator[bytes]:
    """A file's bytes, unpacked if they are compressed, at most ``size`` at once.

    Raises:
        DamagedError: a compressed file ends early, or is damaged.
        DataError: it cannot be read, or holds no jsonl.
    """
    with open_regular(path, FIX) as file:
        is_first = kind != "jsonl"
        stream = _unpacked(file, kind)
        while block := _read(stream, kind, size):
            if is_first:
                check_unpacked(path, block[:START_BYTES])
                is_first = False
            yield block


class DamagedError(Exception):
    """The error of a compressed file that cannot be read any further; its text says why."""


def damaged(path: Path, line: int, error: DamagedError) -> DataError:
    """The error to tell for a compressed file that cannot be read beyond a line."""
    if "too much memory" in str(error):  # a window of zstd --long
        return DataError(f"{path}: cannot be unpacked ({error}). Unpack it with `zstd -d --long=31`.")
    return DataError(f"{path}:{line + 1}: the compressed file ends early or is damaged ({error}). Download it again, or write it again.")


def json_type(value: Any) -> str:
    """What a JSON value is, in words."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    return names.get(type(value), "null")


def _lines(path: Path, kind: Kind) -> Iterator[tuple[int, str]]:
    """Non-blank lines with their numbers. Only newlines end a line: JSON strings may hold other separators such as U+2028."""
    line = 0
    try:
        for line, raw in enumerate(_raw_lines(path, kind), start=1):
            if len(raw) > LONGEST_ROW:
                raise DataError(f"{path}:{line}: must be at most {LONGEST_ROW // 2**20} MiB long. {FORM}")
            if text := decode_line(path, line, raw):
                yield line, text
    except DamagedError as error:
        raise damaged(path, line, error) from error


def _raw_lines(path: Path, kind: Kind) -> Iterator[bytes]:
    rest = b""
    for block in blocks(path, kind):
        *whole, rest = (rest + block).split(b"\n")
        yield from whole
        if len(rest) > LONGEST_ROW:
            break
    if rest:
        yield rest


def _unpacked(file: IO[bytes], kind: Kind) -> Any:
    if kind == "jsonl.zst":
        import pyarrow

        return pyarrow.CompressedInputStream(pyarrow.PythonFile(file, mode="r"), "zstd")
    return gzip.GzipFile(fileobj=file) if kind == "jsonl.gz" else file


def _read(stream: Any, kind: Kind, size: int) -> bytes:
    try:
        return bytes(stream.read1(size) if kind == "jsonl.gz" else stream.read(size))  # up to where it is cut
    except (EOFError, OSError, zlib.error) as error:
        if kind == "jsonl":
            raise
        raise DamagedError(str(error)) from error


def _unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """An object; a name that is there twice would lose a value."""
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"`{next(name for name in names if names.count(name) > 1)}` is there twice")
    return made
