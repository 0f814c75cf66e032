"""Finds which file of a Hugging Face folder holds which tensor: its headers, checked against the index. Imports no torch."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlbatch.api import DataError
from rlbatch.config.bounded_files import LARGE_BYTES, MissingFileError, open_regular, parse_json, read_json

INDEX = "model.safetensors.index.json"
SHARD_FILE = re.compile(r"model-\d+-of-\d+\.safetensors")


def read_headers(folder: Path) -> dict[Path, dict[str, TensorEntry]]:
    """The tensors of each file, by name.

    Args:
        folder: Folder with one or more safetensors files, with an index if it has one.

    Raises:
        DataError: no safetensors, a damaged one, or an index that does not describe them.
    """
    weight_map = _read_index(folder)
    paths = _listed_files(folder, weight_map) if weight_map else sorted(folder.glob("*.safetensors"))
    headers = {path: read_header(path) for path in paths}
    where: dict[str, Path] = {}
    for path, entries in headers.items():
        for name in entries:
            if name in where:
                raise DataError(f"{path}: {name} is in {where[name].name} too. Remove the file that does not belong to the model.")
            where[name] = path
    if not where:
        raise DataError(f"{folder}: no *.safetensors in it. Download the weights, or convert them to safetensors.")
    if weight_map:
        _check_index(folder / INDEX, weight_map, where)
    return headers


def _read_index(folder: Path) -> dict[str, str]:
    """Tensor -> file; empty without an index."""
    path = folder / INDEX
    try:
        weight_map = read_json(path, AGAIN, LARGE_BYTES).get("weight_map")
    except MissingFileError:
        return {}
    if not isinstance(weight_map, dict) or not weight_map:
        raise DataError(f"{path}: weight_map must map tensors to files. {AGAIN}")
    for file in weight_map.values():
        if not isinstance(file, str) or Path(file).name != file:
            raise DataError(f"{path}: weight_map must map tensors to files of this folder, names {file!r}. {AGAIN}")
    return weight_map


def _listed_files(folder: Path, weight_map: Mapping[str, str]) -> list[Path]:
    listed = set(weight_map.values())
    present = {path.name for path in folder.glob("*.safetensors")}
    if missing := sorted(listed - present):
        raise DataError(f"{folder / missing[0]}: is in {INDEX} and not there ({len(missing)} of {len(listed)} files). Download the rest.")
    if unlisted := sorted(name for name in present - listed if SHARD_FILE.fullmatch(name)):
        raise DataError(f"{folder / unlisted[0]}: is not in {INDEX}. Download the index again, or remove the file.")
    return [folder / name for name in sorted(listed)]


def _check_index(index: Path, weight_map: Mapping[str, str], where: Mapping[str, Path]) -> None:
    for name, file in weight_map.items():
        if name not in where or where[name].name != file:
            other = f", {where[name].name} has it" if name in where else ""
            raise DataError(f"{index}: {name} must be in {file} and is not{other}. Download the folder again.")
    if unlisted := sorted(set(where) - set(weight_map)):
        raise DataError(f"{index}: lacks {unlisted[0]} of {where[unlisted[0]].name} ({len(unlisted)} tensors). {AGAIN}")


ITEM_BYTES = {
    **{"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1},
    **{"I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1},
}
"""Bytes of a value, for each dtype of the format that is read."""
HEADER_LIMIT = 100 * 10**6
"""Most bytes that the format allows a header."""
AGAIN = "Download it again."


@dataclass(frozen=True)
class TensorEntry:
    """The place and form of a tensor in a file.

    Attributes:
        dtype: Name in the header.
        shape: The tensor's shape.
        start: Its first byte in the file.
        nbytes: Its length.
    """

    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


def read_header(path: Path) -> dict[str, TensorEntry]:
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


def _entries(path: Path, header: Any, data_start: int, size: int) -> dict[str, TensorEntry]:
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


def _entry(path: Path, name: str, described: Any, data_start: int) -> TensorEntry:
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
    return TensorEntry(dtype, shape, data_start + start, nbytes)
