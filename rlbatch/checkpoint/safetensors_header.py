"""What a safetensors file says of its tensors, checked against the file's size. Imports no torch."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlbatch.api import DataError
from rlbatch.config.foreign import open_regular, parse_json

ITEM_BYTES = {
    **{"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1},
    **{"I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1},
}
"""Of the format's dtypes that are read."""
HEADER_LIMIT = 100 * 10**6
"""Bytes; the format's."""
AGAIN = "Download it again."


@dataclass(frozen=True)
class Entry:
    """Where a tensor lies.

    Attributes:
        dtype: Name in the header.
        shape: Of the tensor.
        start: Its first byte in the file.
        nbytes: Its length.
    """

    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


def read_header(path: Path) -> dict[str, Entry]:
    """The tensors of a file, by name.

    Raises:
        DataError: not a whole safetensors file.
    """
    with open_regular(path, "Look at the folder.") as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(HEADER_LIMIT, size - 8):
            raise damaged(path, f"{size} bytes with a header of {length}")
        content = file.read(length)
    try:
        header = parse_json(content.decode("utf-8"), f"{path}: header", AGAIN)
    except UnicodeDecodeError as error:
        raise damaged(path, "its header is not text in UTF-8") from error
    return _entries(path, header, 8 + length, size)


def damaged(path: Path, what: str) -> DataError:
    """The error for a file that is not as it was written, to be raised."""
    return DataError(f"{path}: is truncated or damaged ({what}). {AGAIN}")


def _entries(path: Path, header: Any, data_start: int, size: int) -> dict[str, Entry]:
    if not isinstance(header, dict):
        raise damaged(path, "its header is no object")
    entries = {name: _entry(path, name, described, data_start) for name, described in header.items() if name != "__metadata__"}
    end = data_start
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].nbytes)):
        if entry.start != end:
            raise damaged(path, f"{name}: begins at byte {entry.start}, the tensor before it ends at {end}")
        end += entry.nbytes
    if end != size:
        raise damaged(path, f"its header describes {end} bytes, the file has {size}")
    return entries


def _entry(path: Path, name: str, described: Any, data_start: int) -> Entry:
    try:
        (start, stop), shape, dtype = described["data_offsets"], tuple(described["shape"]), str(described["dtype"])
    except (TypeError, KeyError, ValueError) as error:
        raise damaged(path, f"{name}: its header is incomplete ({error!r})") from error
    if not all(isinstance(number, int) and 0 <= number < 2**63 for number in (start, stop, *shape)):
        raise damaged(path, f"{name}: its header has other numbers than sizes and places")
    nbytes = stop - start
    wanted = math.prod(shape) * ITEM_BYTES.get(dtype, 0) if dtype in ITEM_BYTES else nbytes
    if nbytes != wanted:
        raise damaged(path, f"{name}: {dtype} {list(shape)} has {wanted} bytes, the header gives it {nbytes}")
    return Entry(dtype, shape, data_start + start, nbytes)
