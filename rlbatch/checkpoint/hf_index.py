"""Which file of a Hugging Face folder holds which tensor: its safetensors files' headers, checked against the index. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from rlbatch.api import DataError
from rlbatch.checkpoint.safetensors_header import AGAIN, Entry, read_header
from rlbatch.config.foreign import LARGE_BYTES, MissingFileError, read_json

INDEX = "model.safetensors.index.json"
SHARD_FILE = re.compile(r"model-\d+-of-\d+\.safetensors")


def read_headers(folder: Path) -> dict[Path, dict[str, Entry]]:
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
