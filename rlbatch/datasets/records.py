"""Reads the rows of a data file, whatever kind it is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rlbatch.datasets.jsonl import read_jsonl
from rlbatch.datasets.kinds import kind_of
from rlbatch.datasets.parquet import read_parquet


def read_records(path: Path, wanted: Sequence[str] | None = None) -> Iterator[tuple[int, dict[str, Any]]]:
    """Place and fields of each row: its line, from 1, or in a parquet file its number, from 1.

    Args:
        path: jsonl in UTF-8, with or without a byte order mark, as it is or in gzip's or zstd's format, where blank lines are skipped; or
            parquet.
        wanted: Columns that are read, where a file has columns; None: all.

    Raises:
        DataError: the file cannot be read, or a row is malformed.
    """
    kind = kind_of(path)
    yield from read_parquet(path, wanted) if kind == "parquet" else read_jsonl(path, kind)
