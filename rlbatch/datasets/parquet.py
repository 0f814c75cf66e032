"""Reads parquet, batch by batch: only the columns that are needed, never a whole file."""

from __future__ import annotations

import datetime
import decimal
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlbatch.api import DataError

if TYPE_CHECKING:
    import pyarrow
    import pyarrow.parquet

BATCH_ROWS = 1024
STREAM_BYTES = 2**20
"""Bytes of a column that are read at once: else a whole row group, which may be the whole file, would be in memory."""


@contextmanager
def opened(path: Path) -> Iterator[pyarrow.parquet.ParquetFile]:
    """A parquet file; raises DataError if it is broken, as far as it is read within the context."""
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path, buffer_size=STREAM_BYTES, pre_buffer=False) as file:
            yield file
    except (pyarrow.ArrowException, OSError, EOFError) as error:
        if isinstance(error, OSError) and error.errno:  # of the system: a disk that is full, ...
            raise DataError(f"{path}: cannot be read, or copied ({error}). Free space, or correct the path.") from error
        raise DataError(
            f"{path}: broken parquet ({next(iter(str(error).splitlines()), '')}). Download it again, or write it again."
        ) from error


def columns_of(file: pyarrow.parquet.ParquetFile, wanted: Sequence[str] | None = None) -> list[str]:
    """The columns to read: those that JSON could hold, i.e. no bytes such as images; of ``wanted`` (None: all) those that are there."""
    return [field.name for field in file.schema_arrow if (wanted is None or field.name in wanted) and not _has_bytes(field.type)]


def batches(file: pyarrow.parquet.ParquetFile, columns: Sequence[str]) -> Iterator[pyarrow.RecordBatch]:
    """Rows of these columns, at most ``BATCH_ROWS`` at once."""
    yield from file.iter_batches(BATCH_ROWS, columns=list(columns), use_threads=False)


def read_parquet(path: Path, wanted: Sequence[str] | None = None) -> Iterator[tuple[int, dict[str, Any]]]:
    """Number, from 1, and fields of each row; see ``opened``."""
    number = 0
    with opened(path) as file:
        for batch in batches(file, columns_of(file, wanted)):
            for fields in batch.to_pylist():
                number += 1
                yield number, plain(fields)


def plain(value: Any) -> Any:
    """A value of Arrow's as JSON has it: dates and decimals are texts, NaN, which stands for nothing, is null."""
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, float) and math.isnan(value):
        return None
    if isinstance(value, (datetime.date, datetime.time)):
        return value.isoformat()
    return str(value) if isinstance(value, (decimal.Decimal, datetime.timedelta)) else value


def _has_bytes(kind: pyarrow.DataType) -> bool:
    from pyarrow import types

    if types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind) or types.is_binary_view(kind):
        return True
    return any(_has_bytes(kind.field(number).type) for number in range(kind.num_fields))
