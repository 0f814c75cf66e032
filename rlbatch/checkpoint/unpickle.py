"""Reads a torch_dist checkpoint's ``.metadata``, which is a pickle, without letting it name anything but the classes of metadata."""

from __future__ import annotations

import pickle
from pathlib import Path, PosixPath
from typing import IO, Any

import torch
from torch.distributed.checkpoint import filesystem, metadata, planner
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata

from rlbatch.api import DataError
from rlbatch.checkpoint.origin import METADATA

_CLASSES: tuple[type, ...] = (
    metadata.BytesStorageMetadata,
    metadata.ChunkStorageMetadata,
    metadata.Metadata,
    metadata.MetadataIndex,
    metadata.StorageMeta,
    metadata.TensorProperties,
    metadata.TensorStorageMetadata,
    metadata._MEM_FORMAT_ENCODING,
    filesystem._StorageInfo,
    # Megatron keeps the plans of the ranks that wrote the checkpoint.
    planner.BytesIOWriteData,
    planner.SavePlan,
    planner.TensorWriteData,
    planner.WriteItem,
    planner.WriteItemType,
)
_ALLOWED: dict[tuple[str, str], Any] = {
    **{(kind.__module__, kind.__qualname__): kind for kind in _CLASSES},
    **{("torch", str(value).removeprefix("torch.")): value for value in vars(torch).values() if isinstance(value, torch.dtype)},
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,  # looks a name up in a table
    # The folder that the checkpoint was written to.
    ("pathlib", "PosixPath"): PosixPath,
    ("pathlib._local", "PosixPath"): PosixPath,
}
"""Everything that a ``.metadata`` may name. None of it does more than keep its arguments."""


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return _ALLOWED[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint's metadata needs") from None


def read_metadata(folder: Path) -> Metadata:
    """What a torch_dist checkpoint holds and where.

    Args:
        folder: The checkpoint's folder.

    Raises:
        DataError: no metadata, damaged metadata, or metadata that names what it must not: nothing of it was executed.
    """
    path = folder / METADATA
    try:
        with path.open("rb") as file:
            return unpickle_metadata(file)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}). Name a complete torch_dist checkpoint.") from error
    except pickle.UnpicklingError as error:
        raise DataError(
            f"{path}: refused: {error}. Do not trust this checkpoint; get it from whoever made it, or convert it anew."
        ) from error


def unpickle_metadata(file: IO[bytes]) -> Metadata:
    """The metadata in an open file.

    Raises:
        pickle.UnpicklingError: it is damaged, or names what it must not.
    """
    loaded = unpickled(_MetadataUnpickler(file))
    try:
        _check(loaded)
    except AttributeError as error:  # a pickle may leave any attribute out
        raise pickle.UnpicklingError(f"it is damaged ({error})") from error
    checked: Metadata = loaded
    return checked


def unpickled(unpickler: pickle.Unpickler) -> Any:
    """What a pickle holds, read by an unpickler that runs none of it.

    Raises:
        pickle.UnpicklingError: it is damaged. Nothing but the loading is in here: these are also the errors of wrong code.
    """
    try:
        return unpickler.load()
    except (AttributeError, EOFError, IndexError, KeyError, MemoryError, OverflowError, TypeError, ValueError) as error:
        raise pickle.UnpicklingError(f"it is damaged ({type(error).__name__}: {error})") from error


def _check(loaded: Any) -> None:
    """Checks all types, and that files lie in the checkpoint's folder: a pickle may fill any attribute with anything."""
    if type(loaded) is not Metadata or not isinstance(loaded.state_dict_metadata, dict) or not isinstance(loaded.storage_data, dict):
        raise pickle.UnpicklingError("it holds no metadata of a checkpoint")
    for key, stored in loaded.state_dict_metadata.items():
        chunks = stored.chunks if type(stored) is TensorStorageMetadata else []
        if type(key) is not str or type(stored) not in (TensorStorageMetadata, BytesStorageMetadata) or not isinstance(chunks, list):
            raise pickle.UnpicklingError(f"its entry {key!r} is none of a tensor")
        if any(type(chunk) is not ChunkStorageMetadata for chunk in chunks):
            raise pickle.UnpicklingError(f"its entry {key!r} has chunks that are none")
    for index, info in loaded.storage_data.items():
        if type(index) is not MetadataIndex or type(info) is not filesystem._StorageInfo:
            raise pickle.UnpicklingError(f"its storage entry {index!r} is none")
        name = info.relative_path
        is_here = type(name) is str and name not in ("", "..") and Path(name).name == name
        if not is_here or type(info.offset) is not int or type(info.length) is not int:
            raise pickle.UnpicklingError(f"its storage entry {index!r} points to {name!r}, which is no file of its folder")
